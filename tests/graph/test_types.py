"""Covers the rules by which types along axes go through the ops of a graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn.graph import Leaf, value_types

WIRE = torch.ops.shardfn


def _types(f: Callable[..., Any], *cuts: bool) -> list[str]:
    """The types along "tp" of the results of `f`, for vectors that are cut or whole."""
    gm = make_fx(f, tracing_mode="fake")(*(torch.ones(4) for _ in cuts))
    gm.meta["mesh_shape"] = {"tp": 2, "one": 1}
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, cut in zip(inputs, cuts, strict=True):
        node.meta["enters"] = Leaf("x", ("tp",) if cut else ())
        node.meta["phase"] = "forward"
    (output,) = [n for n in gm.graph.nodes if n.op == "output"]
    types = value_types(gm)
    return [types[n]["tp"] for n in output.args[0]]


def test_a_local_op_varies_if_an_operand_does() -> None:
    assert _types(lambda v, i: (v + i, i * 2, v.view(2, 2), i.t()), True, False) == [
        "varying",
        "invariant",
        "varying",
        "invariant",
    ]


def test_ops_of_shapes_alone_are_invariant() -> None:
    assert _types(lambda v: (torch.zeros_like(v), v.new_ones(3), v * 0, torch.zeros(2)), True) == ["invariant"] * 4


def test_values_that_ranks_may_agree_on_are_unknown() -> None:
    assert _types(lambda v: (v > 0, v.argmax(), torch.where(v > 0, v, 1.0), v.long()), True) == ["unknown"] * 4
    assert _types(lambda i: (i > 0, torch.rand_like(i)), False) == ["invariant", "unknown"]


def test_a_pack_of_unlike_values_is_unknown_and_one_of_like_ones_is_not() -> None:
    def f(v: Tensor, i: Tensor) -> Any:
        packed = torch.cat([v, i])
        return packed, packed[4:], torch.stack([v, v]), torch.cat([i, i])

    assert _types(f, True, False) == ["unknown", "unknown", "varying", "invariant"]


def test_an_empty_sum_is_unknown_where_other_ranks_may_have_elements() -> None:
    assert _types(lambda v, i: (v[:0].sum(), v[:0], i[:0].sum(), i[:0]), True, False) == [
        "unknown",
        "unknown",
        "invariant",
        "invariant",
    ]


def test_lists_are_typed_member_by_member() -> None:
    def f(v: Tensor, i: Tensor) -> Any:
        return tuple(torch._foreach_mul([v, i], 2.0))

    assert _types(f, True, False) == ["varying", "invariant"]

    def written(v: Tensor, i: Tensor) -> Any:
        a, b = torch.zeros(4), torch.zeros(4)
        torch._foreach_add_([a, b], [v, i])
        return a + 1, b + 1

    assert _types(written, True, False) == ["varying", "invariant"]


def test_memory_has_the_type_of_the_last_write() -> None:
    def f(v: Tensor, i: Tensor) -> Any:
        whole, part, back = torch.zeros(4), torch.zeros(4), v * 1
        whole.copy_(v)
        part[:2].copy_(v[:2])
        back.copy_(i)
        return whole + 1, part[2:] + 1, back + 1

    assert _types(f, True, False) == ["varying", "unknown", "invariant"]


def test_transfers_of_the_step() -> None:
    def f(v: Tensor, i: Tensor) -> Any:
        gathered = WIRE.wait(WIRE.all_gather_start(v, [4, 4], "tp"))
        summed = WIRE.wait(WIRE.psum_start([v], "tp"))
        block = WIRE.wait(WIRE.psum_scatter_start(i, [2, 2], 0, "tp"))
        there = WIRE.wait(WIRE.all_to_all_start(v, [2, 2], 0, "tp"))
        return gathered, summed, block, there, WIRE.pvary(i, "tp") + 1

    assert _types(f, True, False) == ["invariant", "invariant", "varying", "unknown", "declared"]
