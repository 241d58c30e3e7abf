"""Covers placements by name and the routes between them: the hops of each of ZeRO's options."""

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.collectives import AllGather, Cast, Dequantize, Move, Psum, PsumScatter, Quantize, Slice
from shardfn.core import Dtypes, Mesh, P
from shardfn.leaves._layout import LeafLayout, leaf_layout, stacked_layout

F32, BF16 = torch.float32, torch.bfloat16
ONE = {"dp": 4}
NODES = {"node": 2, "gpu": 2}
BOTH = ("node", "gpu")
CODE, HALF_CODE = (8, 256), (4, 256)


def _leaf(sizes: dict[str, int], zero: sf.Zero, **kw: Any) -> LeafLayout:
    mesh = Mesh(sizes, torch.device("cpu"), abstract=True)
    how = {"batch_axes": tuple(sizes), "trainable": True, "dtype": F32, "compute": P()} | kw
    dtype, compute = how.pop("dtype"), how.pop("compute")
    return leaf_layout("w", torch.Size((128, 130)), dtype, compute, zero=zero, mesh=mesh, **how)


MIXED = Dtypes(param=F32, master=F32, compute=BF16, reduce=BF16, accum=F32)
PLUS = sf.Zero(stage=3, axis=BOTH, travel=sf.Travel(secondary_axis="gpu", gather="int8", reduce="int4"))
DP, NODE, GPU = ("dp",), ("node",), ("gpu",)


@pytest.mark.parametrize(
    "sizes, zero, how, use, reduce",
    [
        (ONE, sf.Zero(0), {}, (), (Psum(DP),)),
        pytest.param(ONE, sf.Zero(1), {}, (), (PsumScatter(DP, 0),), marks=pytest.mark.nightly),
        pytest.param(ONE, sf.Zero(2), {}, (), (PsumScatter(DP, 0),), marks=pytest.mark.nightly),
        (ONE, sf.Zero(3), {}, (AllGather(DP, 0),), (PsumScatter(DP, 0),)),
        pytest.param(
            ONE, sf.Zero(3, persist_elements=1 << 20), {}, (), (PsumScatter(DP, 0),), marks=pytest.mark.nightly
        ),
        pytest.param(
            ONE,
            sf.Zero(3, params="host", grads="disk", optimizer="disk", disk=sf.Disk("x")),
            {},
            (Move("device"), AllGather(DP, 0)),
            (PsumScatter(DP, 0), Move("disk")),
            marks=pytest.mark.nightly,
        ),
        (
            ONE,
            sf.Zero(3),
            {"dtype": MIXED},
            (Cast(BF16), AllGather(DP, 0)),
            (PsumScatter(DP, 0), Cast(F32)),
        ),
        # The optimizer's state is cut along an axis that does not cut the batch: summed whole, then sliced to rows.
        pytest.param(
            {"dp": 2, "tp": 2},
            sf.Zero(1, axis="tp"),
            {"batch_axes": DP},
            (),
            (Psum(DP), Slice(("tp",), 0)),
            marks=pytest.mark.nightly,
        ),
        # Cut along one axis of the batch: rows along it, then the sum over the other.
        pytest.param(
            NODES, sf.Zero(2, axis="gpu"), {}, (), (PsumScatter(GPU, 0), Psum(NODE)), marks=pytest.mark.nightly
        ),
        # The model's own cut stays.
        (
            {"dp": 2, "tp": 2},
            sf.Zero(3),
            {"batch_axes": DP, "compute": P("tp")},
            (AllGather(DP, 0),),
            (PsumScatter(DP, 0),),
        ),
        pytest.param(
            NODES,
            PLUS,
            {},
            (Quantize(CODE), AllGather(NODE, 0), AllGather(GPU, 0), Dequantize()),
            (Quantize(HALF_CODE), PsumScatter(GPU, 0), Quantize(HALF_CODE), PsumScatter(NODE, 0)),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            NODES,
            sf.Zero(3, axis=BOTH, travel=sf.Travel(secondary_axis="gpu")),
            {},
            (AllGather(NODE, 0), AllGather(GPU, 0)),
            (PsumScatter(BOTH, 0),),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_options_are_hops(sizes: dict[str, int], zero: sf.Zero, how: dict[str, Any], use: Any, reduce: Any) -> None:
    leaf = _leaf(sizes, zero, **how)
    assert leaf.ways.use.hops == use
    assert leaf.ways.reduce.hops == reduce


def test_an_optimizer_that_reduces_takes_summands() -> None:
    leaf = _leaf(NODES, sf.Zero(2, axis="gpu"))
    own = leaf.with_unreduced(NODE)
    assert own.ways.reduce.hops == (PsumScatter(GPU, 0),) and own.ways.summed.unreduced == NODE
    assert (own.reduce_axes, own.extra_axes) == (GPU, ())
    assert own.ways.summed.spec == own.shard
    whole = leaf.with_unreduced(BOTH)
    assert whole.ways.reduce.hops == () and whole.ways.summed.unreduced == BOTH
    assert whole.reduce_axes == () and whole.ways.summed.spec == P()


def test_a_stack_goes_the_ways_of_its_layers() -> None:
    mesh = Mesh(ONE, torch.device("cpu"), abstract=True)
    rule: dict[str, Any] = {"zero": sf.Zero(3), "mesh": mesh, "batch_axes": DP, "trainable": True}
    leaf = stacked_layout("w", torch.Size((3, 128, 130)), F32, P(), **rule)
    assert leaf.ways.use.hops == (AllGather(DP, 1),) and leaf.numel == 3 * 128 * 130
    assert [x.ways.use.hops for x in leaf.layers] == [(AllGather(DP, 0),)] * 3
    assert [x.path for x in leaf.layers] == ["w[0]", "w[1]", "w[2]"]


def test_leaves_that_are_placed_alike_share_their_routes() -> None:
    a, b = _leaf(ONE, sf.Zero(3)), _leaf(ONE, sf.Zero(3))
    assert a.ways is b.ways


def test_leaves_of_one_shape_that_travel_otherwise_share_no_route() -> None:
    sizes = {"dp": 2, "tp": 2}
    zero = sf.Zero(2, persist_elements=40, travel=sf.Travel(reduce="int8"))
    mesh = Mesh(sizes, torch.device("cpu"), abstract=True)
    rule: dict[str, Any] = {"zero": zero, "mesh": mesh, "batch_axes": DP, "trainable": True}
    a = leaf_layout("a", torch.Size((8, 8)), F32, P(None, "tp"), **rule)
    b = leaf_layout("b", torch.Size((8, 4)), F32, P(), **rule)
    assert a.block == b.block and a.ways.reduce.quantization is not None and b.ways.reduce.quantization is None
    assert a.ways.reduce != b.ways.reduce
