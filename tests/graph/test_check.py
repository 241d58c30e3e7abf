"""Covers the proof that ranks do not hang: equal sequences pass, the first difference and circles are named."""

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn.core import RankError
from shardfn.graph import channel_axes, transfers
from shardfn.graph._check import collective_events, compare_sequences, prove_no_hang

S = torch.ops.shardfn


def _graph(f: Callable[[Tensor], Tensor], **mesh_shape: int) -> GraphModule:
    gm = make_fx(f, tracing_mode="fake")(torch.ones(4))
    gm.meta["mesh_shape"] = mesh_shape
    for i, node in enumerate(gm.graph.nodes):
        node.meta["where"] = f"model.py:{i} in {f.__name__}"
    return gm


def _gather_then_sum(x: Tensor) -> Tensor:
    return S.wait(S.all_gather_start(x, [4, 4], "dp")).sum() + S.wait(S.psum_start([x], "dp"))


def _sum_then_gather(x: Tensor) -> Tensor:
    y = S.wait(S.psum_start([x], "dp"))
    return S.wait(S.all_gather_start(x, [4, 4], "dp")).sum() + y


def _overlapped(x: Tensor) -> Tensor:
    gathered, summed = S.all_gather_start(x, [4, 4], "dp"), S.psum_start([x], "dp")
    return S.wait(gathered).sum() + S.wait(summed)


def _other_size(x: Tensor) -> Tensor:
    return S.wait(S.all_gather_start(x[:3], [3, 3], "dp")).sum() + S.wait(S.psum_start([x], "dp"))


def _no_sum(x: Tensor) -> Tensor:
    return S.wait(S.all_gather_start(x, [4, 4], "dp")).sum() + x


def test_a_line_per_transfer() -> None:
    assert collective_events(_graph(_gather_then_sum, dp=2)).lines == [
        "gather dp: all_gather float32 [4, 4]  # model.py:1 in _gather_then_sum",
        "reduce dp: all_reduce float32 [4]  # model.py:4 in _gather_then_sum",
    ]
    assert collective_events(_graph(lambda x: S.wait(S.psum_start([x], "dp")), dp=1, tp=2)).lines == []


def test_equal_programs_of_different_lines_pass() -> None:
    a, b = _graph(_gather_then_sum, dp=2), _graph(_gather_then_sum, dp=2)
    for node in b.graph.nodes:
        node.meta["where"] = "another.py:1"
    prove_no_hang([a, b])
    prove_no_hang([a, a])
    compare_sequences([collective_events(g).lines for g in (a, b)])
    prove_no_hang([a, _graph(_overlapped, dp=2)])


@pytest.mark.parametrize(("other", "line"), [(_other_size, "model.py:2 in _other_size"), (_no_sum, "none; it has")])
def test_the_first_difference_is_named_with_both_lines(other: Callable[[Tensor], Tensor], line: str) -> None:
    gms = [_graph(_gather_then_sum, dp=2), _graph(other, dp=2)]
    for check in (
        lambda: prove_no_hang(gms),
        lambda: compare_sequences([collective_events(g).lines for g in gms]),
    ):
        with pytest.raises(RankError, match="ranks 0 and 1 differ") as error:
            check()
        assert line in str(error.value) and "in _gather_then_sum" in str(error.value)
        assert "same order" in str(error.value)


def test_a_circle_across_channels_is_found() -> None:
    """Each channel's own sequence agrees, but each rank waits for a transfer that the other starts later."""
    gms = [_graph(_gather_then_sum, dp=2), _graph(_sum_then_gather, dp=2)]
    compare_sequences([collective_events(g).lines for g in gms])
    with pytest.raises(RankError, match="2 of 2 ranks would wait forever") as error:
        prove_no_hang(gms)
    text = str(error.value)
    assert "rank 0 at wait waits for transfer 1 on channel 'gather dp' (model.py:" in text
    assert re.search(r"rank 1 at wait\w* waits for transfer 1 on channel '(reduce|loss) dp' \(model.py:", text)
    assert "in _gather_then_sum" in text and "in _sum_then_gather" in text


def _gather_first(x: Tensor) -> Tensor:
    gathered = S.all_gather_start(x, [4, 4], "dp")
    summed = S.wait(S.psum_start([x], "dp"))
    return S.wait(gathered).sum() + summed.sum()


def _gather_last(x: Tensor) -> Tensor:
    summed = S.psum_start([x], "dp")
    gathered = S.wait(S.all_gather_start(x, [4, 4], "dp"))
    return gathered.sum() + S.wait(summed).sum()


def test_the_order_across_channels_is_free_where_no_ranks_wait_in_a_circle() -> None:
    """Channels are there before a step begins, in one order, whichever a rank uses first."""
    gms = [_graph(_gather_first, dp=2), _graph(_gather_last, dp=2)]
    prove_no_hang(gms)
    assert channel_axes(gms[0]) == channel_axes(gms[1]) == [(("dp",), "gather"), (("dp",), "reduce")]


def test_channels_that_not_all_ranks_make_are_refused() -> None:
    """Each group agrees in itself, but a channel is made by all ranks of the mesh."""
    with pytest.raises(RankError, match=r"rank 0 \['gather dp', 'reduce dp'\], rank 1 \[\]"):
        prove_no_hang([_graph(_gather_first if rank in (0, 2) else lambda x: x + 1, dp=2, tp=2) for rank in range(4)])


def _along(order: Sequence[str]) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        for axis in order:
            x = torch.ops.shardfn.wait(torch.ops.shardfn.loss_psum_start(x, axis))
        return x

    return f


def _grid(orders: Sequence[Sequence[str]]) -> list[GraphModule]:
    return [_graph(_along([{"a": "dp", "b": "tp"}[x] for x in o]), dp=2, tp=2) for o in orders]


def test_groups_of_a_grid_are_distinguished() -> None:
    prove_no_hang(_grid(["ab", "ab", "ab", "ab"]))
    # Both sums along dp happen in the column of ranks 1 and 3 only: no group differs within itself.
    prove_no_hang(_grid(["b", "ba", "b", "ba"]))
    with pytest.raises(RankError, match="ranks 0 and 2 differ"):
        prove_no_hang(_grid(["ab", "b", "b", "b"]))


def test_a_circle_through_groups_is_found() -> None:
    """0-1 and 2-3 share tp, 0-2 and 1-3 share dp: each rank waits for the next one round the square."""
    with pytest.raises(RankError, match="4 of 4 ranks"):
        prove_no_hang(_grid(["ab", "ba", "ba", "ab"]))


def test_every_rank_needs_a_graph() -> None:
    with pytest.raises(ValueError, match=r"a mesh of .*, got 1 graphs"):
        prove_no_hang([_graph(_overlapped, dp=2)])


def test_a_rank_without_a_part_in_an_uneven_exchange_agrees() -> None:
    """As in a hop that some ranks skip, or a ragged exchange whose row on one rank is even by chance."""
    for op in ("ppermute", "all_to_all"):
        uneven, empty, even = (f"loss sp: {op} float32 {sizes}" for sizes in ("uneven", "[0, 0, 0]", "[2, 2, 2]"))
        compare_sequences([[empty], [uneven], [uneven]])
        compare_sequences([[uneven], [even], [empty]])
        with pytest.raises(RankError, match="differ in collective 1"):
            compare_sequences([[even], [empty]])
        with pytest.raises(RankError, match="differ in collective 1"):
            compare_sequences([[uneven], [f"loss sp: {op} float64 uneven"]])
        with pytest.raises(RankError, match="differ in collective 1"):
            compare_sequences([[uneven], ["loss sp: all_gather float32 [2, 2, 2]"]])


@pytest.mark.parametrize(
    "name",
    [
        "all_to_all",
        pytest.param("ppermute", marks=pytest.mark.nightly),
        pytest.param("psum_scatter", marks=pytest.mark.nightly),
    ],
)
def test_an_exchange_has_the_name_that_was_noted(name: str) -> None:
    """This rank's row looks like a permutation's, which does not decide for the others."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    args = (x, [2, 0, 0], [0, 0, 0], name, "sp")
    sent = graph.call_function(torch.ops.shardfn.loss_exchange_start.default, args)
    sent.meta["val"] = torch.empty(0)
    graph.output(sent)
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    gm.meta.update(mesh_shape={"sp": 3}, coords={"sp": 1})
    assert [(t.op, t.sent) for t in transfers(gm)] == [(name, 8)]
