"""Covers the op table: facts from schemas and from rows, and that rows are of ops that exist."""

import operator

import pytest
import torch
from torch.fx import Graph

from shardfn.graph import OPS, Op, find_op, op_of

ATEN, WIRE, MEMORY = torch.ops.aten, torch.ops.shardfn, torch.ops.shardfn_memory


@pytest.mark.parametrize(
    ("target", "views", "writes"),
    [
        (ATEN.view.default, 0, ()),
        pytest.param(ATEN.expand.default, 0, (), marks=pytest.mark.nightly),
        pytest.param(ATEN._unsafe_view.default, 0, (), marks=pytest.mark.nightly),
        (ATEN.mm.default, None, ()),
        pytest.param(ATEN.mm.out, None, ((2, "out"),), marks=pytest.mark.nightly),
        pytest.param(ATEN.split.Tensor, None, (), marks=pytest.mark.nightly),
        (ATEN.add_.Tensor, None, ((0, "self"),)),
        pytest.param(WIRE.all_gather_into_start.default, None, ((0, "into"),), marks=pytest.mark.nightly),
        pytest.param(MEMORY.finish.default, None, ((0, "writer"),), marks=pytest.mark.nightly),
        (operator.getitem, None, ()),
    ],
)
def test_views_and_writes_are_read_off_the_schema(target: object, views: int | None, writes: object) -> None:
    op = find_op(target)
    assert (op.views, op.writes) == (views, writes)


def test_tags_mark_random_and_pointwise_ops() -> None:
    assert find_op(ATEN.rand_like.default).draws and not find_op(ATEN.relu.default).draws
    assert find_op(ATEN.relu.default).pointwise and not find_op(ATEN.sum.default).pointwise


def test_an_op_that_returns_nothing_and_writes_nothing_is_kept_for_its_effect() -> None:
    assert find_op(WIRE.stop_unless.default).effects
    assert not find_op(ATEN._foreach_add_.List).effects and not find_op(ATEN.relu.default).effects


def test_rows_hold_for_all_overloads_that_make_a_value() -> None:
    assert find_op(ATEN.eye.default).constant and find_op(ATEN.eye.m).constant
    assert not find_op(ATEN.eye.out).constant


def test_every_overload_that_a_row_names_exists() -> None:
    for packet, op in OPS.items():
        for overload in {*op.calls, *op.strides, *op.abstract} - {""}:
            assert overload in packet.overloads(), (packet, overload)


def test_every_transfer_declares_its_message_and_its_turn() -> None:
    starts = [op for op in OPS.values() if op.channel]
    assert len(starts) == 18 and all(op.transfer is not None for op in starts)
    assert all(op.transfer is None for op in OPS.values() if not op.channel)


def test_only_calls_are_ops() -> None:
    graph = Graph()
    x = graph.placeholder("relu")
    assert op_of(x) == Op() == op_of(graph.output(x))
    assert op_of(graph.call_function(ATEN.mm.default, (x, x))).flops is not None
