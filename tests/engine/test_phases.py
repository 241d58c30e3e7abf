"""Covers optimizers that average for themselves: their gradients in each phase, and refusals."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.collectives import GlobalTensor, axis_index, axis_size, current_mesh
from shardfn.core import PyTree, tree_flatten, tree_leaves, tree_map, tree_unflatten
from shardfn.testing import (
    ODD_TRAINABLE,
    assert_same,
    distributed,
    odd_batch,
    odd_loss,
    odd_params,
    on_mesh,
    one_device,
    shard_rows,
)

ODD: dict[str, Any] = {"persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150}
STEPS = 4


class Averaged(NamedTuple):
    steps: Tensor
    ranks: Any
    inner: PyTree


def averaging(inner: optim.GradientTransformation, start: int, over: tuple[str, ...]) -> optim.GradientTransformation:
    """`inner`, on gradients that the rule averages itself from step `start` on."""

    def phase(state: Averaged) -> optim.Phase:
        return optim.Phase("own", True) if int(state.steps) >= start else optim.Phase("given", False)

    def made(now: optim.Phase | None, leaves: PyTree = None) -> optim.GradientTransformation:
        def init(params: PyTree) -> Averaged:
            mesh = current_mesh()
            own = torch.tensor([axis_index(over)], dtype=torch.float32)
            kept = GlobalTensor(own, torch.Size([axis_size(over)]), sf.P(over), mesh)
            return Averaged(torch.zeros((), dtype=torch.int32), kept, inner.init(params))

        def update(grads: PyTree, state: Averaged, params: PyTree = None, *, specs: PyTree = None) -> Any:
            at = now or phase(state)
            gs, treedef = tree_flatten(grads)
            if at.local:
                gs = [optim.reduce_gradient(g, leaf) for g, leaf in zip(gs, tree_leaves(leaves), strict=True)]
            for g, p in zip(gs, tree_leaves(params), strict=True):
                assert g.shape == p.shape
            us, new = inner.update(tree_unflatten(treedef, gs), state.inner, params, specs=specs)
            return us, Averaged(state.steps + 1, state.ranks + 1.0, new)

        def on(params: PyTree, stats: Any, phase: optim.Phase | None) -> optim.GradientTransformation:
            return made(phase, params)

        needs = optim.Needs(bind_stats=on, phases=optim.Phases(over, phase))
        return optim.GradientTransformation(init, update, needs=needs)

    return made(None)


def _inner(run: Any) -> Any:
    """The part of a run that the inner rule determines."""
    return run._replace(opt_state=run.opt_state.inner, metrics=[])


@pytest.mark.nightly
@distributed(world=[1, 2, 3])
def test_gradients_add_up_to_those_that_are_given(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    batches = [odd_batch(n) for n in range(STEPS)]
    tx = averaging(optim.adamw(1e-2), 2, ("dp",))
    want = one_device(odd_loss, optim.adamw(1e-2), odd_params(), batches, trainable=ODD_TRAINABLE)
    for stage in range(4):
        options: dict[str, Any] = {"mesh": mesh, "zero": sf.Zero.flat(stage=stage, **ODD), "trainable": ODD_TRAINABLE}
        for loss in (odd_loss, sf.accumulate(odd_loss, 2)) if stage in (0, 2) else (odd_loss,):
            run = on_mesh(loss, tx, odd_params(), batches, **options)
            assert_same(_inner(run), want._replace(metrics=[]))
            assert int(run.opt_state.steps) == STEPS
            assert run.opt_state.ranks.tolist() == [STEPS + rank for rank in range(world)]
            for got, given in zip(run.metrics, want.metrics, strict=True):
                assert torch.allclose(got["loss"], given["loss"], rtol=1e-6)
                # The mean of the ranks' squared norms: never below the norm of the mean.
                assert got["grad_norm"] >= given["grad_norm"] * (1 - 1e-6)
            assert torch.allclose(run.metrics[1]["grad_norm"], want.metrics[1]["grad_norm"], rtol=1e-6)
        if stage not in (0, 3):
            continue
        jitted = on_mesh(sf.jit(odd_loss, backend="graph"), tx, odd_params(), batches, **options)
        assert_same(jitted, on_mesh(odd_loss, tx, odd_params(), batches, **options), exact=True)


def _weighted(params: dict, batch: dict) -> sf.WeightedMean:
    errors = (batch["x"] @ params["w"] - batch["y"][:, 0]) ** 2
    return sf.WeightedMean(errors.sum(), torch.tensor(errors.numel()))


@pytest.mark.nightly
@distributed(world=3)
def test_weights_masters_and_loss_scales() -> None:
    mesh = sf.make_mesh({"dp": 3})
    params = {"w": torch.randn(5, generator=torch.Generator().manual_seed(6))}
    batches = [{k: v[:10] for k, v in odd_batch(n).items()} for n in range(STEPS)]  # 4, 4 and 2 rows
    tx = optim.chain(averaging(optim.scale_by_adam(), 1, ("dp",)), optim.scale_by_learning_rate(1e-2))
    plain = optim.chain(optim.scale_by_adam(), optim.scale_by_learning_rate(1e-2))
    for stage in (0, 1):
        zero = sf.Zero.flat(stage=stage, **ODD)
        run = on_mesh(_weighted, tx, params, batches, mesh=mesh, zero=zero)
        want = on_mesh(_weighted, plain, params, batches, mesh=mesh, zero=zero)
        assert_same(
            run._replace(opt_state=run.opt_state[0].inner, metrics=[]),
            want._replace(opt_state=want.opt_state[0], metrics=[]),
        )
        mixed = sf.mixed_precision(_weighted, sf.Policy(param=torch.bfloat16), loss_scale=optim.static_loss_scale(8.0))
        state = on_mesh(mixed, tx, params, batches, mesh=mesh, zero=zero)
        assert all(torch.isfinite(x).all() for x in tree_leaves(state.params))
        assert int(state.opt_state.inner[0].steps) == STEPS


@pytest.mark.nightly
@distributed(world=4)
def test_states_are_cut_over_other_axes_at_every_stage() -> None:
    mesh = sf.make_mesh({"node": 2, "gpu": 2})
    batches = [odd_batch(n) for n in range(STEPS)]
    tx = averaging(optim.adamw(1e-2), 1, ("node",))
    want = one_device(odd_loss, optim.adamw(1e-2), odd_params(), batches)
    for stage in (0, 1, 3):
        zero = sf.Zero.flat(stage=stage, axis="gpu", **ODD)
        run = on_mesh(odd_loss, tx, odd_params(), batches, mesh=mesh, zero=zero, batch=sf.P(("node", "gpu")))
        assert_same(_inner(run), want._replace(metrics=[]))
        both = sf.Zero.flat(stage=stage, axis=("node", "gpu"), **ODD)
        run = on_mesh(odd_loss, tx, odd_params(), batches, mesh=mesh, zero=both, batch=sf.P(("node", "gpu")))
        assert_same(_inner(run), want._replace(metrics=[]))


@pytest.mark.nightly
@distributed(world=2)
def test_conflicting_options_are_refused() -> None:
    mesh = sf.make_mesh({"dp": 2})
    tx = averaging(optim.sgd(0.1), 0, ("dp",))
    with pytest.raises(ValueError, match="keep them on the device"):
        sf.sharded_step(odd_loss, tx, mesh=mesh, zero=sf.Zero(optimizer="host")).init(odd_params())
    for over, axes, why in (
        (("tp",), {"dp": 2}, r"no such axis of more than one rank.*pass the optimizer axis='dp'"),
        (("dp", "tp"), {"dp": 2, "tp": 2}, "the batch is not cut along 'tp'"),
    ):
        idle, abstract = averaging(optim.sgd(0.1), 0, over), sf.make_mesh(axes, abstract=True)
        with pytest.raises(ValueError, match=why):
            sf.sharded_step(odd_loss, idle, mesh=abstract, batch=sf.P("dp")).init(odd_params())
    step = sf.sharded_step(odd_loss, tx, mesh=mesh)
    rows = shard_rows(odd_batch(0), sf.P("dp"), mesh)
    with pytest.raises(ValueError, match="phase of a state without values is unknown"):
        step.lower(odd_params(), rows)
    local = step.lower(odd_params(), rows, phase=optim.Phase("own", True)).cost_analysis().transfers
    given = step.lower(odd_params(), rows, phase=optim.Phase("given", False)).cost_analysis().transfers
    assert ("all_reduce", "dp") in given and ("all_reduce", "dp") not in local
    with pytest.raises(ValueError, match="phase="):
        sf.sharded_step(odd_loss, optim.sgd(0.1), mesh=mesh).lower(odd_params(), rows, phase=optim.Phase("own", True))
    for wrong in (lambda: optim.chain(tx, tx), lambda: optim.chain(optim.clip_by_global_norm(1.0), tx)):
        with pytest.raises(ValueError, match=r"average.* (itself|themselves)"):
            wrong()
    for wrong in (lambda: optim.delayed(tx), lambda: optim.masked(tx, True)):
        with pytest.raises(
            ValueError, match=r"averages gradients itself, such as rule 0, which averages over \('dp',\)"
        ):
            wrong()


@distributed(world=2)
def test_a_step_that_overflows_leaves_the_state_unchanged() -> None:
    mesh = sf.make_mesh({"dp": 2})
    tx = averaging(optim.sgd(0.1), 1, ("dp",))
    step = sf.sharded_step(lambda w, x: (w * x).mean(), tx, mesh=mesh, skip_nonfinite=True)
    state = step.init(torch.ones(2))
    rank = mesh.axis_index("dp")
    state, _ = step(state, torch.ones(2, 2))
    before = tree_map(torch.clone, (sf.collectives.unshard(state.params), sf.collectives.unshard(state.opt_state)))
    state, metrics = step(state, torch.full((2, 2), float("inf") if rank else 1.0))
    assert bool(metrics["skipped"])
    after = sf.collectives.unshard(state.params), sf.collectives.unshard(state.opt_state)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(after), tree_leaves(before), strict=True))
