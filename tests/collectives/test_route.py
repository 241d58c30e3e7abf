"""Covers placements and routes: as values against a slow definition over the blocks of all ranks, and carried out."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.collectives import (
    AllGather,
    AllToAll,
    Cast,
    Dequantize,
    Move,
    Psum,
    PsumScatter,
    Quantize,
    Route,
    Slice,
    carry,
    route,
)
from shardfn.core import Mesh, P, Placement, all_coords, block_slices, make_mesh
from shardfn.testing import distributed

SIZES = {"a": 2, "b": 3, "c": 2}
MESH = Mesh(SIZES, torch.device("cpu"), abstract=True)
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
Blocks = dict[tuple[int, ...], Tensor]


# the slow definition


def placed(x: Tensor, at: Placement, sizes: dict[str, int], draw: random.Random | None = None) -> Blocks:
    """The blocks of all ranks, by their coordinates. Summands are whole numbers that differ between ranks."""
    blocks: Blocks = {}
    mates: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for coords in all_coords(sizes):
        key = tuple(coords.values())
        blocks[key] = x[block_slices(tuple(x.shape), at.spec, sizes, coords)].clone()
        mates.setdefault(tuple(0 if a in at.unreduced else c for a, c in coords.items()), []).append(key)
    if draw is not None:
        for *others, last in mates.values():
            for key in others:
                blocks[key].fill_(draw.randint(-3, 3))
                blocks[last] -= blocks[key]
    return blocks


def walked(blocks: Blocks, way: Route, sizes: dict[str, int]) -> Blocks:
    """The blocks of every rank at the end, hop by hop, each by its definition."""
    for hop, before, after in zip(way.hops, way.stops, way.stops[1:], strict=False):
        blocks = {key: _made(hop, key, blocks, before, after, way.shape, sizes) for key in blocks}
    return blocks


def _made(
    hop: Any, key: tuple[int, ...], blocks: Blocks, before: Placement, after: Placement, shape: Any, sizes: Any
) -> Tensor:
    if isinstance(hop, Move | Quantize | Dequantize):
        return blocks[key]
    if isinstance(hop, Cast):
        return blocks[key].to(hop.dtype)
    mates = [k for k in blocks if all(x == y for a, x, y in zip(sizes, k, key, strict=True) if a not in hop.axes)]
    if isinstance(hop, Psum):
        return sum((blocks[k] for k in mates), torch.zeros_like(blocks[key]))
    if isinstance(hop, PsumScatter):
        total = sum((blocks[k] for k in mates), torch.zeros_like(blocks[key]))
        return _own(total, key, before, after, shape, sizes)
    if isinstance(hop, Slice):
        return _own(blocks[key], key, before, after, shape, sizes)
    # A gather or an exchange: put the blocks of the mates in place, and check that all of the new block is there.
    whole, seen = torch.zeros(shape, dtype=blocks[key].dtype), torch.zeros(shape)
    for k in mates:
        where = block_slices(shape, before.spec, sizes, dict(zip(sizes, k, strict=True)))
        whole[where], seen[where] = blocks[k], 1
    mine = block_slices(shape, after.spec, sizes, dict(zip(sizes, key, strict=True)))
    assert bool((seen[mine] == 1).all()), "the mates of this hop do not hold all of the new block"
    return whole[mine]


def _own(x: Tensor, key: tuple[int, ...], before: Placement, after: Placement, shape: Any, sizes: Any) -> Tensor:
    coords = dict(zip(sizes, key, strict=True))
    whole = torch.zeros(shape, dtype=x.dtype)
    whole[block_slices(shape, before.spec, sizes, coords)] = x
    return whole[block_slices(shape, after.spec, sizes, coords)]


def total(blocks: Blocks, at: Placement, shape: Any, sizes: dict[str, int]) -> Tensor:
    """The leaf that has these blocks; every copy of a block must be the same."""
    sums: Blocks = {}
    for key, block in blocks.items():
        mates = tuple(c if a not in at.unreduced else 0 for a, c in zip(sizes, key, strict=True))
        sums[mates] = sums[mates] + block if mates in sums else block
    out, seen = torch.zeros(shape, dtype=F64), torch.zeros(shape, dtype=torch.bool)
    for key, block in sums.items():
        where = block_slices(shape, at.spec, sizes, dict(zip(sizes, key, strict=True)))
        assert torch.equal(out[where][seen[where]], block.double()[seen[where]]), "copies differ"
        out[where], seen[where] = block.double(), True
    assert bool(seen.all())
    return out


# routes drawn at random


def drawn(draw: random.Random, ndim: int, axes: tuple[str, ...], unreduced: tuple[str, ...] = ()) -> Placement:
    free = [a for a in axes if a not in unreduced]
    draw.shuffle(free)
    entries = [tuple(free.pop() for _ in range(draw.randint(0, min(2, len(free))))) or None for _ in range(ndim)]
    return Placement(P(*entries), unreduced, draw.choice(("device", "host")), draw.choice((F32, F64)))


def pair(draw: random.Random, axes: tuple[str, ...] = tuple(SIZES)) -> tuple[tuple[int, ...], Placement, Placement]:
    shape = tuple(draw.choice((0, 1, 2, 3, 4, 5, 7, 12)) for _ in range(draw.randint(0, 3)))
    src_sums = tuple(a for a in axes if draw.random() < 0.25)
    dst_sums = tuple(a for a in src_sums if draw.random() < 0.3)
    return shape, drawn(draw, len(shape), axes, src_sums), drawn(draw, len(shape), axes, dst_sums)


def whole(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=F64).reshape(shape) + 1


@pytest.mark.day("0")
@pytest.mark.parametrize(
    "part", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(range(4))]
)
def test_every_route_ends_with_the_leaf_placed_as_asked(part: int) -> None:
    for seed in range(part * 60, (part + 1) * 60):
        draw = random.Random(seed)
        shape, src, dst = pair(draw)
        way = route(shape, src, dst, MESH)
        assert way.src == src and way.dst == dst, seed
        x = whole(shape)
        blocks = {k: b.to(src.dtype) for k, b in placed(x, src, SIZES, draw).items()}
        ends = walked(blocks, way, SIZES)
        assert all(b.dtype == dst.dtype for b in ends.values()), seed
        assert torch.equal(total(ends, dst, shape, SIZES), x), (seed, str(way))


def test_a_route_sends_nothing_that_need_not_be_sent() -> None:
    for seed in range(150):
        shape, src, dst = pair(random.Random(seed))
        way = route(shape, src, dst, MESH)
        coords = dict.fromkeys(SIZES, 0)
        if not src.unreduced and set(src.spec.axes) <= set(dst.spec.axes) and _begins(src.spec, dst.spec):
            assert not way.sent(SIZES, coords), (seed, str(way))
        if src.with_(memory_kind=dst.memory_kind) == dst:
            assert all(isinstance(hop, Move) for hop in way.hops), (seed, str(way))
        gathers = sum(isinstance(hop, AllGather) for hop in way.hops)
        assert gathers <= sum(src.spec.dim_axes(d) != dst.spec.dim_axes(d) for d in range(len(shape))) + 1, seed


def _begins(src: P, dst: P) -> bool:
    return all(dst.dim_axes(d)[: len(src.dim_axes(d))] == src.dim_axes(d) for d in range(len(src)))


# the routes of training


DP = Mesh({"dp": 4}, torch.device("cpu"), abstract=True)
NODES = Mesh({"node": 2, "dp": 4}, torch.device("cpu"), abstract=True)
KEPT, USED = Placement(P("dp")), Placement(P())
GRAD = USED.cotangent(("dp",))


@pytest.mark.parametrize(
    "src, dst, hops, sent",
    [
        (KEPT, USED, (AllGather(("dp",), 0),), 3 * 24),  # ZeRO 3: each use
        pytest.param(
            GRAD, KEPT, (PsumScatter(("dp",), 0),), 3 * 24, marks=pytest.mark.nightly
        ),  # ZeRO 1 to 3: gradients
        pytest.param(GRAD, USED, (Psum(("dp",)),), 6 * 24, marks=pytest.mark.nightly),  # ZeRO 0
        (USED, KEPT, (Slice(("dp",), 0),), 0),  # the rows that a rank updates
        pytest.param(KEPT, Placement(P(None, "dp")), (AllToAll(("dp",), 1, 0),), 18, marks=pytest.mark.nightly),
        pytest.param(
            Placement(P("dp"), dtype=BF16), USED, (AllGather(("dp",), 0), Cast(F32)), 3 * 12, marks=pytest.mark.nightly
        ),
        (KEPT, Placement(P(), dtype=BF16), (Cast(BF16), AllGather(("dp",), 0)), 3 * 12),
        pytest.param(
            GRAD.with_(dtype=BF16), KEPT, (Cast(F32), PsumScatter(("dp",), 0)), 3 * 24, marks=pytest.mark.nightly
        ),
        pytest.param(
            KEPT.with_(memory_kind="host"),
            USED,
            (Move("device"), AllGather(("dp",), 0)),
            3 * 24,
            marks=pytest.mark.nightly,
        ),
        (GRAD, KEPT.with_(memory_kind="host"), (PsumScatter(("dp",), 0), Move("host")), 3 * 24),
        pytest.param(KEPT, KEPT, (), 0, marks=pytest.mark.nightly),
    ],
)
def test_the_routes_of_training(src: Placement, dst: Placement, hops: tuple[Any, ...], sent: int) -> None:
    way = route((4, 6), src, dst, DP)
    assert way.hops == hops
    assert sum(way.sent(DP.shape, DP.coords).values()) == sent


def test_waypoints_are_codes_and_two_hops() -> None:
    quantization, far = (8, 256), ("node",)
    kept, used = Placement(P(("node", "dp"))), Placement(P())
    coded = kept.with_(quantization=quantization)
    way = route(
        (512, 8), kept, used, NODES, via=(coded, coded.with_(brought=far), used.with_(quantization=quantization))
    )
    assert way.hops == (Quantize(quantization), AllGather(("node",), 0), AllGather(("dp",), 0), Dequantize())
    sent = way.sent(NODES.shape, NODES.coords)
    assert sent == {("node",): 512 + 2 * 4, ("dp",): 3 * (1024 + 4 * 4)}
    assert way.live(NODES.shape, NODES.coords) == 4096 + 16 * 4 + 4 * 4096


def test_codes_are_summed_block_by_block_in_two_hops() -> None:
    quantization, both = (8, 256), ("node", "dp")
    grad, kept = Placement(P(), both), Placement(P(both))
    half = Placement(P(both), ("node",), brought=("node",))
    via = (grad.with_(quantization=quantization), half, half.with_(quantization=quantization))
    way = route((512, 8), grad, kept, NODES, via=via)
    assert way.hops == (
        Quantize(quantization),
        PsumScatter(("dp",), 0),
        Quantize(quantization),
        PsumScatter(("node",), 0),
    )
    assert route((512, 8), grad, kept, NODES, via=(half,)).hops == (PsumScatter(("dp",), 0), PsumScatter(("node",), 0))


@pytest.mark.nightly
def test_two_hops_lead_where_one_does() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        shape = tuple(draw.choice((0, 1, 3, 5, 8, 12)) for _ in range(draw.randint(1, 3)))
        dim, axes = draw.randrange(len(shape)), draw.choice((("a", "b"), ("b", "c"), ("c", "a", "b")))
        kept = Placement(P(*(axes if d == dim else None for d in range(dim + 1))), dtype=F64)
        used, x = Placement(dtype=F64), whole(shape)
        far = tuple(a for a in axes if draw.random() < 0.5) or axes[:1]
        far = far[:-1] if len(far) == len(axes) else far
        way = route(shape, kept, used, MESH, via=(kept.with_(brought=far),))
        assert way.hops == (AllGather(far, dim), AllGather(tuple(a for a in axes if a not in far), dim))
        back = route(shape, used.with_(unreduced=axes), kept, MESH, via=(kept.with_(brought=far, unreduced=far),))
        for stop in (*way.stops, *back.stops):
            for coords in all_coords(SIZES):
                held = x[_held(stop, shape, coords, dim)]
                assert stop.block_shape(shape, SIZES, coords) == held.shape, (seed, stop)


def _held(at: Placement, shape: tuple[int, ...], coords: dict[str, int], dim: int) -> Any:
    """The rows of `dim` that a rank holds: its own, or those of all ranks along the axes that were brought."""
    rows = [
        row
        for mate in all_coords(SIZES)
        if all(mate[a] == coords[a] for a in SIZES if a not in at.brought)
        for row in range(*block_slices(shape, at.spec, SIZES, mate)[dim].indices(shape[dim]))
    ]
    return tuple([slice(None)] * dim + [torch.tensor(sorted(set(rows)), dtype=torch.long)])


def test_summands_stay_where_they_are_to_stay() -> None:
    src = Placement(P(), ("node", "dp"))
    assert route((8,), src, Placement(P("node"), ("dp",)), NODES).hops == (PsumScatter(("node",), 0),)
    assert route((8,), src, Placement(P(), ("dp",)), NODES).hops == (Psum(("node",)),)


def test_axes_of_one_rank_and_missing_ones_are_no_hops() -> None:
    one = Mesh({"dp": 1, "tp": 2}, torch.device("cpu"), abstract=True)
    assert route((8,), KEPT, USED, one).hops == ()
    assert route((8,), Placement(P("sp")), Placement(P("tp")), one).hops == (Slice(("tp",), 0),)


@pytest.mark.parametrize(
    "src, dst, words",
    [
        (USED, Placement(P(None, None, "dp")), r"P\(None, None, 'dp'\) has 3 entries, but the leaf has 2 dims"),
        pytest.param(USED, Placement(P("dq")), r"axes \['dq'\] are not in the mesh", marks=pytest.mark.nightly),
        pytest.param(
            USED,
            GRAD,
            r"(?s)no route leads params\['w'\].*unreduced=\('dp',\).*\['dp'\].*still to be taken",
            marks=pytest.mark.nightly,
        ),
        (USED, Placement(P("dp"), ("dp",)), r"cut and unreduced at once"),
        pytest.param(
            USED, Placement(quantization=(8, 0)), r"quantization must be \(8 or 4 bits", marks=pytest.mark.nightly
        ),
        pytest.param(
            USED,
            Placement(dtype=torch.int64, quantization=(8, 2)),
            r"torch.int64 cannot be quantized",
            marks=pytest.mark.nightly,
        ),
        (GRAD.with_(quantization=(8, 2)), USED, r"codes can be summed block by block alone"),
        pytest.param(
            KEPT,
            KEPT.with_(brought=("dp",)),
            r"brought=\('dp',\) are not some, and not all, of the axes that cut one dim",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            USED,
            Placement(stacked=True),
            r"one stacks layers along dim 0 and the other does not",
            marks=pytest.mark.nightly,
        ),
        (USED.with_(quantization=(8, 2)), KEPT.with_(quantization=(8, 2)), r"codes can be gathered, not cut"),
    ],
)
def test_placements_without_a_route_are_named(src: Placement, dst: Placement, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        route((4, 6), src, dst, DP, path="params['w']")
    assert "params['w'] of shape (4, 6)" in str(error.value)


# carried out


@pytest.mark.nightly
@distributed(world=4, timeout=120)
def test_blocks_are_carried_along_routes_and_bytes_are_the_predicted_ones() -> None:
    mesh = make_mesh({"a": 2, "c": 2}, device="cpu")
    sizes, key = dict(mesh.shape), tuple(mesh.coords.values())
    with sf.collectives.bind_mesh(mesh):
        for seed in range(25):
            draw = random.Random(seed)
            shape, src, dst = pair(draw, ("a", "c"))
            way = route(shape, src, dst, mesh)
            blocks = {k: b.to(src.dtype) for k, b in placed(whole(shape), src, sizes, draw).items()}
            with sf.count_traffic() as traffic:
                end = carry(blocks[key], way, move=lambda x, _: x)
            assert torch.equal(end, walked(blocks, way, sizes)[key]), (seed, str(way))
            even = all(n % 4 == 0 for n in shape)
            if even:
                assert traffic.bytes == sum(way.sent(sizes, mesh.coords).values()), (seed, str(way))


@distributed(world=4, timeout=120)
def test_two_hops_are_carried_as_one() -> None:
    mesh = make_mesh({"a": 2, "c": 2}, device="cpu")
    with sf.collectives.bind_mesh(mesh):
        for axes, far in ((("a", "c"), ("a",)), (("a", "c"), ("c",)), (("c", "a"), ("a",))):
            kept, used, x = Placement(P(None, axes), dtype=F64), Placement(dtype=F64), whole((3, 7))
            mine = x[block_slices((3, 7), kept.spec, mesh.shape, mesh.coords)]
            way = route((3, 7), kept, used, mesh, via=(kept.with_(brought=far),))
            assert torch.equal(carry(mine, way), x)
            half = kept.with_(brought=far, unreduced=far)
            back = route((3, 7), used.with_(unreduced=axes), kept, mesh, via=(half,))
            assert torch.equal(carry(x / 4, back), mine)
            with pytest.raises(ValueError, match="two hops of a gather as one"):
                carry(mine, route((3, 7), kept, kept.with_(brought=far), mesh))


@distributed(world=4, timeout=120)
def test_gradients_go_the_way_back() -> None:
    """`<F x, y> == <x, F' y>`, with elements that several ranks hold counted once."""
    mesh = make_mesh({"a": 2, "c": 2}, device="cpu")
    with sf.collectives.bind_mesh(mesh):
        for seed in range(25):
            draw = random.Random(seed)
            shape, src, dst = pair(draw, ("a", "c"))
            src, dst = (p.with_(dtype=F64, memory_kind="device", unreduced=()) for p in (src, dst))
            x = whole(shape)[block_slices(shape, src.spec, mesh.shape, mesh.coords)].clone().requires_grad_()
            y = (whole(shape) * 3 - 5)[block_slices(shape, dst.spec, mesh.shape, mesh.coords)]
            out = carry(x, route(shape, src, dst, mesh))
            (grad,) = torch.autograd.grad((out * y).sum(), x)
            assert torch.equal(grad, (whole(shape) * 3 - 5)[block_slices(shape, src.spec, mesh.shape, mesh.coords)]), (
                seed
            )
