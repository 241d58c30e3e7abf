"""Covers the analysis of a captured step: transfers as the counter counts them, memory by kind, cost, time, text."""

import itertools
import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from shardfn import collectives as c
from shardfn.core import key, make_mesh, tree_flatten, tree_unflatten
from shardfn.graph._calibrate import calibrate
from shardfn.graph._cost import cost_analysis, estimate
from shardfn.graph._device import Cluster, Device, Link
from shardfn.graph._memory import KINDS, memory_analysis
from shardfn.graph._show import as_text, chrome_trace
from shardfn.graph._transfers import transfers
from shardfn.models import gpt
from shardfn.nn import moe
from shardfn.testing import distributed

S = torch.ops.shardfn
N, ROWS = 8, 4


def _captured(world: int, index: int, layers: int = 2) -> tuple[GraphModule, list[Tensor]]:
    """A step at stage 3, written out by hand: square layers, second gathers in the backward, AdamW in place."""
    total = N * N + 1
    sizes = [total // world + (r < total % world) for r in range(world)]

    def gathered(own: Tensor) -> Tensor:
        return S.wait(S.all_gather_start(own, sizes, "dp"))[:-1].view(N, N)

    def step(x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        groups = [list(state[i * layers : (i + 1) * layers]) for i in range(4)]
        params, mu, nu, count = groups
        acts = [x]
        for p in params:
            acts.append(torch.tanh(acts[-1] @ gathered(p)))
        grad, grads = acts[-1] * 2, []
        for p, x_in, y in reversed(list(zip(params, acts, acts[1:], strict=False))):
            grad = grad * (1 - y * y)
            whole = torch.cat([(x_in.t() @ grad).view(-1), grad.new_zeros(1)])
            grads.insert(0, S.wait(S.psum_scatter_start(whole, sizes, index, "dp")))
            grad = grad @ gathered(p).t()
        norm = S.wait(S.psum_start([g.square().sum() for g in grads], "dp"))
        grads = [g * norm[0] for g in grads]
        torch._fused_adamw_(
            params,
            grads,
            mu,
            nu,
            [],
            count,
            lr=0.1,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        return (norm, *params, *mu, *nu)

    own = [torch.zeros(sizes[index]) for _ in range(3 * layers)]
    args = [torch.ones(ROWS, N), *own, *(torch.zeros(()) for _ in range(layers))]
    gm = make_fx(step, tracing_mode="fake")(*args)
    _mark(gm, layers, world)
    return gm, args


def _mark(gm: GraphModule, layers: int, world: int) -> None:
    gm.meta["mesh_shape"] = {"dp": world}
    names = ("params", "mu", "nu", "count")
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        node.meta["kind"] = "batch" if i == 0 else "params" if i <= layers else "optimizer"
        node.meta["leaf"] = f"{names[(i - 1) // layers]}[{(i - 1) % layers}]" if i else "batch"
    phase = "forward"
    for node in gm.graph.nodes:
        phase = {"mul": "backward", "pow_1": "update"}.get(node.name, phase)
        if node.op == "call_function":
            node.meta["phase"], node.meta["where"] = phase, f"model.py:{len(node.name)} in step"


# Transfers.


def test_transfers_name_axes_bytes_and_leaves() -> None:
    gm, _ = _captured(2, 0)
    found = transfers(gm)
    assert [(t.op, t.sent, t.leaves) for t in found] == [
        ("all_gather", 132, ("params[0]",)),
        ("all_gather", 132, ("params[1]",)),
        ("psum_scatter", 128, ("params[1]",)),
        ("all_gather", 132, ("params[1]",)),
        ("psum_scatter", 128, ("params[0]",)),
        ("all_gather", 132, ("params[0]",)),
        ("all_reduce", 8, ()),
    ]
    assert {t.axes for t in found} == {"dp"} and {t.num_ranks for t in found} == {2}
    assert [t.phase for t in found] == ["forward"] * 2 + ["backward"] * 4 + ["update"]
    assert all(t.wait is not None and t.dtype == torch.float32 and t.where for t in found)


@distributed(world=[2, pytest.param(3, marks=pytest.mark.nightly)])
def test_predicted_bytes_are_the_counted_bytes(world: int) -> None:
    mesh = make_mesh({"dp": world}, device="cpu")
    gm, args = _captured(world, mesh.coords["dp"])
    with c.count_traffic() as traffic, c.bind_mesh(mesh), c.bind_channels(c.Channels(mesh)):
        gm(*args)
    predicted = {(op, (axes,)): list(sums) for (op, axes), sums in cost_analysis(gm).transfers.items()}
    assert predicted == traffic.by_op


@pytest.mark.nightly
@distributed(world=4)
def test_the_collectives_of_a_loss_are_counted_alike() -> None:
    mesh = make_mesh({"dp": 2, "tp": 2}, device="cpu")

    def f(x: Tensor) -> Tensor:
        with c.bind_mesh(mesh):
            y = c.psum(x, "dp") + c.pmax(x, "tp")
            y = c.psum_scatter(c.all_gather(y, ("dp", "tp")), ("dp", "tp"))
            return c.all_to_all(y, "tp", split_dim=0, concat_dim=1).sum() + c.ppermute(
                x, ("dp", "tp"), [(0, 3), (2, 1)]
            )

    with c.count_traffic() as traffic:
        f(torch.ones(5, 3))
    gm = make_fx(f, tracing_mode="fake")(torch.ones(5, 3))
    gm.meta.update(mesh_shape=mesh.shape, coords=mesh.coords)
    predicted = {(op, tuple(axes.split(","))): list(n) for (op, axes), n in cost_analysis(gm).transfers.items()}
    assert predicted == traffic.by_op


# Memory.


def test_memory_counts_views_once_and_frees_after_the_last_use() -> None:
    def f(x: Tensor) -> Tensor:
        a = x + 1  # 400 bytes
        b = a.view(10, 10).t() * 2  # a dies here
        return (b.sum() + 1).view(1)

    memory = memory_analysis(make_fx(f, tracing_mode="fake")(torch.ones(100)))
    assert memory.timeline == (400, 800, 800, 800, 800, 404, 404, 404, 404)
    assert memory.peak == 1200 and memory.node == "mul"
    assert memory.by_kind["other"] == 400 and memory.by_kind["temporaries"] == 800


def test_memory_by_kind_adds_up() -> None:
    gm, args = _captured(2, 0)
    memory = memory_analysis(gm)
    assert tuple(memory.by_kind) == KINDS and sum(memory.by_kind.values()) == memory.peak
    assert all(memory.by_kind[k] <= memory.max_by_kind[k] for k in KINDS)
    assert memory.by_kind["params"] == 2 * 33 * 4 and memory.by_kind["optimizer"] == 4 * 33 * 4 + 2 * 4
    assert memory.by_kind["batch"] == args[0].nbytes
    assert memory.max_by_kind["gathered"] == 65 * 4
    assert memory.max_by_kind["activations"] == 2 * ROWS * N * 4
    assert max(memory.timeline) <= memory.peak
    assert memory.largest[0].nbytes == max(v.nbytes for v in memory.largest)
    assert "gathered" in str(memory)


def _moved_wait(op: str) -> tuple[int, ...]:
    """The timeline of a transfer over which an op runs."""
    graph = torch.fx.Graph()
    with torch._subclasses.FakeTensorMode():
        x = graph.placeholder("x")
        x.meta["val"] = torch.ones(100)
        made = [x]

        def add(target: Any, *arguments: Any) -> Any:
            node = graph.call_function(target, arguments)
            values = map_arg(arguments, lambda n: n.meta["val"])
            node.meta["val"] = target(*values)
            made.append(node)
            return node

        own = add(torch.ops.aten.neg.default, x)
        arguments = {"all_gather_start": ([100] * 3,), "psum_scatter_start": ([30, 30, 40], 1), "psum_start": ()}[op]
        operand = [own] if op == "psum_start" else own
        handle = add(getattr(S, op).default, operand, *arguments, "dp")
        add(torch.ops.aten.exp.default, x)
        value = add(S.wait.default, handle)
        add(torch.ops.aten.neg.default, value)
        graph.output((made[-1],))
    gm = GraphModule(torch.nn.Module(), graph)
    gm.meta["mesh_shape"] = {"dp": 3}
    return memory_analysis(gm).timeline


@pytest.mark.parametrize(
    ("op", "timeline"),
    [
        # x, neg, start, exp, wait, neg, output
        ("all_gather_start", (400, 800, 2000, 2000, 1600, 1600, 1600)),
        pytest.param("psum_scatter_start", (400, 800, 1160, 1160, 520, 520, 520), marks=pytest.mark.nightly),
        pytest.param("psum_start", (400, 800, 800, 800, 800, 800, 800), marks=pytest.mark.nightly),
    ],
)
def test_a_transfer_holds_its_inputs_and_its_own_buffers(op: str, timeline: tuple[int, ...]) -> None:
    assert _moved_wait(op) == timeline


def _gpt_step() -> tuple[GraphModule, list[Tensor]]:
    config = gpt.Config(vocab_size=96, num_layers=1, d_model=32, num_heads=4, max_len=16)
    leaves, treedef = tree_flatten(gpt.init(config, key(0)))

    def step(tokens: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            own = [leaf.detach().requires_grad_() for leaf in leaves]
            loss = gpt.loss(config, tree_unflatten(treedef, own), {"tokens": tokens})
            return loss, *torch.autograd.grad(loss, own)

    args = [torch.zeros(2, 17, dtype=torch.int64), *leaves]
    return make_fx(step, tracing_mode="fake")(*args), args


class _Measured(torch.fx.Interpreter):
    """Runs a graph node by node and adds up the storages that Python still holds: the slow meaning of a timeline."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.timeline: list[int] = []
        self._last: Any = None

    def run_node(self, n: torch.fx.Node) -> Any:
        out = super().run_node(n)
        held = [v for k, v in self.env.items() if k is not n]
        alive = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors([*held, out])}
        self.timeline.append(sum(alive.values()))
        return out


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


def test_the_timeline_of_a_gpt_is_that_of_its_run() -> None:
    gm, args = _gpt_step()
    memory = memory_analysis(gm)
    given = sum(t.nbytes for t in args)
    measured = _Measured(gm)
    with torch.no_grad():
        measured.run(*args)
    after = [b for b, n in zip(measured.timeline, gm.graph.nodes, strict=True) if n.op == "call_function"]
    # The interpreter frees placeholders too; it holds the same memory on top of them.
    assert max(after) <= memory.peak <= max(after) + given
    assert memory.peak > given and sum(memory.by_kind.values()) == memory.peak


# Cost.


def test_flops_of_a_gpt_are_those_of_its_products() -> None:
    gm, _ = _gpt_step()
    V, D, T, B, F = 96, 32, 16, 2, 128
    per_token = 2 * (4 * D * D + 2 * D * F + V * D)
    attention = 2 * 2 * B * T * T * D
    forward = B * T * per_token + attention
    backward = 2 * B * T * per_token + 5 * attention // 2
    assert cost_analysis(gm).flops == forward + backward


def test_flops_of_experts_are_those_of_their_rows() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return moe.grouped(x, w, torch.tensor([2, 4]), True)

    def g(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x, w.mT, offs=torch.tensor([2, 6], dtype=torch.int32))

    x, w = torch.ones(6, 8).bfloat16(), torch.ones(2, 16, 8).bfloat16()
    for layer in (f, g):
        graph = make_fx(torch.func.grad(lambda *xs: layer(*xs).square().sum(), (0, 1)), tracing_mode="fake")(x, w)  # noqa: B023
        assert cost_analysis(graph).flops == 3 * 2 * 6 * 8 * 16


def test_bytes_are_those_of_operands_and_results_and_views_cost_nothing() -> None:
    def f(table: Tensor, i: Tensor, x: Tensor) -> Tensor:
        return x.add_(torch.ops.aten.embedding(table, i).t().reshape(-1))

    gm = make_fx(f, tracing_mode="fake")(torch.ones(1000, 4), torch.zeros(3, dtype=torch.int64), torch.ones(12))
    from shardfn.graph._cost import node_bytes

    bytes_of = {n.name: node_bytes(n) for n in gm.graph.nodes if n.op == "call_function"}
    assert bytes_of["embedding"] == 2 * 48 and bytes_of["t"] == 0 and bytes_of["add_"] == 3 * 48


def _cluster(bandwidth: float, flops: float = 1e12) -> Cluster:
    link = Link(bandwidth, 1e-6)
    return Cluster(Device("toy", 1 << 30, {"float32": flops}, 1e9), 1, link, link)


def test_estimate_exposes_transfers_that_nothing_hides() -> None:
    gm, _ = _captured(2, 0)
    fast, slow = estimate(gm, _cluster(1e12)), estimate(gm, _cluster(1e6))
    assert fast.compute == pytest.approx(slow.compute)
    sent = sum(t.sent for t in transfers(gm))
    # As traced every start is followed by its wait: nothing overlaps.
    assert slow.communication["dp"] == pytest.approx(sent / 1e6 + 7e-6)
    assert slow.exposed["dp"] == pytest.approx(slow.communication["dp"])
    assert slow.seconds == pytest.approx(slow.compute + slow.exposed["dp"])
    assert 0 < slow.mfu < fast.mfu < 1
    one, _ = _captured(1, 0)
    assert estimate(one, _cluster(1e6)).communication == {}


def test_estimate_overlaps_transfers_under_way() -> None:
    def f(own: Tensor, x: Tensor) -> Tensor:
        handle = S.all_gather_start(own, [100, 100], "dp")
        y = x.exp()  # 8000 bytes: 8 us
        return S.wait(handle).sum() + y.sum()

    gm = make_fx(f, tracing_mode="fake")(torch.ones(100), torch.ones(1000))
    gm.meta["mesh_shape"] = {"dp": 2}
    hidden, shown = estimate(gm, _cluster(1e9)), estimate(gm, _cluster(4e7))
    assert hidden.exposed == {"dp": 0.0}
    assert shown.exposed["dp"] == pytest.approx(11e-6 - 8e-6)
    trace = chrome_trace(shown)
    json.dumps(trace)
    lanes = {e["args"]["name"]: e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert lanes == {"compute": 0, "transfers over dp": 1}
    bars = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [e["tid"] for e in bars if e["cat"] == "dp"] == [1]
    for a, b in itertools.pairwise([e for e in bars if e["tid"] == 0]):
        assert a["ts"] + a["dur"] <= b["ts"] + 1e-3


def test_a_device_without_a_rate_is_an_error() -> None:
    gm = make_fx(lambda a: a @ a, tracing_mode="fake")(torch.ones(2, 2, dtype=torch.bfloat16))
    gm.meta["mesh_shape"] = {}
    with pytest.raises(ValueError, match="bfloat16"):
        estimate(gm, _cluster(1.0))


@distributed(world=2)
def test_calibration_agrees_between_ranks() -> None:
    mesh = make_mesh({"dp": 2}, device="cpu")
    box = calibrate(mesh, seconds=0.1)
    figures = [*box.device.flops.values(), box.device.bandwidth, box.inside.bandwidth, box.inside.latency]
    assert all(f > 0 for f in figures)
    with c.bind_mesh(mesh):
        both = c.all_gather(torch.tensor([figures], dtype=torch.float64), "dp")
    assert torch.equal(both[0], both[1])


# Text.


def test_text_is_stable_and_readable() -> None:
    def f(own: Tensor) -> Tensor:
        return S.wait(S.all_gather_start(own, [2, 2], "dp")).view(2, 2).t() * 2

    gm = make_fx(f, tracing_mode="fake")(torch.ones(2))
    gm.meta["mesh_shape"] = {"dp": 2}
    own = next(iter(gm.graph.nodes))
    own.meta.update(kind="params", leaf="params['w']")
    list(gm.graph.nodes)[-2].meta["where"] = "model.py:12 in loss"
    assert as_text(gm) == "\n".join(
        [
            "own_1: float32[2] = input params params['w']",
            "# forward",
            "all_gather_start: float32[4] = start all_gather(own_1) over dp (2 ranks) float32 [2 x 2], 8 bytes:"
            " params['w']",
            "wait: float32[4] = wait(all_gather_start) for all_gather over dp",
            "view: float32[2, 2] = aten.view(wait, [2, 2])",
            "t: float32[2, 2] = aten.t(view)",
            "mul: float32[2, 2] = aten.mul.Tensor(t, 2)  # model.py:12 in loss",
            "return mul",
        ]
    )
    assert as_text(_captured(2, 0)[0]) == as_text(_captured(2, 0)[0])
