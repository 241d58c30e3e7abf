"""Covers exchanges that hold exactly the rows that come: where ops allow it, and where one needs the whole size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import shardfn as sf
from shardfn.graph import compile_graph, exact_rows, memory_analysis
from shardfn.graph._inductor import find_compiler
from shardfn.graph._regions import Region, cut
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers

_MOST, _START = 8, torch.ops.shardfn.ragged_all_to_all_start.default
_KERNELS = torch.ops.shardfn_kernels


def _come(x: Tensor, sizes: Tensor, table: Tensor) -> Tensor:
    """The rows of this rank alone, which an exchange brings."""
    zero = torch.zeros_like(sizes)
    start = torch.ops.shardfn.ragged_all_to_all_start(x, zero, sizes, zero, sizes, _MOST, "")
    return torch.ops.shardfn.arrived_rows(torch.ops.shardfn.wait(start), table)


def _product(come: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    return _KERNELS.grouped_product(come, w, counts, False, False)


def _layer(come: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    gate, up = _product(come, w, counts).chunk(2, -1)
    h = torch.nn.functional.silu(gate) * up
    both = torch.cat([h, h.to(torch.float64).float()], 1)
    return _KERNELS.grouped_outer(come, both, counts)


def _sent_on(come: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    del w
    at = torch.ops.shardfn.rows_as(torch.arange(_MOST).flip(0) - _MOST + counts.sum(), come).clamp(min=-1)
    rows, zero = _KERNELS.gather_rows(come, at[:, None], None), torch.zeros_like(counts[:1])
    num = counts.sum(0, keepdim=True)
    sent = torch.ops.shardfn.ragged_all_to_all_start(rows * 2, zero, num, zero, num, 4, "")
    return torch.ops.shardfn.wait(sent)


def _graph(f: Callable[..., Any]) -> tuple[GraphModule, list[Tensor]]:
    made = torch.Generator().manual_seed(0)
    given = [torch.randn(3, 4, generator=made), torch.randn(2, 4, 4, generator=made)]
    given += [torch.tensor([3]), torch.tensor([[3]]), torch.tensor([1, 2])]

    def run(x: Tensor, w: Tensor, sizes: Tensor, table: Tensor, counts: Tensor) -> Any:
        return (f(_come(x, sizes, table), w, counts),)

    return make_fx(run, tracing_mode="fake")(*given), given


def _rows(gm: GraphModule) -> list[Any]:
    return [n.args[5] for n in exact_rows(gm).graph.nodes if n.target is _START]


@pytest.mark.parametrize(("f", "wanted"), [(_layer, [-1]), (_sent_on, [-1, 4])])
def test_ops_on_rows_allow_exactly_those_that_come(f: Any, wanted: list[int]) -> None:
    gm, given = _graph(f)
    assert _rows(gm) == wanted
    torch.testing.assert_close(compile_graph(gm, "graph")(*given), gm(*given), rtol=0, atol=0)


WHOLE: dict[str, Callable[..., Any]] = {
    "it is returned": lambda come, w, counts: come * 2,
    "a shape is written down": lambda come, w, counts: _layer(come.view(_MOST, 2, 2).view(_MOST, 4), w, counts),
    "a sum over rows": lambda come, w, counts: come.sum(0),
    "an operand of whole size": lambda come, w, counts: _layer(come + torch.arange(_MOST)[:, None], w, counts),
    "rows along another dim": lambda come, w, counts: come.t() @ torch.ones(_MOST),
    "a part of the rows": lambda come, w, counts: _layer(come[:6], w, counts),
    "places of whole size": lambda come, w, counts: _KERNELS.gather_rows(come, torch.arange(_MOST)[:, None], None),
    "factors of whole places": lambda come, w, counts: _KERNELS.gather_rows(
        torch.ones(_MOST, 2), torch.arange(_MOST)[:, None], come[:, :1]
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_op_that_needs_the_whole_size_keeps_it(name: str) -> None:
    gm, given = _graph(WHOLE[name])
    assert exact_rows(gm) is gm
    torch.testing.assert_close(compile_graph(gm, "graph")(*given), gm(*given), rtol=0, atol=0)


def test_values_of_two_tables_that_meet_keep_their_whole_size() -> None:
    def f(x: Tensor, sizes: Tensor, one: Tensor, other: Tensor, counts: Tensor) -> Any:
        both = _come(x, sizes, one), _come(x, sizes, other)
        return (_KERNELS.grouped_outer(*both, counts),)

    given = torch.ones(3, 4), torch.tensor([3]), torch.tensor([[3]]), torch.tensor([[3]]), torch.tensor([3])
    assert _rows(make_fx(f, tracing_mode="fake")(*given)) == [_MOST, _MOST]


@pytest.mark.day("gelu")
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_a_mixture_of_experts_holds_the_rows_that_come(mlp: Any) -> None:
    experts = moe.Experts(num=4, exchange=layers.AllToAll("ep"))
    config = gpt.Config(vocab_size=16, num_layers=1, d_model=8, num_heads=2, max_len=8, mlp=mlp, experts=experts)
    step = sf.sharded_step(
        sf.jit(lambda p, b: gpt.loss(config, p, b)),
        sf.optim.sgd(0.1),
        mesh=sf.make_mesh({"ep": 2}, abstract=True),
        specs=gpt.specs(config),
        batch=sf.P("ep"),
    )
    params = sf.eval_shape(lambda: gpt.init(config, sf.key(0)))
    lowered = step.lower(params, {"tokens": torch.empty(2, 5, dtype=torch.int64, device="meta")})
    # To the experts and back, and so the gradients.
    assert sorted(_rows(lowered.gm)) == [-1, -1, 16, 16]
    most, balanced = lowered.memory_analysis(), lowered.memory_analysis(balanced=True)
    assert balanced.peak < most.peak and balanced.by_kind["params"] == most.by_kind["params"]


@pytest.mark.nightly
def test_compiled_regions_leave_out_the_rows_that_come() -> None:
    """Arithmetic on other values is compiled beside them."""

    def f(come: Tensor, w: Tensor, counts: Tensor) -> Tensor:
        h = torch.relu(come.sin()) * 2
        return _KERNELS.grouped_outer(h, _product(h, torch.relu(w.sin()) * 2, counts), counts)

    gm, given = _graph(f)
    regions = [step for step in cut(exact_rows(gm), min_bytes=0) if isinstance(step, Region)]
    assert len([step for step in cut(gm, min_bytes=0) if isinstance(step, Region)]) == 2
    assert [node.name for region in regions for node in region.nodes] == ["sin_1", "relu_1", "mul_1"]
    if find_compiler() is not None:
        got = compile_graph(gm, "inductor", min_bytes=0)
        assert got.num_regions == 1
        torch.testing.assert_close(got(*given), compile_graph(gm, "graph")(*given))


def test_the_memory_of_a_balanced_load_has_the_rows_that_are_sent() -> None:
    """Three rows are sent, and eight may come."""
    gm, _ = _graph(_layer)
    most, balanced = ({x.name: x for x in memory_analysis(gm, balanced=b).largest} for b in (False, True))
    assert set(balanced) == set(most)
    shorter = {name: (x.nbytes, balanced[name].nbytes) for name, x in most.items() if balanced[name] != x}
    assert shorter == dict.fromkeys(("ragged_all_to_all_start", "cat"), (8 * 4 * 4, 3 * 4 * 4))
    assert balanced["cat"].shape == most["cat"].shape == (8, 4)
    graph, _ = _graph(WHOLE["a sum over rows"])
    assert memory_analysis(graph, balanced=True) == memory_analysis(graph)


@pytest.mark.nightly
def test_two_networks_and_dealt_tokens_hold_the_rows_that_come() -> None:
    """Each hop to the experts and back, and the gradients of each."""
    both = ("node", "gpu")
    for exchange, hops in (
        (layers.AllToAll(both, hierarchical=True), 2),
        (layers.AllToAll(both, dealt="tp"), 2),
        (layers.AllToAll(both, hierarchical=True, dealt="tp"), 3),
    ):
        config = gpt.Config(
            vocab_size=16, num_layers=1, d_model=8, num_heads=2, max_len=8, experts=moe.Experts(4, exchange=exchange)
        )
        step = sf.sharded_step(
            sf.jit(lambda p, b, config=config: gpt.loss(config, p, b, axis="tp")),
            sf.optim.sgd(0.1),
            mesh=sf.make_mesh({"node": 2, "gpu": 2, "tp": 2}, abstract=True),
            specs=gpt.specs(config, tp="tp"),
            batch=sf.P(both),
        )
        params = sf.eval_shape(lambda config=config: gpt.init(config, sf.key(0)))
        lowered = step.lower(params, {"tokens": torch.empty(2, 5, dtype=torch.int64, device="meta")})
        found = _rows(lowered.gm)
        # The rows that come back to a rank are those that it has sent, whose number its tokens limit.
        assert len(found) == 4 * hops and found.count(-1) == 4 * hops - 2, (exchange, found)
