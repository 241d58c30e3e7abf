"""Covers the order of a graph before and after each pass; and the moves that memory forbids."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import shardfn.collectives  # noqa: F401  # defines the ops
from shardfn.graph import Schedule
from shardfn.graph._bucket import bucket
from shardfn.graph._donate import donate, in_place_twin
from shardfn.graph._edit import call
from shardfn.graph._hazards import Memory, dependences, legal_order
from shardfn.graph._overlap import overlap_reductions
from shardfn.graph._prefetch import prefetch
from shardfn.graph._rematerialise import rematerialise
from shardfn.graph._reorder import free_at_last_use, sink_waits
from shardfn.graph._reuse import reuse_gathers

_ATEN = torch.ops.aten
_OPS = torch.ops.shardfn


def _gather(own: Tensor) -> Tensor:
    n = own.numel()
    return _OPS.wait(_OPS.all_gather_start(own, [n, n], "dp"))


def _scatter(flat: Tensor) -> Tensor:
    n = flat.numel() // 2
    return _OPS.wait(_OPS.psum_scatter_start(flat, [n, n], 0, "dp"))


def _traced(f: Callable[..., Any], *args: Tensor, donated: tuple[int, ...] = ()) -> GraphModule:
    gm = make_fx(f, tracing_mode="fake")(*args)
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    gm.meta["donated"] = {names[i] for i in donated}
    return gm


def _ops(gm: GraphModule) -> list[str]:
    """The ops that run, by short names."""
    short = {"all_gather_start": "gather", "psum_scatter_start": "scatter", "getitem": "take"}
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    names = [str(getattr(n.target, "__name__", n.target)).split(".")[0] for n in nodes]
    return [short.get(name, name) for name in names]


def _phases(gm: GraphModule, backward_from: str) -> GraphModule:
    phase = "forward"
    for node in gm.graph.nodes:
        phase = "backward" if node.name == backward_from else phase
        node.meta["phase"] = phase
    return gm


# sink_waits


def test_a_wait_and_its_views_go_down_to_the_first_use() -> None:
    gm = _traced(lambda a, x: (x * 2 @ _gather(a).view(2, 2),), torch.ones(2), torch.ones(2, 2))
    late = _traced(lambda a, x: _late_use(a, x), torch.ones(2), torch.ones(2, 2))
    assert _ops(gm) == ["mul", "gather", "wait", "view", "mm"]
    assert _ops(late) == ["gather", "wait", "view", "mul", "mm"]
    assert _ops(sink_waits(late)) == ["gather", "mul", "wait", "view", "mm"]
    assert _ops(late) == ["gather", "wait", "view", "mul", "mm"]


def _late_use(a: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    w = _gather(a).view(2, 2)
    return (x * 2 @ w,)


def test_a_wait_does_not_pass_a_write_to_its_message() -> None:
    def f(a: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        w = _gather(a[:2])
        x = x * 2
        a.view(-1)[2:].mul_(0)  # another part of the same memory
        return (w.sum() + x.cos(),)

    assert _ops(sink_waits(_traced(f, torch.ones(4), torch.ones(2)))) == [
        *("slice", "gather", "mul", "view", "slice", "wait", "mul_", "sum", "cos", "add")
    ]


def test_a_wait_that_fills_a_leaf_does_not_pass_its_reader() -> None:
    def f(p: Tensor, own: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        _OPS.wait(_OPS.all_gather_into_start(p.view(-1), own, [1, 1], "dp"))
        return (x.cos(), p.sin())

    gm = _traced(f, torch.ones(2), torch.ones(1), torch.ones(2))
    assert _ops(sink_waits(gm)) == ["view", "all_gather_into_start", "cos", "wait", "sin"]


def test_a_loss_own_collective_sinks_and_its_result_is_one_memory() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        s = _OPS.wait(_OPS.loss_psum_start(x, "dp"))
        return (y.cos(), s + 1)

    gm = _traced(f, torch.ones(2), torch.ones(2))
    assert _ops(gm) == ["loss_psum_start", "wait", "cos", "add"]
    assert _ops(sink_waits(gm)) == ["loss_psum_start", "cos", "wait", "add"]
    memory = Memory(gm)
    start, wait = (n for n in memory.order if n.name in ("loss_psum_start", "wait"))
    assert memory.shown(start) == memory.shown(wait)


# prefetch


def _chain(*own: Tensor) -> tuple[Tensor, ...]:
    y = own[-1]
    for a in own[:-1]:
        y = y @ _gather(a).view(2, 2)
    return (y,)


def test_gathers_go_ahead_as_far_as_the_budget_goes() -> None:
    gm = _traced(_chain, *(torch.ones(2) for _ in range(4)), torch.ones(2, 2))
    use = ["wait", "view", "mm"]
    assert _ops(gm) == ["gather", *use] * 4
    # 16 bytes a leaf.
    one = ["gather", "gather", *use, "gather", *use, "gather", *use, *use]
    assert _ops(prefetch(gm, budget=0)) == one == _ops(prefetch(gm, budget=31))
    assert _ops(prefetch(gm, budget=32)) == ["gather"] * 3 + [*use, "gather", *use, *use, *use]
    assert _ops(prefetch(gm, budget=64)) == ["gather"] * 4 + use * 4
    assert _ops(prefetch(prefetch(gm, budget=64), budget=0)) == one


def test_a_gather_stays_behind_a_write_to_its_block_and_takes_its_copies_along() -> None:
    def f(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        y = x @ _gather(a).view(2, 2)
        b.mul_(2)
        y = y.cos()
        z = _gather(b.to(torch.bfloat16)).float().view(2, 2)
        return (y @ z,)

    gm = _traced(f, torch.ones(2), torch.ones(2), torch.ones(2, 2))
    tail = ["mul_", "cos", "_to_copy", "gather", "wait", "_to_copy", "view", "mm"]
    assert _ops(gm) == ["gather", "wait", "view", "mm", *tail]
    assert _ops(prefetch(gm, budget=64)) == [
        *("gather", "wait", "view", "mm", "mul_", "_to_copy", "gather", "cos", "wait", "_to_copy", "view", "mm")
    ]


# bucket


def test_small_gathers_become_one() -> None:
    gm = _traced(lambda a, b, x: (x * _gather(a).sum() * _gather(b).sum(),), *map(torch.ones, (2, 3, 4)))
    assert _ops(gm) == ["gather", "wait", "sum", "mul", "gather", "wait", "sum", "mul"]
    out = bucket(gm, limit=40)
    member = ["slice", "clone", "view"]
    assert _ops(out) == [*("cat", "gather", "wait", "slice", "view", *member, "sum", "mul", *member, "sum", "mul")]
    assert next(n.args[1] for n in out.graph.nodes if "start" in n.name) == [5, 5]
    assert _ops(bucket(gm, limit=39)) == _ops(gm)


def test_a_gather_that_needs_another_stays_alone() -> None:
    gm = _traced(lambda a: (_gather(_gather(a)[:1] * 2),), torch.ones(2))
    assert _ops(bucket(gm, limit=1 << 20)) == _ops(gm)


def test_small_reductions_become_one_at_the_place_of_the_last() -> None:
    def f(g: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        a = _scatter(g)
        x = x.cos()
        b = _scatter(k)
        return (x, a * 2, b * 2)

    gm = _traced(f, torch.ones(4), torch.ones(6), torch.ones(2))
    assert _ops(gm) == ["scatter", "wait", "cos", "scatter", "wait", "mul", "mul"]
    out = bucket(gm, limit=40)
    assert _ops(out) == [
        *("cos", "slice", "view", "slice", "view", "cat", "view", "scatter", "wait", "slice", "mul", "slice", "mul")
    ]
    assert next(n.args[1] for n in out.graph.nodes if "start" in n.name) == [5, 5]


def test_a_reduction_whose_value_is_needed_does_not_wait_for_others() -> None:
    def f(g: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        a = _scatter(g) * 2
        return (a, _scatter(k))

    gm = _traced(f, torch.ones(4), torch.ones(4))
    assert _ops(bucket(gm, limit=1 << 20)) == _ops(gm)


def test_a_gradient_that_is_overwritten_is_sent_before() -> None:
    def f(g: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        a = _scatter(g)
        g.view(2, 2).zero_()
        return (a, _scatter(k))

    gm = _traced(f, torch.ones(4), torch.ones(4))
    assert _ops(bucket(gm, limit=1 << 20)) == _ops(gm)


# reuse_gathers


def _turn(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x * _gather(a)
    z = y * _gather(b)
    dy = z * _gather(b)
    return (dy * _gather(a),)


def test_the_last_layer_is_gathered_once() -> None:
    gm = _traced(_turn, torch.ones(2), torch.ones(2), torch.ones(4))
    assert _ops(gm) == ["gather", "wait", "mul"] * 4
    assert _ops(reuse_gathers(gm, budget=0)) == ["gather", "wait", "mul"] * 2 + ["mul", "gather", "wait", "mul"]
    assert _ops(reuse_gathers(gm, budget=16)) == ["gather", "wait", "mul"] * 2 + ["mul", "mul"]


@pytest.mark.parametrize(
    "write",
    ["block", pytest.param("value", marks=pytest.mark.nightly), pytest.param("view", marks=pytest.mark.nightly)],
)
def test_a_leaf_written_between_is_gathered_again(write: str) -> None:
    def f(a: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        w = _gather(a)
        y = x * w
        {"block": a, "value": w, "view": w.view(2, -1)}[write].mul_(2)
        return (y * _gather(a),)

    gm = _traced(f, torch.ones(2), torch.ones(4))
    assert _ops(reuse_gathers(gm, budget=1 << 20)) == _ops(gm)


# overlap_reductions


def test_waits_are_put_off_until_the_limit() -> None:
    def f(*grads: Tensor) -> tuple[Tensor, ...]:
        out = [_scatter(g * 2) for g in grads]
        return tuple(x * 3 for x in out)

    gm = _traced(f, *(torch.ones(4) for _ in range(3)))
    start = ["mul", "scatter"]
    assert _ops(gm) == ["mul", "scatter", "wait"] * 3 + ["mul"] * 3
    assert _ops(overlap_reductions(gm, limit=48)) == start * 3 + ["wait", "mul"] * 3
    assert _ops(overlap_reductions(gm, limit=32)) == [
        *start,
        *start,
        "mul",
        "wait",
        "scatter",
        "mul",
        *["wait", "mul"] * 2,
    ]


def test_a_start_goes_up_to_its_gradient_with_its_copies() -> None:
    def f(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        g = g * 2
        x = x.cos()
        s = _scatter(g.t().contiguous().view(-1))
        return (x.sin(), s * 2)

    gm = _traced(f, torch.ones(2, 2), torch.ones(2))
    assert _ops(gm) == ["mul", "cos", "t", "clone", "view", "scatter", "wait", "sin", "mul"]
    assert _ops(overlap_reductions(gm, limit=64)) == [
        *("mul", "t", "clone", "view", "scatter", "cos", "sin", "wait", "mul")
    ]


# rematerialise


def _wide(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = x @ w
    y = h.cos()
    loss = h.repeat(6, 1).sum()
    return (y.t() @ (h * loss),)


def test_cheap_activations_are_computed_again() -> None:
    gm = _phases(_traced(_wide, torch.ones(8, 8), torch.ones(8, 8)), "t")
    assert _ops(gm) == ["mm", "cos", "repeat", "sum", "t", "mul", "mm"]
    out = rematerialise(gm, budget=7 * 256 + 8)
    assert _ops(out) == ["mm", "cos", "repeat", "sum", "cos", "t", "mul", "mm"]
    # Values for the backward alone are no longer computed before it.
    assert _ops(free_at_last_use(out)) == ["mm", "repeat", "sum", "cos", "mul", "t", "mm"]
    assert out.meta["rematerialise"]["reached"] <= 7 * 256 + 8
    assert _ops(rematerialise(gm, budget=1 << 20)) == _ops(gm)


def test_random_and_written_values_are_kept() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        mask, y = torch.rand_like(x), x.cos()
        y.add_(1)
        return ((mask * y) * x.repeat(9, 1).sum(),)

    gm = _phases(_traced(f, torch.ones(8, 8)), "mul")
    assert rematerialise(gm, budget=0).meta["rematerialise"]["again"] == 0


def test_a_weight_is_taken_from_the_gather_of_the_backward() -> None:
    def f(a: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        h = x @ _gather(a).view(8, 8)
        loss = x.repeat(9, 1).sum()
        g = h * loss
        return (g @ _gather(a).view(8, 8).t(),)

    gm = _phases(_traced(f, torch.ones(32), torch.ones(8, 8)), "mul")
    out = rematerialise(gm, budget=0)
    assert _ops(gm)[:4] == ["gather", "wait", "view", "mm"] and _ops(gm).count("gather") == 2
    assert _ops(out).count("gather") == 2 and _ops(out).count("mm") == 3
    again = [n for n in out.graph.nodes if "mm" in n.name][1]
    assert "backward" == again.args[1].meta["phase"]


# free_at_last_use


def test_constants_views_and_widening_casts_wait_for_their_use() -> None:
    def f(x: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        wide, narrow = x.double(), p.cos().half()
        zero, _ = torch.zeros(2), p.sin()
        flat = p.view(-1)
        y = p.exp()
        return (y + zero + flat + wide + narrow,)

    gm = _traced(f, torch.ones(2), torch.ones(2))
    assert _ops(gm)[:7] == ["_to_copy", "cos", "_to_copy", "zeros", "sin", "view", "exp"]
    assert _ops(free_at_last_use(gm)) == [
        *("cos", "_to_copy", "exp", "zeros", "add", "view", "add", "_to_copy", "add", "add")
    ]


def test_results_are_taken_apart_at_once_and_writes_stay() -> None:
    def f(x: Tensor, stat: Tensor) -> tuple[Tensor, ...]:
        value, index = x.max(0)
        stat.add_(1)
        y = x.cos()
        return (y * value, index)

    gm = _traced(f, torch.ones(2, 2), torch.ones(2))
    late = [n for n in gm.graph.nodes if n.target is operator.getitem]
    for node in late:
        next(n for n in gm.graph.nodes if n.name == "cos").append(node)
    assert _ops(gm) == ["max", "add_", "cos", "take", "take", "mul"]
    assert _ops(free_at_last_use(gm)) == ["max", "take", "take", "add_", "cos", "mul"]


# donate


def test_a_pure_optimizer_runs_in_the_buffers_it_was_given() -> None:
    def f(p: Tensor, mu: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        new = mu * 0.9 + g
        return (p - new * 0.1, new)

    args = [torch.ones(3) for _ in range(3)]
    assert _ops(_traced(f, *args)) == ["mul", "add", "mul", "sub"]
    assert _ops(donate(_traced(f, *args))) == ["mul", "add_", "mul", "sub"]
    gm = donate(_traced(f, *args, donated=(0, 1)))
    assert _ops(gm) == ["mul_", "add_", "mul", "sub_"]
    state = [torch.ones(3), torch.ones(3), torch.ones(3)]
    p, mu = gm(*state)
    assert p.data_ptr() == state[0].data_ptr() and mu.data_ptr() == state[1].data_ptr()
    assert torch.equal(mu, torch.full((3,), 1.9)) and torch.equal(p, 1 - mu * 0.1)


def test_lists_run_in_place_too() -> None:
    def f(p: list[Tensor], g: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(torch._foreach_sub(p, torch._foreach_mul(g, 0.1)))

    args = [torch.ones(2), torch.ones(3), torch.ones(2), torch.ones(3)]
    gm = _traced(lambda *x: f(list(x[:2]), list(x[2:])), *args, donated=(0, 1))
    assert _ops(gm) == ["_foreach_mul", "take", "take", "_foreach_sub", "take", "take"]
    assert _ops(donate(gm)) == ["_foreach_mul", "take", "take", "_foreach_sub_"]
    assert all(torch.equal(x, y) for x, y in zip(gm(*args), donate(gm)(*args), strict=True))


_REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "read later": lambda p, x: (p * 2, p.sum()),
    "read later through a view": lambda p, x: (p.view(-1) * 2, p.sum()),
    "returned": lambda p, x: (p * 2, p),
    "a view of it is returned": lambda p, x: (p * 2, p.view(-1)),
    "not contiguous": lambda p, x: (p.view(2, 2).t() * 2,),
    "broadcast": lambda p, x: (p * x.view(1, 4),),
    "another dtype": lambda p, x: (p > 2,),
    "promoted": lambda p, x: (p * x.double(),),
    "the other operand is another view": lambda p, x: (p.view(2, 2) * p.view(2, 2).t(),),
    "not given away": lambda p, x: (x * 2,),
    "expanded": lambda p, x: (p[:1].expand(4) * 2,),
    "on its way": lambda p, x: _in_flight(p),
}


def _in_flight(p: Tensor) -> tuple[Tensor, ...]:
    handle = _OPS.all_gather_start(p, [4], "dp")
    return (p * 2, _OPS.wait(handle))


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(_REFUSED)]
)
def test_memory_with_another_reader_is_not_overwritten(case: str) -> None:
    gm = _traced(_REFUSED[case], torch.ones(4), torch.ones(4), donated=(0,))
    assert _ops(donate(gm)) == _ops(gm)


def test_a_block_that_was_gathered_is_no_temporary_to_write_into() -> None:
    gm = _traced(lambda a: _sent(a), torch.ones(2))
    assert "mul_" not in _ops(donate(gm))


def _sent(a: Tensor) -> tuple[Tensor, ...]:
    half = a.cos()
    w = _gather(half)
    return (w, half * 2)


def test_every_twin_takes_the_same_arguments() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    aten = torch.ops.aten
    found = [
        in_place_twin(graph.call_function(op, (x,))) for op in (aten.add.Tensor, aten.gelu.default, aten.mm.default)
    ]
    assert found == [aten.add_.Tensor, aten.gelu_.default, None]
    assert in_place_twin(graph.call_function(aten.bernoulli.p, (x, 0.5))) is None


# Orders that are kept


def test_random_draws_and_stops_keep_their_order() -> None:
    def f(a: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        one = torch.rand_like(x)
        two = torch.rand_like(x)
        torch.ops.shardfn.stop_unless(x.sum() > 0, [x])
        a.add_(1)
        return (two, one, a)

    gm = _traced(f, torch.ones(2), torch.ones(2))
    before = dependences(Memory(gm))
    names = {n.name: {p.name for p in ps} for n, ps in before.items()}
    assert "rand_like" in names["rand_like_1"] and "rand_like_1" in names["stop_unless"]
    assert "stop_unless" in names["add_"]
    backwards = list(reversed(list(gm.graph.nodes)))
    order = [n.name for n in legal_order(backwards, before)]
    assert [n for n in order if n in ("rand_like", "rand_like_1", "stop_unless", "add_")] == [
        *("rand_like", "rand_like_1", "stop_unless", "add_")
    ]


def test_passes_are_functions_of_the_graph() -> None:
    gm = _traced(_chain, *(torch.ones(2) for _ in range(4)), torch.ones(2, 2))
    text = str(gm.graph)
    first, second = (str(Schedule(prefetch=32, bucket=40)(gm).graph) for _ in range(2))
    assert first == second and str(gm.graph) == text


@pytest.mark.nightly
@pytest.mark.parametrize("layers", [40, pytest.param(1200, marks=pytest.mark.nightly)])
def test_a_graph_of_many_thousand_nodes_is_scheduled(layers: int) -> None:
    gm = _repeated(layers)
    assert len(gm.graph.nodes) > 17 * layers
    assert _count(gm, "gather") == 2 * _count(gm, "scatter") == 2 * layers
    out = Schedule(budget=layers * 20, prefetch=64, bucket=40, reductions=64)(gm)
    assert _count(out, "gather") <= layers + 1 and _count(out, "scatter") == layers / 2
    assert out.meta["rematerialise"]["reached"] <= layers * 20 and out.meta["rematerialise"]["again"] > layers / 2


def _count(gm: GraphModule, op: str) -> int:
    return _ops(gm).count(op)


def _repeated(layers: int) -> GraphModule:
    """A step of many small layers, written node by node, since a trace of it would take long."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()

    def given(name: str, *shape: int) -> Any:
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def do(op: Any, *args: Any) -> Any:
        return call(graph, op, args, like=x)

    own = [given(f"w{i}", 2) for i in range(layers)]
    x = y = given("x", 2, 2)
    x.meta["phase"], kept = "forward", []
    for a in own:
        w = do(_ATEN.view.default, do(_OPS.wait.default, do(_OPS.all_gather_start.default, a, [2, 2], "dp")), [2, 2])
        h = do(_ATEN.mm.default, y, w)
        kept.append((y, h))
        y = do(_ATEN.gelu.default, h)
    x.meta["phase"], grads, dy = "backward", [], y
    for a, (u, h) in reversed([*zip(own, kept, strict=True)]):
        w = do(_ATEN.view.default, do(_OPS.wait.default, do(_OPS.all_gather_start.default, a, [2, 2], "dp")), [2, 2])
        dh = do(_ATEN.gelu_backward.default, dy, h)
        dw = do(_ATEN.view.default, do(_ATEN.mm.default, do(_ATEN.t.default, u), dh), [4])
        grads.append(do(_OPS.wait.default, do(_OPS.psum_scatter_start.default, dw, [2, 2], 0, "dp")))
        dy = do(_ATEN.mm.default, dh, do(_ATEN.t.default, w))
    x.meta["phase"] = "update"
    graph.output(
        tuple(do(_ATEN.sub.Tensor, a, do(_ATEN.mul.Tensor, g, 0.1)) for a, g in zip(own, reversed(grads), strict=True))
    )
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(
    "call",
    [
        lambda gm: bucket(gm, limit=-1),
        pytest.param(lambda gm: prefetch(gm, budget=-1), marks=pytest.mark.nightly),
        pytest.param(lambda gm: reuse_gathers(gm, budget=-1), marks=pytest.mark.nightly),
        lambda gm: overlap_reductions(gm, limit=-1),
        pytest.param(lambda gm: rematerialise(gm, budget=-1), marks=pytest.mark.nightly),
    ],
)
def test_a_negative_number_of_bytes_is_an_error(call: Callable[[GraphModule], GraphModule]) -> None:
    with pytest.raises(ValueError, match="=-1"):
        call(_traced(lambda x: (x,), torch.ones(1)))
