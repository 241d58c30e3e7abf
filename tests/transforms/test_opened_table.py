"""Covers `step == update . gradients` for stages, eager and jit, and kinds of steps."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import ODD_TRAINABLE, assert_opened, distributed, odd_batch, odd_loss, odd_params

ODD: dict[str, Any] = {"persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150, "chunk_bytes": 2048}
Wrap = Callable[[Any], Any]


def _optimizer() -> sf.optim.GradientTransformation:
    return sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.adamw(1e-2, weight_decay=0.1))


def _odd(wrap: Wrap, world: int, stage: int, inner: Any = odd_loss, **fields: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        where = {"directory": directory} if "disk" in fields.values() else {}
        zero = sf.Zero.flat(stage=stage, **ODD, **fields, **where)
        batches = [odd_batch(n) for n in range(2)]
        args = (wrap(inner), _optimizer(), odd_params(), batches)
        assert_opened(*args, mesh=sf.make_mesh({"dp": world}), zero=zero, trainable=ODD_TRAINABLE)


def _plain(wrap: Wrap, world: int, stage: int) -> None:
    _odd(wrap, world, stage)


def _accumulate(wrap: Wrap, world: int, stage: int) -> None:
    _odd(wrap, world, stage, sf.accumulate(odd_loss, 2))


def _host(wrap: Wrap, world: int, stage: int) -> None:
    _odd(wrap, world, stage, grads="host", optimizer="host")


def _disk(wrap: Wrap, world: int, stage: int) -> None:
    _odd(wrap, world, stage, sf.accumulate(odd_loss, 2), grads="disk", optimizer="disk")


def _loss_scale(wrap: Wrap, world: int, stage: int) -> None:
    scale = sf.optim.dynamic_loss_scale(2.0**127)
    _odd(wrap, world, stage, sf.mixed_precision(odd_loss, sf.Policy.bf16(), loss_scale=scale), grads="host")


def _weighted_loss(params: dict, batch: dict) -> sf.WeightedMean:
    errors = ((batch["x"] @ params["w"]).sum(1) - batch["y"][:, 0]) ** 2
    weight = batch["y"][:, 1].abs()
    return sf.WeightedMean((errors * weight).sum(), weight.sum())


def _weighted(wrap: Wrap, world: int, stage: int) -> None:
    params = {"w": torch.randn(5, 7, generator=torch.Generator().manual_seed(0))}
    # 11 rows: ranks have unequal numbers.
    batches = [{k: x[:11] for k, x in odd_batch(n).items()} for n in range(2)]
    zero = sf.Zero.flat(stage=stage, **ODD)
    assert_opened(wrap(_weighted_loss), _optimizer(), params, batches, mesh=sf.make_mesh({"dp": world}), zero=zero)


def _stateful(params: dict, model_state: Tensor, batch: dict) -> tuple[Tensor, dict, Tensor]:
    h = batch["x"] @ params["w"]
    mean = 0.9 * model_state + 0.1 * sf.pmean(h.detach().mean(0), "dp")
    return ((h - mean) ** 2).mean(), {"mean": h.mean()}, mean


def _has_state(wrap: Wrap, world: int, stage: int) -> None:
    params = {"w": torch.randn(5, 7, generator=torch.Generator().manual_seed(0))}
    assert_opened(
        wrap(sf.accumulate(_stateful, 2)),
        _optimizer(),
        params,
        [odd_batch(n) for n in range(2)],
        mesh=sf.make_mesh({"dp": world}),
        zero=sf.Zero.flat(stage=stage, **ODD),
        has_state=True,
        has_aux=True,
        model_state=torch.zeros(7),
    )


def _tp_loss(params: dict, batch: dict) -> Tensor:
    h = torch.tanh(batch["x"] @ params["up"].t() + params["bias"])
    return ((sf.psum(h @ params["down"].t(), "tp") + params["shift"] - batch["y"]) ** 2).mean()


def _tensor_parallel(wrap: Wrap, world: int, stage: int) -> None:
    g = torch.Generator().manual_seed(3)
    shapes = {"up": (7, 5), "bias": (7,), "down": (3, 7), "shift": (3,)}
    specs = {"up": sf.P("tp"), "bias": sf.P("tp"), "down": sf.P(None, "tp"), "shift": sf.P()}
    params = {k: torch.randn(s, generator=g) for k, s in shapes.items()}
    mesh = sf.make_mesh({"dp": world // 2, "tp": 2} if world > 1 else {"dp": 1, "tp": 1})
    zero = sf.Zero.flat(stage=stage, **ODD)
    assert_opened(
        wrap(_tp_loss), _optimizer(), params, [odd_batch(n) for n in range(2)], mesh=mesh, specs=specs, zero=zero
    )


KINDS = {
    "plain": _plain,
    "accumulate": _accumulate,
    "host": _host,
    "disk": _disk,
    "loss scale": _loss_scale,
    "weighted": _weighted,
    "model state": _has_state,
    "tensor parallel": _tensor_parallel,
}
WRAPS: dict[str, Wrap] = {"eager": lambda loss: loss, "jit": lambda loss: sf.jit(loss, backend="graph")}


@pytest.mark.nightly
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", KINDS)
@distributed(world=[1, 2])
def test_every_kind_of_step(world: int, kind: str, wrap: str, stage: int) -> None:
    KINDS[kind](WRAPS[wrap], world, stage)


@pytest.mark.nightly
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", ["accumulate", "disk", "weighted"])
@distributed(world=3)
def test_kinds_on_three_ranks(kind: str, wrap: str) -> None:
    KINDS[kind](WRAPS[wrap], 3, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("wrap", WRAPS)
@distributed(world=4)
def test_tensor_parallel_leaves_and_zero_on_four_ranks(wrap: str) -> None:
    for stage in (1, 3):
        _tensor_parallel(WRAPS[wrap], 4, stage)
