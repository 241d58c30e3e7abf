"""Covers the passes by running them: on several ranks in one process, over wires that catch every race."""

import functools
import operator
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from shardfn.collectives import Channels, StoppedError, bind_channels
from shardfn.core import Pending, adopting
from shardfn.graph import Schedule
from shardfn.graph._bucket import bucket
from shardfn.graph._donate import donate
from shardfn.graph._edit import reorder_graph
from shardfn.graph._overlap import overlap_reductions
from shardfn.graph._prefetch import prefetch
from shardfn.graph._rematerialise import rematerialise
from shardfn.graph._reorder import free_at_last_use, sink_waits
from shardfn.graph._reuse import reuse_gathers
from shardfn.graph._transfers import is_move, is_start
from shardfn.memory import _ops

_OPS = torch.ops.shardfn
_MOVES = torch.ops.shardfn_memory


# A wire on which a transfer happens at its wait: until then its destination is poisoned, and both ends are checked.


class _Wire(Channels):
    """All ranks in one process, a thread each. The n-th transfer of a channel must be the same on all of them."""

    def __init__(self, world: int) -> None:
        self._world, self._here = world, threading.local()
        self._posts: dict[tuple[Any, ...], dict[int, tuple[Tensor, tuple[Any, ...]]]] = {}
        self._arrived = threading.Condition()
        self.log: dict[int, list[tuple[Any, ...]]] = {r: [] for r in range(world)}

    def enter(self, rank: int) -> None:
        self._here.rank, self._here.turn = rank, {}

    def gather(self, axes: tuple[str, ...]) -> Any:
        return _Line(self, ("gather", axes))

    def reduce(self, axes: tuple[str, ...]) -> Any:
        return _Line(self, ("reduce", axes))

    def flush(self) -> None:
        pass

    @property
    def rank(self) -> int:
        return self._here.rank

    def post(self, line: tuple[Any, ...], value: Tensor, say: tuple[Any, ...]) -> tuple[Any, ...]:
        turn = self._here.turn[line] = self._here.turn.get(line, 0) + 1
        with self._arrived:
            posts = self._posts.setdefault((*line, turn), {})
            posts[self.rank] = (value.clone(), say)
            self.log[self.rank].append((*line, *say))
            self._arrived.notify_all()
        return (*line, turn)

    def collect(self, key: tuple[Any, ...]) -> list[Tensor]:
        with self._arrived:
            complete = self._arrived.wait_for(lambda: len(self._posts[key]) == self._world, timeout=20)
        assert complete, f"transfer {key} has only reached ranks {sorted(self._posts[key])}"
        posts = [self._posts[key][r] for r in range(self._world)]
        assert len({say for _, say in posts}) == 1, [say for _, say in posts]
        return [value for value, _ in posts]


class _Line:
    def __init__(self, wire: _Wire, name: tuple[Any, ...]) -> None:
        self._wire, self._name = wire, name

    def all_gather(self, own: Tensor, sizes: Sequence[int], out: Tensor, *, settled: bool = False) -> Pending[Tensor]:
        rank = self._wire.rank
        assert own.numel() == sizes[rank] and own.is_contiguous() and own.dim() == 1 and out.numel() == sum(sizes)
        sent = own.clone()
        key = self._wire.post(self._name, own, ("all_gather", tuple(sizes), own.dtype))
        if own.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
            out.fill_(torch.nan)

        def finish() -> Tensor:
            assert torch.equal(own, sent), "a block was overwritten while it was sent"
            if own.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
                assert out.isnan().all(), "somebody wrote where a gather lands"
            return out.copy_(torch.cat(self._wire.collect(key)))

        return Pending(finish)

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        rank, sent = self._wire.rank, flat.clone()
        assert flat.numel() == sum(sizes) and flat.is_contiguous()
        key = self._wire.post(self._name, flat, ("psum_scatter", tuple(sizes), flat.dtype))

        def finish() -> Tensor:
            assert torch.equal(flat, sent), "gradients were overwritten while they were sent"
            total = functools.reduce(
                torch.add, [x.split_with_sizes(list(sizes))[rank] for x in self._wire.collect(key)]
            )
            if len(sizes) > 1:
                return total
            return flat  # as the channel of a single rank does

        return Pending(finish)

    def all_reduce(self, flat: Tensor) -> Pending[Tensor]:
        key = self._wire.post(self._name, flat, ("psum", flat.numel(), flat.dtype))
        flat.fill_(torch.nan)
        return Pending(lambda: flat.copy_(functools.reduce(torch.add, self._wire.collect(key))))


def _late_move(x: Tensor, out: Tensor | None = None) -> Pending[Tensor]:
    """A copy between memories that takes place at its wait; until then its source must stay unchanged."""
    sent, into = x.clone(), torch.empty_like(x) if out is None else out
    into.fill_(torch.nan)

    def result() -> Tensor:
        assert torch.equal(x, sent), "a block was overwritten while it was moved"
        assert into.isnan().all(), "somebody wrote where a move lands"
        return into.copy_(x)

    return Pending(result)


@pytest.fixture(autouse=True)
def _late_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ops, "to_host", _late_move)
    monkeypatch.setattr(_ops, "to_device", lambda x, device, out=None: _late_move(x, out))


def _run(graphs: Sequence[GraphModule], inputs: Sequence[Sequence[Tensor]]) -> tuple[Any, Any, list[Any]]:
    """Per rank: outputs, placeholders afterwards; and the order of transfers."""
    wire = _Wire(len(graphs))
    out: dict[int, Any] = {}
    given = [[x.clone() for x in args] for args in inputs]

    def work(rank: int) -> None:
        wire.enter(rank)
        try:
            with torch.no_grad():
                out[rank] = [x.clone() for x in graphs[rank](*given[rank])]
        except BaseException as error:
            out[rank] = error

    with bind_channels(wire):
        threads = [threading.Thread(target=adopting(work), args=(r,)) for r in range(len(graphs))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for r in range(len(graphs)):
        if isinstance(out[r], BaseException):
            raise out[r]
    return [out[r] for r in range(len(graphs))], given, wire.log[0]


def _one_rank(f: Callable[..., Any], *args: Tensor) -> GraphModule:
    return make_fx(f, tracing_mode="fake")(*args)


def test_the_wire_catches_a_block_that_is_written_in_flight() -> None:
    def f(own: Tensor) -> tuple[Tensor, ...]:
        handle = _OPS.all_gather_start(own, [2], "dp")
        own.add_(1)
        return (_wait(handle),)

    with pytest.raises(AssertionError, match="overwritten while it was sent"):
        _run([_one_rank(f, torch.ones(2))], [[torch.ones(2)]])


def test_a_move_of_a_value_written_on_its_way_is_caught() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        handle = _MOVES.to_host_start(x)
        x.add_(1)
        return (_MOVES.wait(handle),)

    with pytest.raises(AssertionError, match="overwritten while it was moved"):
        _run([_one_rank(f, torch.ones(2))], [[torch.ones(2)]])


def test_the_wire_shows_no_value_before_its_wait() -> None:
    def f(own: Tensor) -> tuple[Tensor, ...]:
        handle = _OPS.all_gather_start(own, [2], "dp")
        early = handle + 1
        return (early, _wait(handle))

    out, _, _ = _run([_one_rank(f, torch.ones(2))], [[torch.ones(2)]])
    assert out[0][0].isnan().all() and torch.equal(out[0][1], torch.ones(2))


# A ZeRO-3 step of an MLP, written out.


def _sizes(numel: int, world: int, rng: random.Random) -> list[int]:
    """Even blocks, or uneven ones that may be empty."""
    if rng.random() < 0.5 and numel % world == 0:
        return [numel // world] * world
    cuts = sorted(rng.randrange(numel + 1) for _ in range(world - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, numel], strict=True)]


class _Step:
    """One random step: its layout and choices are a function of the seed, the same on all ranks."""

    def __init__(self, seed: int, world: int, layers: int = 3, width: int = 6) -> None:
        rng = random.Random(seed)
        self.world, self.layers, self.width, self.seed = world, layers, width, seed
        self.weights = [_sizes(width * width, world, rng) for _ in range(layers)]
        self.biases = [_sizes(width, world, rng) for _ in range(layers)]
        self.act = [rng.choice(["relu", "gelu", "tanh"]) for _ in range(layers)]
        self.update = rng.choice(["sgd", "momentum", "foreach", "fused", "copy"])
        self.clip, self.regather = rng.random() < 0.5, rng.random() < 0.85
        self.touch = rng.random() < 0.4  # a leaf changes between its two gathers
        self.residual = rng.random() < 0.5
        self.shared = rng.random() < 0.4  # two gathers of one leaf in the forward
        self.stat, self.in_place = rng.random() < 0.6, rng.random() < 0.5
        self.late = rng.random() < 0.3  # reductions are issued in the end
        self.stop = rng.random() < 0.5
        self.host = rng.random() < 0.6  # leaves, and the sums of their gradients, are kept on the host

    def inputs(self, rank: int) -> list[Tensor]:
        gen = torch.Generator().manual_seed(1000 * self.seed + rank)
        draw = functools.partial(torch.randn, generator=gen)
        own = [draw(s[rank]) / 3 for s in [*self.weights, *self.biases]]
        moments = [draw(s[rank]).abs() for s in [*self.weights, *self.biases]]
        squares = [draw(s[rank]).abs() for s in [*self.weights, *self.biases]]
        gen.manual_seed(self.seed)  # the same on all ranks
        resident = draw(self.width)
        count = torch.zeros(())
        return [draw(4, self.width), resident, draw(self.width), count, *own, *moments, *squares]

    def __call__(self, rank: int, *args: Tensor) -> tuple[Tensor, ...]:
        n = 2 * self.layers
        x, resident, stat, count = args[:4]
        own, moments, squares = args[4 : 4 + n], args[4 + n : 4 + 2 * n], args[4 + 2 * n :]
        _mark("forward")
        saved, outs = [], []
        y = x * resident
        for i in range(self.layers):
            w, b = self._weight(own, i), self._bias(own, i)
            h = (y @ w).add_(b) if self.in_place else y @ w + b
            if self.stat:
                stat.mul_(0.9).add_(h.mean(0), alpha=0.1)
                h = h + stat.view(1, -1)
            saved.append((y, h))
            z = self._forward(i, h)
            y = z + y if self.residual else z
            if self.shared and i:
                y = y * self._bias(own, i - 1).sigmoid()
            if self.touch and i == 0:
                own[0].mul_(0.75)
        loss = (y * y).sum() / 2
        outs.append(loss)
        _mark("backward")
        grads: list[Tensor] = [loss] * n
        late: list[tuple[int, Tensor]] = []
        dy = y
        weights = None if self.regather else self._weight(own, self.layers - 1)
        for i in reversed(range(self.layers)):
            u, h = saved[i]
            dz = dy
            if self.shared and i:
                dz = dz * self._bias(own, i - 1).sigmoid()
            dh = self._backward(i, dz, h)
            w = self._weight(own, i) if weights is None else weights
            late.append((i, u.t() @ dh))
            late.append((self.layers + i, dh.sum(0)))
            if not self.late:
                self._reduce(rank, late, grads)
            dx = dh @ w.t()
            dy = dx + dz if self.residual else dx
        self._reduce(rank, late, grads)
        _mark("update")
        if self.host:
            grads = [_MOVES.wait(g) for g in grads]
        norm = sum((g * g).sum() for g in grads)
        if self.clip:
            assert isinstance(norm, Tensor)
            norm = _wait(_OPS.psum_start([norm.view(1), loss.view(1)], "dp"))[0]
            scale = 1 / (1 + norm.sqrt())
            grads = [g * scale for g in grads] if self.update in ("sgd", "momentum") else self._scaled(grads, scale)
        if self.stop:
            assert isinstance(norm, Tensor)
            _OPS.stop_unless(norm > -1, [norm, loss])
        outs += [norm, *self._new(own, moments, squares, grads, count)]
        # A leaf that all ranks keep whole, and each updates its rows.
        rows = [self.width // self.world + (r < self.width % self.world) for r in range(self.world)]
        piece = resident.split_with_sizes(rows)[rank] * 0.5 + norm
        _wait(_OPS.all_gather_into_start(resident.view(-1), piece, rows, "dp"))
        outs += [resident, stat, stat.view(2, -1), dy]
        if self.host:
            moved = _MOVES.to_host_into_start(stat, resident * 2)
            outs.append(y + dy)
            _MOVES.wait(moved)
            outs.append(stat + 1)
        return tuple(outs)

    def _scaled(self, grads: list[Tensor], scale: Tensor) -> list[Tensor]:
        for g in grads:
            g.mul_(scale)
        return grads

    def _weight(self, own: Sequence[Tensor], i: int) -> Tensor:
        start = _OPS.all_gather_start(self._here(own[i]).view(-1), self.weights[i], "dp")
        return _wait(start).view(self.width, self.width)

    def _bias(self, own: Sequence[Tensor], i: int) -> Tensor:
        return _wait(_OPS.all_gather_start(self._here(own[self.layers + i]), self.biases[i], "dp"))

    def _here(self, x: Tensor) -> Tensor:
        return _MOVES.wait(_MOVES.to_device_start(x, x.device)) if self.host else x

    def _forward(self, i: int, h: Tensor) -> Tensor:
        return {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "tanh": torch.tanh}[self.act[i]](h)

    def _backward(self, i: int, dy: Tensor, h: Tensor) -> Tensor:
        if self.act[i] == "relu":
            return torch.ops.aten.threshold_backward(dy, h, 0)
        if self.act[i] == "gelu":
            return torch.ops.aten.gelu_backward(dy, h)
        return dy * (1 - torch.tanh(h) ** 2)

    def _reduce(self, rank: int, late: list[tuple[int, Tensor]], grads: list[Tensor]) -> None:
        for k, g in late:
            sizes = [*self.weights, *self.biases][k]
            total = _wait(_OPS.psum_scatter_start(g.reshape(-1), sizes, rank, "dp"))
            grads[k] = _MOVES.to_host_start(total) if self.host else total
        late.clear()

    def _new(self, own: Any, moments: Any, squares: Any, grads: list[Tensor], count: Tensor) -> list[Tensor]:
        if self.update == "sgd":
            return [p - g * 0.1 for p, g in zip(own, grads, strict=True)]
        if self.update == "momentum":
            mu = [m * 0.9 + g for m, g in zip(moments, grads, strict=True)]
            return [*(p - 0.1 * (m / (m.abs() + 1)) for p, m in zip(own, mu, strict=True)), *mu]
        if self.update == "foreach":
            mu = torch._foreach_add(torch._foreach_mul(list(moments), 0.9), grads, alpha=0.1)
            return [*torch._foreach_sub(list(own), torch._foreach_mul(mu, 0.1)), *mu]
        if self.update == "fused":
            steps = [count.clone() for _ in own]
            options: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
            options |= {"amsgrad": False, "maximize": False}
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(list(own), grads, list(moments), list(squares), [], steps, **options)
            return [*own, *moments, steps[0]]
        for p, m, g in zip(own, moments, grads, strict=True):
            m.mul_(0.9).add_(g)
            p.copy_(p - m.view(-1) * 0.1)
        return [*own, *moments]


def _wait(handle: Tensor) -> Tensor:
    return _OPS.wait(handle)


_MARKS: list[tuple[str, str]] = []


def _mark(phase: str) -> None:
    mode = get_proxy_mode()
    if mode is not None:
        _MARKS.append((next(iter(reversed(mode.tracer.graph.nodes))).name, phase))


def _traced(step: _Step, rank: int) -> GraphModule:
    _MARKS.clear()
    gm = make_fx(functools.partial(step, rank), tracing_mode="fake")(*step.inputs(rank))
    marks, phase = dict(_MARKS), "forward"
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            node.meta["phase"] = phase
        phase = marks.get(node.name, phase)
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    gm.meta["mesh_shape"] = {"dp": step.world}
    gm.meta["donated"] = set(names[4:])
    return gm


@functools.lru_cache(maxsize=64)
def _expected(seed: int, world: int) -> tuple[Any, ...]:
    """A step, its inputs and traces, and its results."""
    step = _Step(seed, world)
    inputs = [step.inputs(r) for r in range(world)]
    graphs = [_traced(step, r) for r in range(world)]
    return step, inputs, graphs, *_run(graphs, inputs)[:2]


def _check(seed: int, world: int, *passes: Callable[[GraphModule], GraphModule]) -> list[GraphModule]:
    """The passes change no bit of any output and of any placeholder, and nothing in the graphs that they are given."""
    step, inputs, before, want, kept = _expected(seed, world)
    text = [str(gm.graph) for gm in before]
    after = before
    for one in passes:
        after = [one(gm) for gm in after]
    for gm in after:
        gm.graph.lint()
    got, left, log = _run(after, inputs)
    assert text == [str(gm.graph) for gm in before]
    assert all(len(a) == len(b) for a, b in zip(want, got, strict=True))
    assert all(torch.equal(a, b) for rank in range(step.world) for a, b in zip(want[rank], got[rank], strict=True))
    assert not any(x.isnan().any() for outs in got for x in outs)
    free = set() if donate not in passes else before[0].meta["donated"]
    names = [n.name for n in before[0].graph.nodes if n.op == "placeholder"]
    for a, b in zip(kept, left, strict=True):
        assert all(torch.equal(x, y) for name, x, y in zip(names, a, b, strict=True) if name not in free)
    assert log == [_said(n) for n in after[0].graph.nodes if is_start(n) and not is_move(n)]
    if seed == len(passes):
        _check_values(after[0])
    return after


def _said(node: Any) -> tuple[Any, ...]:
    name = node.target._schema.name.removeprefix("shardfn::")
    dtype = torch.float32
    if name == "psum_start":
        return ("reduce", ("dp",), "psum", node.meta["val"].numel(), dtype)
    kind = "gather" if "gather" in name else "reduce"
    sizes = node.args[2 if "into" in name else 1]
    return (kind, ("dp",), "all_gather" if kind == "gather" else "psum_scatter", tuple(sizes), dtype)


def _check_values(gm: GraphModule) -> None:
    """The abstract values are those of a new trace of the graph, and share memory alike."""
    args = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    with args[0].fake_mode, torch.no_grad():
        again = make_fx(torch.fx.Interpreter(gm).run, tracing_mode="real")(*[torch.empty_like(a) for a in args])
    old, new = _makers(gm), _makers(again)
    assert [str(n.target) for n in old if n.op != "placeholder"] == [
        str(n.target) for n in new if n.op != "placeholder"
    ]
    names: dict[int, int] = {}
    for a, b in zip(old, new, strict=True):
        for x, y in zip(_tensors(a), _tensors(b), strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype and x.stride() == y.stride(), (a, x, y)
            here, there = x.untyped_storage()._cdata, y.untyped_storage()._cdata
            assert names.setdefault(here, there) == there, a
    assert len(set(names.values())) == len(names)


def _makers(gm: GraphModule) -> list[Any]:
    """The nodes with values; a new trace takes every result out of a tuple, used or not."""
    valued = [n for n in gm.graph.nodes if n.op != "output" and n.meta.get("val") is not None]
    return [n for n in valued if n.target is not operator.getitem]


def _tensors(node: Any) -> list[Tensor]:
    value = node.meta["val"]
    return list(value) if isinstance(value, list | tuple) else [value]


def _world(seed: int) -> int:
    return 1 + seed % 3


_BY_DAY = ("donate", "prefetch-0", "overlap-300", "reuse-200")


def _named(name: str, call: Callable[[GraphModule], GraphModule]) -> Any:
    return pytest.param(call, id=name, marks=() if name in _BY_DAY else pytest.mark.nightly)


_PASSES = [
    _named("copy", lambda gm: reorder_graph(gm, list(gm.graph.nodes))[0]),
    _named("sink", sink_waits),
    _named("prefetch-0", functools.partial(prefetch, budget=0)),
    _named("prefetch-200", functools.partial(prefetch, budget=200)),
    _named("prefetch-all", functools.partial(prefetch, budget=1 << 30)),
    _named("bucket-100", functools.partial(bucket, limit=100)),
    _named("bucket-400", functools.partial(bucket, limit=400)),
    _named("bucket-all", functools.partial(bucket, limit=1 << 30)),
    _named("overlap-0", functools.partial(overlap_reductions, limit=0)),
    _named("overlap-300", functools.partial(overlap_reductions, limit=300)),
    _named("overlap-all", functools.partial(overlap_reductions, limit=1 << 30)),
    _named("reuse-0", functools.partial(reuse_gathers, budget=0)),
    _named("reuse-200", functools.partial(reuse_gathers, budget=200)),
    _named("reuse-all", functools.partial(reuse_gathers, budget=1 << 30)),
    _named("rematerialise-0", functools.partial(rematerialise, budget=0)),
    _named("rematerialise-1500", functools.partial(rematerialise, budget=1500)),
    _named("free", free_at_last_use),
    _named("donate", donate),
]


@pytest.mark.nightly
@pytest.mark.parametrize("one", _PASSES)
def test_a_pass_keeps_all_bits(one: Callable[[GraphModule], GraphModule]) -> None:
    for seed in range(6):
        _check(seed, _world(seed), one)


@pytest.mark.day("0", "3")
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(4, 12))])
def test_all_passes_in_any_order_keep_all_bits(seed: int) -> None:
    rng = random.Random(seed)
    passes = [p.values[0] for p in _PASSES if p.id != "donate"]
    _check(seed % 6, _world(seed % 6), *rng.sample(passes, 6), donate)


@pytest.mark.nightly
@pytest.mark.parametrize("budget", [None, 0, 2000])
def test_the_schedule_keeps_all_bits(budget: int | None) -> None:
    for seed in range(6):
        options = {"budget": budget, "prefetch": 300, "bucket": 250, "reductions": 300, "donate": False}
        _check(seed, _world(seed), Schedule(**options), donate)
        _check(seed, _world(seed), Schedule(**options))


def test_a_program_that_stops_leaves_the_state_unchanged() -> None:
    def f(own: Tensor, mu: Tensor) -> tuple[Tensor, ...]:
        g = _wait(_OPS.psum_scatter_start(own * 2, [4], 0, "dp"))
        decayed = mu * 0.9
        _OPS.stop_unless(g.sum() < 0, [g])
        new = decayed + g
        return (own - new, new)

    gm = _one_rank(f, torch.ones(4), torch.ones(4))
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    gm.meta["donated"] = set(names)
    out = Schedule()(gm)
    state = [torch.ones(4), torch.ones(4)]
    wire = _Wire(1)
    wire.enter(0)
    with pytest.raises(StoppedError), bind_channels(wire):
        out(*state)
    assert all(torch.equal(x, torch.ones(4)) for x in state)
