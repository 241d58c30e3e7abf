"""Covers pipelines whose stacks travel layer by layer: equal to one device, and gathered one by one."""

import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P, Sharding, Zero, optim
from shardfn.testing import assert_parity, distributed

from .test_pipeline import ODD, B, _batches, _block, _first, _last, _loss, _params, _parity, _plain


def _stacked(params: Any) -> Any:
    by_layer = Sharding(P("pp"), stacked=True)
    return sf.tree_map(lambda _: P(), params) | {"blocks": sf.tree_map(lambda _: by_layer, params["blocks"])}


def _same(mesh: sf.Mesh, layers: int, *args: Any, chunks: int = 1, **options: Any) -> Any:
    return _parity(mesh, layers, *args, chunks=chunks, specs=_stacked(_params(layers, chunks=chunks)), **options)


@pytest.mark.nightly
@distributed(world=4)
def test_it_equals_one_device() -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu")
    for stage in (0, 3):
        _same(mesh, 5, _loss(m=3), zero=Zero.flat(stage=stage, **ODD))
    _same(mesh, 5, _loss(m=3, schedule="zb-h1"), zero=Zero.flat(stage=2, accumulate="once", **ODD))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v"])
@distributed(world=4)
def test_every_schedule_and_stage(schedule: str, stage: int) -> None:
    mesh, chunks = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu"), 1 + (schedule[-1] in "vd")
    lamb = optim.chain(optim.clip_by_global_norm(0.05), optim.lamb(1e-2, weight_decay=0.1))
    reverses = {"reference": _reverse} if schedule.endswith("-v") else {}
    for block, accumulate in ((_block, "each"), (sf.remat(_block), "once")):
        loss = _loss(m=6, block=block, schedule=schedule, num_chunks=chunks)
        zero = Zero.flat(stage=stage, accumulate=accumulate, **ODD)
        _same(mesh, 7, loss, chunks=chunks, zero=zero, optimizer=lamb, **reverses)


def _reverse(p: Any, batch: Any) -> Any:
    x = _first(p, batch)
    for c, stack in enumerate(p["blocks"]):
        rows = range(stack["g"].shape[0])
        for i in reversed(rows) if c % 2 else rows:
            x = _block({k: v[i] for k, v in stack.items()}, x)
    return _last(p, x, batch)


def _run(specs: Any, jit: Any, mesh: sf.Mesh, stage: int, **options: Any) -> Any:
    params = _params(7)
    loss = _loss(m=6, **options)
    zero = Zero.flat(stage=stage, **ODD)
    step = sf.sharded_step(
        loss if jit is None else jit(loss), optim.adamw(1e-2), mesh=mesh, specs=specs(params), batch=P("dp"), zero=zero
    )
    state = step.init(params)
    for batch in _batches():
        own = slice(mesh.coords["dp"] * (B // 2), (mesh.coords["dp"] + 1) * (B // 2))
        state, _ = step(state, sf.tree_map(lambda x, own=own: x[own], batch))
    return sf.unshard(state.params)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world=4)
def test_a_captured_step_has_the_bits_of_the_eager_one(stage: int) -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu")
    for schedule in ("gpipe", "1f1b"):
        eager = _run(_stacked, None, mesh, stage, schedule=schedule)
        graph = _run(_stacked, functools.partial(sf.jit, backend="graph"), mesh, stage, schedule=schedule)
        for a, b in zip(sf.tree_leaves(graph), sf.tree_leaves(eager), strict=True):
            assert torch.equal(a, b)


@pytest.mark.nightly
@pytest.mark.parametrize("per_stage", [None, (3, 2), (2, 3)])
def test_each_layer_is_gathered_by_itself(per_stage: tuple[int, ...] | None) -> None:
    whole = sf.make_mesh({"pp": 2, "dp": 2}, abstract=True)
    params, seen = _params(6 if per_stage is None else 5), {}
    if per_stage is not None:
        params = {**params, "blocks": sf.pad_layers(params["blocks"], per_stage)}
    for name, specs in (("stack", P("pp")), ("layers", Sharding(P("pp"), stacked=True))):
        step = sf.sharded_step(
            sf.jit(_loss(m=2, layers_per_stage=per_stage), bucket=None, prefetch=None),
            optim.adamw(1e-2),
            mesh=whole,
            specs={"blocks": specs, "embed": P(), "scale": P(), "unused": P()},
            batch=P("dp"),
            zero=Zero.flat(stage=3, persist_elements=0, bucket_bytes=0, prefetch_bytes=0),
        )
        lowered = step.lower(params, _batches(1)[0])
        seen[name] = (
            lowered.memory_analysis().max_by_kind["gathered"],
            lowered.cost_analysis().transfers["all_gather", "dp"],
        )
    assert seen["layers"][0] < seen["stack"][0], seen
    assert seen["layers"][1][1] <= seen["stack"][1][1], seen


@distributed(world=2)
def test_stacks_that_cannot_be_cut_by_layers_are_refused() -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 1}, device="cpu")
    params = _params(4)
    specs = {"embed": P(), "scale": P(), "unused": P(), "blocks": Sharding(P("dp"), stacked=True)}
    step = sf.sharded_step(_loss(m=2), optim.sgd(0.1), mesh=mesh, specs=specs, batch=P("dp"))
    with pytest.raises(ValueError, match=r"which the stages of a pipeline alone cut:\n.*has spec P\('dp'\); use Shard"):
        step.init(params)
    three = sf.make_mesh({"pp": 4}, abstract=True)
    cut = _stacked(_params(5))
    step = sf.sharded_step(_loss(m=2), optim.sgd(0.1), mesh=three, specs=cut, batch=P())
    with pytest.raises(ValueError, match=r"leaves no layer to the last of 4 ranks; leave out stacked=True"):
        step.lower(_params(5), _batches(1)[0])


@pytest.mark.nightly
@pytest.mark.parametrize("per_stage", [(1, 4), (3, 2)])
@distributed(world=4)
def test_unequal_numbers_of_layers(per_stage: tuple[int, ...]) -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu")
    params = _params(5)
    params = {**params, "blocks": sf.pad_layers(params["blocks"], per_stage)}

    def plain(p: Any, batch: Any) -> Any:
        return _plain()({**p, "blocks": sf.unpad_layers(p["blocks"], per_stage)}, batch)

    lamb = optim.chain(optim.clip_by_global_norm(0.05), optim.lamb(1e-2, weight_decay=0.1))
    for stage, schedule, accumulate in ((0, "1f1b", "each"), (3, "1f1b", "each"), (2, "zb-h1", "once")):
        assert_parity(
            _loss(m=3, schedule=schedule, layers_per_stage=per_stage),
            lamb,
            params,
            _batches(),
            mesh=mesh,
            specs=_stacked(params),
            batch=P("dp"),
            zero=Zero.flat(stage=stage, accumulate=accumulate, **ODD),
            reference=plain,
        )
