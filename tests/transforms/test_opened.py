"""Covers the opened step: `step == update . gradients`, bit for bit, for stages x memories x transforms."""

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import (
    ODD_TRAINABLE,
    assert_opened,
    assert_same,
    distributed,
    odd_batch,
    odd_loss,
    odd_params,
    one_device,
)

ODD: dict[str, Any] = {"persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150, "chunk_bytes": 2048}
STEPS = 3


def _optimizer() -> sf.optim.GradientTransformation:
    return sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.adamw(1e-2, weight_decay=0.1))


def _opened(
    loss: Any, world: int, stage: int, *, grads: str = "device", kept: str = "host", **options: Any
) -> sf.testing.Run:
    mesh = options.pop("mesh", None) or sf.make_mesh({"dp": world})
    with tempfile.TemporaryDirectory() as directory:
        away: dict[str, Any] = {} if grads == "device" else {"grads": grads, "optimizer": kept, "params": kept}
        away |= {"directory": directory} if "disk" in (grads, kept) else {}
        zero = sf.Zero.flat(stage=stage, **ODD, **away)
        given: dict[str, Any] = {
            "optimizer": _optimizer(),
            "params": odd_params(),
            "batches": [odd_batch(n) for n in range(STEPS)],
            "trainable": ODD_TRAINABLE,
        }
        return assert_opened(loss, mesh=mesh, zero=zero, **(given | options))


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.nightly)])
@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2, pytest.param(3, marks=pytest.mark.nightly)])
def test_every_stage(world: int, accumulate: int) -> None:
    batches = [odd_batch(n) for n in range(STEPS)]
    want = one_device(odd_loss, _optimizer(), odd_params(), batches, trainable=ODD_TRAINABLE)
    for stage in range(4):
        assert_same(_opened(sf.accumulate(odd_loss, accumulate), world, stage), want)


@pytest.mark.nightly
@pytest.mark.parametrize("grads", ["host", "disk"])
@pytest.mark.parametrize("kept", ["host", "disk"])  # on disk the step updates beside the backward, and halves cannot
@distributed(world=[1, 2])
def test_gradients_that_wait_elsewhere(world: int, grads: str, kept: str) -> None:
    for stage in (1, 2, 3):
        _opened(sf.accumulate(odd_loss, 2), world, stage, grads=grads, kept=kept)


@pytest.mark.nightly
@distributed(world=[2])
def test_an_update_commits_the_state(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    with tempfile.TemporaryDirectory() as own:
        places: list[Any] = [None] * world
        torch.distributed.all_gather_object(places, own)
        zero = sf.Zero.flat(stage=3, params="disk", grads="disk", optimizer="disk", directory=places[0], **ODD)
        step = sf.sharded_step(odd_loss, _optimizer(), mesh=mesh, zero=zero)
        state = step.init(odd_params())
        for n in range(2):
            rows = sf.testing.shard_rows(odd_batch(n), sf.P("dp"), mesh)
            grads, _ = step.gradients(state, rows)
            state, _ = step.update(state, grads)
        want = sf.unshard(state.params)
        del state
        step.close()
        again = sf.sharded_step(odd_loss, _optimizer(), mesh=mesh, zero=zero)
        state = again.resume(odd_params())
        assert int(state.step) == 2
        for a, b in zip(sf.tree_leaves(sf.unshard(state.params)), sf.tree_leaves(want), strict=True):
            assert torch.equal(a, b)
        again.close()
        torch.distributed.barrier()


def _weighted(params: dict, batch: dict) -> sf.WeightedMean:
    errors = ((batch["x"] @ params["w"] - batch["y"][:, 0]) ** 2) * batch["mask"]
    return sf.WeightedMean(errors.sum(), batch["mask"].sum())


def _masked(n: int) -> dict:
    return odd_batch(n) | {"mask": torch.tensor([1.0, 0, 1, 0, 0, 0, 1, 1, 0, 1, 0, 0])}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "grads",
    ["device", "host", "disk"],
)
@distributed(world=[1, 3])
def test_a_weighted_mean(world: int, grads: str) -> None:
    params = {"w": torch.randn(5, generator=torch.Generator().manual_seed(6))}
    batches = [_masked(n) for n in range(STEPS)]
    given: dict[str, Any] = {"params": params, "batches": batches, "trainable": None}
    want = one_device(_weighted, _optimizer(), params, batches)
    for stage in (0, 2, 3):
        zero = 0 if stage == 0 else stage
        if grads == "device" or stage:
            assert_same(_opened(_weighted, world, zero, grads=grads, **given), want)


@pytest.mark.nightly
@pytest.mark.parametrize("overflows", [False, True])
@distributed(world=[1, 2])
def test_a_loss_scale(world: int, overflows: bool) -> None:
    scale = sf.optim.dynamic_loss_scale(2.0**127 if overflows else 2.0**10)
    loss = sf.mixed_precision(odd_loss, sf.Policy.bf16(), loss_scale=scale)
    for stage in (0, 1, 3):
        run = _opened(loss, world, stage)
        assert bool(run.metrics[0]["skipped"]) == overflows


def _explodes(params: dict, batch: dict) -> Tensor:
    """Not finite in the second batch, while its gradients are."""
    return (batch["x"] @ params["w"]).mean() + batch["bad"].mean()


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_loss_that_is_not_finite_while_its_gradients_are(world: int) -> None:
    batches = [odd_batch(n) | {"bad": torch.full((12,), float("inf") if n == 1 else 0.0)} for n in range(STEPS)]
    given: dict[str, Any] = {"params": {"w": torch.ones(5)}, "batches": batches, "trainable": None}
    run = _opened(_explodes, world, 3, skip_nonfinite=True, **given)
    assert [bool(m["skipped"]) for m in run.metrics] == [False, True, False]


def _counts(params: dict, model_state: dict, batch: dict) -> tuple[Tensor, dict, dict]:
    h = batch["x"] @ params["w"]
    mean = 0.9 * model_state["mean"] + 0.1 * sf.pmean(h.detach().mean(), "dp")
    return ((h - mean) ** 2).mean(), {"mean": h.mean()}, {"mean": mean, "same": model_state["same"]}


@pytest.mark.nightly
@distributed(world=[1, 2])
def test_a_model_state_and_aux(world: int) -> None:
    given: dict[str, Any] = {
        "params": {"w": torch.ones(5)},
        "model_state": {"mean": torch.zeros(()), "same": torch.ones(3)},
        "trainable": None,
    }
    for loss in (_counts, sf.accumulate(_counts, 3)):
        run = _opened(loss, world, 3, has_state=True, has_aux=True, **given)
        assert run.model_state["mean"] != 0


def _noisy(params: dict, batch: dict, key: Tensor) -> Tensor:
    x = sf.nn.dropout(key, batch["x"], 0.5, batch["index"])
    return ((x @ params["w"] - batch["y"][:, 0]) ** 2).mean()


@distributed(world=[2])
def test_a_key(world: int) -> None:
    batches = [odd_batch(n) | {"index": torch.arange(12) + 12 * n} for n in range(STEPS)]
    given: dict[str, Any] = {"params": {"w": torch.ones(5)}, "batches": batches, "trainable": None}
    _opened(_noisy, world, 3, key=sf.key(7), **given)


@pytest.mark.nightly
@distributed(world=[1, 2])
def test_canonical_sums(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    zero = sf.Zero(stage=3, persist_elements=2, reduction="canonical", reduction_chunks=4)
    args = (odd_loss, _optimizer(), odd_params(), [odd_batch(n) for n in range(STEPS)])
    assert_opened(*args, mesh=mesh, zero=zero, trainable=ODD_TRAINABLE, batch=sf.P("dp"))


def _tp_loss(params: dict, batch: dict) -> Tensor:
    h = torch.tanh(batch["x"] @ params["up"].t() + params["bias"])
    return ((sf.psum(h @ params["down"].t(), "tp") + params["shift"] - batch["y"]) ** 2).mean()


@distributed(world=[2])
def test_tensor_parallel_leaves(world: int) -> None:
    g = torch.Generator().manual_seed(3)
    shapes = {"up": (7, 5), "bias": (7,), "down": (3, 7), "shift": (3,)}
    params = {k: torch.randn(s, generator=g) for k, s in shapes.items()}
    specs = {"up": sf.P("tp"), "bias": sf.P("tp"), "down": sf.P(None, "tp"), "shift": sf.P()}
    given: dict[str, Any] = {"params": params, "specs": specs, "trainable": None}
    _opened(_tp_loss, world, 0, mesh=sf.make_mesh({"tp": 2}), **given)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stage", "grads"),
    [
        (3, "device"),
        pytest.param(0, "device", marks=pytest.mark.nightly),
        pytest.param(1, "device", marks=pytest.mark.nightly),
        pytest.param(2, "host", marks=pytest.mark.nightly),
        pytest.param(3, "disk", marks=pytest.mark.nightly),
    ],
)
@distributed(world=[1, 2])
def test_a_jitted_step(world: int, stage: int, grads: str) -> None:
    _opened(sf.jit(sf.accumulate(odd_loss, 2), backend="graph"), world, stage, grads=grads)


@pytest.mark.nightly
@distributed(world=[2])
def test_a_jitted_step_with_a_loss_scale_and_a_model_state(world: int) -> None:
    scale = sf.optim.dynamic_loss_scale(2.0**127)
    loss = sf.jit(sf.mixed_precision(_counts, sf.Policy.bf16(), loss_scale=scale), backend="graph")
    model_state = {"mean": torch.zeros(()), "same": torch.ones(3)}
    given: dict[str, Any] = {"params": {"w": torch.ones(5)}, "model_state": model_state, "trainable": None}
    run = _opened(loss, world, 3, has_state=True, has_aux=True, **given)
    assert bool(run.metrics[0]["skipped"])


@pytest.mark.nightly
@distributed(world=[2])
def test_a_captured_step_counts_a_graph_for_each_half(world: int) -> None:
    step = sf.sharded_step(sf.jit(odd_loss, backend="graph"), _optimizer(), mesh=sf.make_mesh({"dp": world}), zero=2)
    state = step.init(odd_params())
    for n in range(3):
        grads, _ = step.gradients(state, sf.testing.shard_rows(odd_batch(n), sf.P("dp"), step.mesh))
        state, _ = step.update(state, grads)
    assert step.cache_info().currsize == 2
    assert step.cache_info().misses == 2


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_halves_under_vmap(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    step = sf.sharded_step(odd_loss, _optimizer(), mesh=mesh, zero=sf.Zero.flat(stage=3, **ODD))
    states = sf.stack([step.init(sf.tree_map(lambda x, k=k: x * k, odd_params())) for k in (0.5, 1.0)])
    batch = sf.testing.shard_rows(odd_batch(0), sf.P("dp"), mesh)
    want, metrics = torch.func.vmap(step, in_dims=(0, None))(states, batch)
    grads, measured = torch.func.vmap(step.gradients, in_dims=(0, None))(states, batch)
    got, updated = torch.func.vmap(step.update)(states, grads)
    for a, b in zip(sf.tree_leaves(want), sf.tree_leaves(got), strict=True):
        a, b = (x.local if isinstance(x, sf.GlobalTensor) else x for x in (a, b))
        assert torch.equal(a, b)
    assert torch.equal(metrics["grad_norm"], measured["grad_norm"])
    torch.testing.assert_close(updated["grad_norm"], measured["grad_norm"])


def test_a_derivative_through_an_update() -> None:
    """The derivative of the next loss by a factor k of the gradient, for `w - 0.1 k g` and the loss `sum(w^2)`."""
    step = sf.sharded_step(lambda w, x: (w * x).square().sum(), sf.optim.sgd(0.1))
    state, x = step.init(torch.tensor([1.0, 2.0])), torch.ones(2)

    def after(k: Tensor) -> Tensor:
        grads, _ = step.gradients(state, x)
        new, _ = step.update(state, grads.with_block(k * grads.local))
        return step.loss(new.params, x)

    # d/dk sum((1 - 0.2 k)^2 w^2) = -0.4 (1 - 0.2 k) sum(w^2)
    torch.testing.assert_close(torch.func.grad(after)(torch.tensor(1.0)), torch.tensor(-0.4 * 0.8 * 5.0))


def _stacked_loss(params: dict, batch: dict) -> Tensor:
    h, _ = sf.scan(lambda h, w: (torch.tanh(h @ w), None), batch["x"], params["w"])
    return ((h[:, :3] - batch["y"]) ** 2).mean()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "grads",
    ["device", "host", "disk"],
)
@distributed(world=[2])
def test_stacked_leaves(world: int, grads: str) -> None:
    given: dict[str, Any] = {
        "params": {"w": torch.randn(4, 5, 5, generator=torch.Generator().manual_seed(5))},
        "specs": {"w": sf.Sharding(sf.P(), stacked=True)},
        "trainable": None,
    }
    for loss in (_stacked_loss, sf.jit(_stacked_loss, backend="graph")):
        _opened(loss, world, 3, grads=grads, **given)


@pytest.mark.nightly
@pytest.mark.parametrize("grads", ["host", "disk"])
def test_changed_gradients_of_leaves_elsewhere(grads: str) -> None:
    """Twice the gradient is the gradient of twice the loss, eager and jitted."""
    found = []
    for factor, wrap in [(2.0, lambda f: f), (1.0, lambda f: f), (1.0, lambda f: sf.jit(f, backend="graph"))]:
        with tempfile.TemporaryDirectory() as directory:
            where = {"directory": directory} if grads == "disk" else {}
            zero = sf.Zero.flat(stage=2, grads=grads, optimizer="host", **where, **ODD)
            loss = wrap(lambda p, b, k=factor: k * odd_loss(p, b))
            step = sf.sharded_step(loss, sf.optim.sgd(0.1), zero=zero)
            state = step.init(odd_params())
            for n in range(2):
                tree, _ = step.gradients(state, odd_batch(n))
                tree = sf.tree_map(lambda g, k=factor: g.with_block(g.local * (2 / k)), tree)
                state, _ = step.update(state, tree)
            found.append(sf.unshard(state.params))
            step.close()
    for a, b, c in zip(*map(sf.tree_leaves, found), strict=True):
        torch.testing.assert_close(a, b)
        assert torch.equal(b, c)


@pytest.mark.nightly
@distributed(world=[1, 2], timeout=200)
def test_halves_compiled_by_inductor_equal_the_step() -> None:
    mesh = sf.make_mesh({"dp": -1})
    step = sf.sharded_step(sf.jit(odd_loss, backend="inductor"), _optimizer(), mesh=mesh, zero=3)
    whole, halves = step.init(odd_params()), step.init(odd_params())
    for n in range(3):
        rows = {k: v[2 * mesh.rank : 2 * mesh.rank + 2] for k, v in odd_batch(n).items()}
        whole, metrics = step(whole, rows)
        grads, found = step.gradients(halves, rows)
        halves, _ = step.update(halves, grads, finite=found["finite"])
        # Two graphs and one are compiled apart, so their sums may round otherwise.
        torch.testing.assert_close(found["loss"], metrics["loss"])
        torch.testing.assert_close(sf.unshard(halves.params), sf.unshard(whole.params))
