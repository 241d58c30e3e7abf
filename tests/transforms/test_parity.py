"""Covers the law: sharded runs equal one device, for stages x worlds x optimizers x accumulate x clip x remat."""

import itertools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import optim
from shardfn.testing import (
    ODD_TRAINABLE,
    assert_same,
    distributed,
    odd_batch,
    odd_loss,
    odd_params,
    on_mesh,
    one_device,
)

OPTIMIZERS = {
    "sgd": lambda: optim.sgd(1e-3, momentum=0.9),
    "adam": lambda: optim.adam(1e-2),
    "adamw": lambda: optim.adamw(1e-2, weight_decay=0.1),
    "lamb": lambda: optim.lamb(1e-2, weight_decay=0.1),
    "lion": lambda: optim.lion(1e-3, weight_decay=0.1),
    "averaged": lambda: optim.average_params(optim.adamw(1e-2), 0.9, debias=True),
}
STEPS = 3
# Small enough that the odd leaves fall on both sides of each threshold.
ODD: dict[str, Any] = {"persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150}


def _optimizer(name: str, clip: bool) -> sf.optim.GradientTransformation:
    inner = OPTIMIZERS[name]()
    return sf.optim.chain(sf.optim.clip_by_global_norm(0.1), inner) if clip else inner


def _loss(microbatches: int, remat: bool):
    loss = sf.remat(odd_loss) if remat else odd_loss
    return sf.accumulate(loss, microbatches) if microbatches > 1 else loss


@pytest.mark.parametrize(
    "name", [x if x == "adamw" else pytest.param(x, marks=pytest.mark.nightly) for x in OPTIMIZERS]
)
@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_stages_equal_one_device_and_one_another(world: int, name: str) -> None:
    _compare_stages(world, name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world=4)
def test_stages_equal_one_device_on_four_ranks(name: str) -> None:
    _compare_stages(4, name)


def _compare_stages(world: int, name: str) -> None:
    mesh = sf.make_mesh({"dp": world})
    batches = [odd_batch(n) for n in range(STEPS)]
    for clip in (False, True):
        optimizer = _optimizer(name, clip)
        want = one_device(odd_loss, optimizer, odd_params(), batches, trainable=ODD_TRAINABLE)
        for microbatches, remat in itertools.product((1, 3), (False, True)):
            loss = _loss(microbatches, remat)
            runs = [
                on_mesh(
                    loss,
                    optimizer,
                    odd_params(),
                    batches,
                    mesh=mesh,
                    zero=sf.Zero.flat(stage=stage, **ODD),
                    trainable=ODD_TRAINABLE,
                )
                for stage in range(4)
            ]
            for run in runs:
                assert_same(run, want)
            assert_same(runs[2], runs[1], exact=True)
            assert_same(runs[3], runs[1], exact=True)


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_remat_is_bit_identical(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    for stage in range(4):
        args = (sf.optim.adamw(1e-2), odd_params(), [odd_batch(n) for n in range(STEPS)])
        zero = sf.Zero.flat(stage=stage, **ODD)
        plain = on_mesh(odd_loss, *args, mesh=mesh, zero=zero)
        assert_same(on_mesh(sf.remat(odd_loss), *args, mesh=mesh, zero=zero), plain, exact=True)


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_thresholds_never_change_a_bit(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    args = (sf.accumulate(odd_loss, 2), sf.optim.adamw(1e-2), odd_params(), [odd_batch(n) for n in range(STEPS)])
    want = on_mesh(*args, mesh=mesh, zero=sf.Zero(stage=3))
    for persist, bucket, prefetch in itertools.product((0, 10), (0, 64, 10**6), (0, 100)):
        zero = sf.Zero(
            stage=3,
            persist_elements=persist,
            travel=sf.Travel(bucket_bytes=bucket),
            pace=sf.Pace(prefetch_bytes=prefetch),
        )
        run = on_mesh(*args, mesh=mesh, zero=zero)
        assert_same(run._replace(metrics=[]), want._replace(metrics=[]), exact=True)


@pytest.mark.nightly
@distributed(world=[2, 4])
def test_reduce_once_equals_reduce_each(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    batches = [odd_batch(n) for n in range(STEPS)]
    want = one_device(odd_loss, sf.optim.adamw(1e-2), odd_params(), batches)
    for stage in range(4):
        zero = sf.Zero.flat(stage=stage, accumulate="once", **ODD)
        got = on_mesh(sf.accumulate(odd_loss, 3), sf.optim.adamw(1e-2), odd_params(), batches, mesh=mesh, zero=zero)
        assert_same(got, want)


@pytest.mark.nightly
@pytest.mark.parametrize("batch", [sf.P(("dp", "sp")), sf.P("sp")], ids=str)
@distributed(world=4)
def test_batch_over_two_axes_and_zero_over_one(batch: sf.P) -> None:
    mesh = sf.make_mesh({"dp": 2, "sp": 2})
    batches = [odd_batch(n) for n in range(STEPS)]
    want = one_device(odd_loss, sf.optim.lamb(1e-2), odd_params(), batches)
    for stage, axis in [(0, "dp"), *itertools.product((1, 3), ("dp", ("dp", "sp"), ("sp", "dp")))]:
        zero = sf.Zero.flat(stage=stage, axis=axis, **ODD)
        got = on_mesh(odd_loss, sf.optim.lamb(1e-2), odd_params(), batches, mesh=mesh, zero=zero, batch=batch)
        assert_same(got, want)
    zero = sf.Zero.flat(stage=3, axis=("dp", "sp"), secondary_axis="sp", **ODD)
    batch = sf.P(("dp", "sp"))
    assert_same(on_mesh(odd_loss, sf.optim.lamb(1e-2), odd_params(), batches, mesh=mesh, zero=zero, batch=batch), want)


def _tp_loss(params: dict, batch: dict) -> torch.Tensor:
    """Column- then row-parallel; the blocks' sizes come from the specs, 7 over 2 among them."""
    h = torch.tanh(sf.pvary(batch["x"], "tp") @ params["up"].t() + params["bias"])
    out = sf.psum(h @ params["down"].t(), "tp") + params["shift"]
    return ((out - batch["y"]) ** 2).mean()


@pytest.mark.nightly
@pytest.mark.parametrize("stages", [(3,), pytest.param((0, 1, 2), marks=pytest.mark.nightly)])
@distributed(world=4)
def test_tensor_parallel_leaves_compose_with_every_stage(stages: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(3)
    params = {
        "up": torch.randn(7, 5, generator=g),
        "bias": torch.randn(7, generator=g),
        "down": torch.randn(3, 7, generator=g),
        "shift": torch.randn(3, generator=g),
    }
    specs = {"up": sf.P("tp"), "bias": sf.P("tp"), "down": sf.P(None, "tp"), "shift": sf.P()}
    batches = [odd_batch(n) for n in range(STEPS)]
    for name, clip in (("adamw", False), ("lamb", True)):
        optimizer = _optimizer(name, clip)
        want = one_device(_tp_loss, optimizer, params, batches)
        for shape in ({"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"dp": 1, "tp": 4}):
            mesh = sf.make_mesh(shape)
            for stage in stages:
                zero = sf.Zero.flat(stage=stage, **ODD)
                loss = sf.accumulate(_tp_loss, 1 + (stage > 1))
                assert_same(on_mesh(loss, optimizer, params, batches, mesh=mesh, zero=zero, specs=specs), want)


def _weighted_loss(params: dict, batch: dict) -> sf.WeightedMean:
    errors = ((batch["x"] @ params["w"] - batch["y"][:, 0]) ** 2) * batch["mask"]
    return sf.WeightedMean(errors.sum(), batch["mask"].sum())


@pytest.mark.nightly
@distributed(world=[1, 3])
def test_weighted_mean_is_the_global_mean_for_uneven_ranks(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    g = torch.Generator().manual_seed(5)
    # 8 rows over 3 ranks: 3, 3 and 2 rows; on some ranks no row counts
    batches = []
    for _ in range(STEPS):
        mask = torch.tensor([1.0, 0, 1, 0, 0, 0, 1, 1])
        batches.append({"x": torch.randn(8, 5, generator=g), "y": torch.randn(8, 1, generator=g), "mask": mask})
    params = {"w": torch.randn(5, generator=g)}
    want = one_device(_weighted_loss, sf.optim.adam(1e-2), params, batches)
    for stage in range(4):
        zero = sf.Zero.flat(stage=stage, **ODD)
        assert_same(on_mesh(_weighted_loss, sf.optim.adam(1e-2), params, batches, mesh=mesh, zero=zero), want)


def _noisy_loss(params: dict, batch: dict, key: torch.Tensor) -> torch.Tensor:
    x = sf.nn.dropout(key, batch["x"], 0.5, batch["index"])
    return ((x @ params["w"] - batch["y"][:, 0]) ** 2).mean()


@pytest.mark.nightly
@distributed(world=[1, 2, 4])
def test_dropout_draws_the_same_bits_under_any_sharding(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    params = {"w": torch.randn(5, generator=torch.Generator().manual_seed(6))}
    batches = [odd_batch(n) | {"index": torch.arange(12) + 12 * n} for n in range(STEPS)]
    want = one_device(_noisy_loss, sf.optim.sgd(0.1), params, batches, key=sf.key(7))
    for stage, microbatches, remat in itertools.product(range(4), (1, 3), (False, True)):
        loss = sf.remat(_noisy_loss) if remat else _noisy_loss
        got = on_mesh(
            sf.accumulate(loss, microbatches),
            sf.optim.sgd(0.1),
            params,
            batches,
            mesh=mesh,
            key=sf.key(7),
            zero=sf.Zero.flat(stage=stage, **ODD),
        )
        assert_same(got, want)
