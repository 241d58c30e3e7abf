"""Covers the layout as a pure function: blocks that are cut, packed and sent are joined unchanged, for any shapes."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.collectives import EvenPacking, dealt
from shardfn.core import Mesh, tree_flatten
from shardfn.engine import Plan, Planner
from shardfn.leaves._units import Unit
from shardfn.testing import assert_parity, distributed

# Dims that no mesh divides, dims smaller than a mesh, and tensors without dims.
DIMS = [0, 1, 2, 3, 4, 5, 7, 8, 13]
SHARED = {"w": (4,), "e": (0, 5), "z": (6, 4)}


def _plan(shapes: dict[str, tuple[int, ...]], world: int, **zero: Any) -> Plan:
    mesh = Mesh({"dp": world}, torch.device("cpu"), abstract=True)
    planner = Planner(mesh, sf.P(), sf.P("dp"), sf.Zero.flat(persist_elements=0, **zero), True, None)
    leaves, treedef = tree_flatten({k: torch.empty(s, device="meta") for k, s in shapes.items()})
    return planner.plan(treedef, leaves)


def _wholes(plan: Plan, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(leaf.block, generator=draw) for leaf in plan.layers]


def _shapes(draw: random.Random) -> dict[str, tuple[int, ...]]:
    return {f"p{i}": tuple(draw.choice(DIMS) for _ in range(draw.randrange(4))) for i in range(draw.randrange(1, 7))}


def _parts(plan: Plan, unit: Unit, wholes: list[Tensor], world: int) -> list[list[Tensor]]:
    return [[plan.layers[i].rows(wholes[i], r) for i in unit.leaves] for r in range(world)]


def _check_gathers(plan: Plan, wholes: list[Tensor], world: int) -> None:
    for unit in plan.gather_units:
        sent = [unit.packing.pack(parts).reshape(-1) for parts in _parts(plan, unit, wholes, world)]
        assert [x.numel() for x in sent] == unit.packing.sizes
        for i, whole in zip(unit.leaves, unit.packing.unpack(torch.cat(sent)), strict=True):
            assert torch.equal(whole, wholes[i]), plan.layers[i]


def _check_refreshes(plan: Plan, wholes: list[Tensor], world: int) -> None:
    for unit in plan.refresh_units:
        sent = torch.cat([unit.packing.pack(parts).reshape(-1) for parts in _parts(plan, unit, wholes, world)])
        for put in (unit.packing.unpack_into, unit.packing.put):
            blocks = [torch.full(plan.layers[i].block, math.nan) for i in unit.leaves]
            put(sent, blocks)
            for i, block in zip(unit.leaves, blocks, strict=True):
                assert torch.equal(block, wholes[i]), plan.layers[i]


def _check_reductions(plan: Plan, wholes: list[Tensor], world: int) -> None:
    for unit in plan.reduce_units:
        packing, mine = unit.packing, [wholes[i] for i in unit.leaves]
        flat = packing.lay(mine)
        assert torch.equal(packing.laid(mine), flat)
        turned = [x.movedim(0, -1).contiguous().movedim(-1, 0) if x.ndim else x for x in mine]  # other strides
        assert torch.equal(packing.laid(turned), flat)
        assert packing.cut == plan.layers[unit.leaves[0]].ways.reduce.scatters
        sizes = packing.sizes if packing.cut else dealt(flat.numel(), world)
        assert len(sizes) == world and sum(sizes) == flat.numel()
        if not packing.cut:
            assert torch.equal(flat, torch.cat([x.reshape(-1) for x in mine]))
            continue
        for r, own in enumerate(flat.split_with_sizes(sizes)):
            pieces = own.split_with_sizes([s.numel() for s in packing.shapes(r)])
            views = packing.split(own, r)
            assert all(x._is_view() and torch.equal(x.view(-1), y) for x, y in zip(views, pieces, strict=True))
            assert [x.shape for x in views] == packing.shapes(r)
            for piece, shape, leaf, whole in zip(pieces, packing.shapes(r), packing.leaves, mine, strict=True):
                assert torch.equal(piece.view(shape), leaf.of(whole, r)), leaf


def _check_even(plan: Plan, wholes: list[Tensor], world: int) -> None:
    for unit in plan.refresh_units:
        packing, mine = EvenPacking([plan.layers[i].pieces for i in unit.leaves]), [wholes[i] for i in unit.leaves]
        laid = packing.lay(mine)
        assert torch.equal(laid, torch.stack([packing.pack(p) for p in _parts(plan, unit, wholes, world)]))
        assert all(torch.equal(a, b) for a, b in zip(packing.unpack(laid), mine, strict=True))
        for r, own in enumerate(laid):
            for piece, leaf, whole in zip(packing.split(own, r), packing.leaves, mine, strict=True):
                assert torch.equal(piece, leaf.of(whole, r))


def _check(shapes: dict[str, tuple[int, ...]], world: int, **zero: Any) -> None:
    plan = _plan(shapes, world, **zero)
    wholes = _wholes(plan, world)
    _check_gathers(plan, wholes, world)
    _check_refreshes(plan, wholes, world)
    _check_reductions(plan, wholes, world)
    _check_even(plan, wholes, world)


@pytest.mark.day("1")
@pytest.mark.parametrize(
    "world", [pytest.param(n, marks=() if n in (1, 3, 5) else pytest.mark.nightly) for n in range(1, 9)]
)
def test_packed_leaves_come_out_unchanged(world: int) -> None:
    draw = random.Random(world)
    for case in [SHARED, *(_shapes(draw) for _ in range(40))]:
        for stage in (1, 3):
            for bucket in (0, 1 << 20):
                _check(case, world, stage=stage, bucket_bytes=bucket)


def _sum(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.stack([(p * x.mean()).sin().sum() for p in params.values()]).sum() + x.square().mean()


def _params() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in SHARED.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
@distributed(world=2)
def test_a_leaf_without_elements_travels_with_others(stage: int) -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.stack([_sum(params, rows) for rows in x.chunk(2)]).mean()

    mesh, zero = sf.make_mesh({"dp": 2}), sf.Zero(stage=stage, persist_elements=0)
    batches = [torch.randn(8, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(2)]
    for own in (_sum, sf.jit(_sum, backend="graph", bucket=1 << 20, reductions=1 << 20)):
        assert_parity(own, optim.adam(0.1), _params(), batches, mesh=mesh, zero=zero, reference=loss)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_leaf_without_elements_is_lowered(world: int) -> None:
    for stage in (1, 3):
        mesh = sf.make_mesh({"dp": world}, abstract=True)
        loss = sf.jit(_sum, backend="graph", bucket=1 << 20, reductions=1 << 20)
        step = sf.sharded_step(loss, optim.adam(0.1), mesh=mesh, zero=sf.Zero(stage=stage, persist_elements=0))
        shapes = {name: torch.empty(shape, device="meta") for name, shape in SHARED.items()}
        cost = step.lower(shapes, torch.empty(8 // world, device="meta")).cost_analysis()
        assert sum(n for _, n in cost.transfers.values()) > 0
