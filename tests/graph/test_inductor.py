"""The back ends: same values, same mutations, same order of transfers; cuts into regions; the cache on disk."""

import collections
import operator
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn.collectives import Channels
from shardfn.collectives._wire_ops import bind_channels
from shardfn.core import Pending, key, tree_flatten, tree_unflatten
from shardfn.graph import _inductor
from shardfn.graph._inductor import Compiled, canonical, compile_graph, find_compiler, resolve_backend
from shardfn.graph._regions import Region, cut
from shardfn.models import gpt

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
shardfn = torch.ops.shardfn


class Wire(Channels):
    """One rank's communicators, with a log of the messages."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def gather(self, axes: tuple[str, ...]) -> Any:
        return self

    def reduce(self, axes: tuple[str, ...]) -> Any:
        return self

    def flush(self) -> None:
        pass

    def all_gather(
        self, own: torch.Tensor, sizes: Any, out: torch.Tensor, *, settled: bool = False
    ) -> Pending[torch.Tensor]:
        self.log.append(("gather", own.numel()))
        return Pending(lambda: out.copy_(own))

    def reduce_scatter(self, flat: torch.Tensor, sizes: Any) -> Pending[torch.Tensor]:
        self.log.append(("reduce", flat.numel()))
        return Pending(flat.clone)


def gathered(own: torch.Tensor) -> torch.Tensor:
    return shardfn.wait(shardfn.all_gather_start(own.reshape(-1), [own.numel()], "dp")).view(own.shape)


def reduced(whole: torch.Tensor) -> torch.Tensor:
    return shardfn.wait(shardfn.psum_scatter_start(whole.reshape(-1), [whole.numel()], 0, "dp")).view(whole.shape)


def captured(function: Callable[..., Any], *args: torch.Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def run(function: Callable[..., Any], args: list[torch.Tensor]) -> tuple[tuple[Any, ...], list[torch.Tensor], Wire]:
    wire, given = Wire(), [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in args]
    with bind_channels(wire):
        return function(*given), given, wire


def both(function: Callable[..., Any], *args: torch.Tensor, exact: bool = False) -> Compiled:
    """Asserts that the back ends agree on outputs and on the arguments' final values."""
    gm = captured(function, *args)
    compiled = compile_graph(gm, "inductor", min_bytes=0)
    plain, plain_args, plain_wire = run(gm, list(args))
    emitted, emitted_args, _ = run(compile_graph(gm, "graph"), list(args))
    made, made_args, made_wire = run(compiled, list(args))
    for expected, found in zip((*plain, *plain_args), (*emitted, *emitted_args), strict=True):
        assert torch.equal(expected, found)
    for expected, found in zip((*plain, *plain_args), (*made, *made_args), strict=True):
        assert expected.stride() == found.stride() and expected.dtype == found.dtype
        torch.testing.assert_close(found, expected, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)
    assert plain_wire.log == made_wire.log
    return compiled


def gpt_step(num_layers: int) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Gather, loss, gradients, reduction, and an update in place of the parameters."""
    config = gpt.Config(vocab_size=96, num_layers=num_layers, d_model=32, num_heads=4, max_len=16)
    leaves, treedef = tree_flatten(gpt.init(config, key(0)))
    tokens = torch.randint(96, (2, 17), generator=torch.Generator().manual_seed(0))

    def step(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        full = [gathered(x).requires_grad_() for x in flat[:-1]]
        loss = gpt.loss(config, tree_unflatten(treedef, full), {"tokens": flat[-1]})
        grads = [reduced(g) for g in torch.autograd.grad(loss, full)]
        torch._foreach_add_(list(flat[:-1]), grads, alpha=-0.1)
        return (loss.detach(), torch.stack(torch._foreach_norm(grads)).norm())

    return step, [*leaves, tokens]


# Values


@pytest.mark.nightly
@needs_compiler
def test_a_training_step_keeps_its_values_its_order_and_compiles_each_kind_of_layer_once() -> None:
    step, args = gpt_step(3)
    compiled = both(step, *args)
    assert compiled.backend == "inductor"
    assert compiled.num_compiled < compiled.num_regions
    assert compiled.seconds > 0


@pytest.mark.nightly
@needs_compiler
@pytest.mark.parametrize("approximate", [pytest.param("none", marks=pytest.mark.nightly), "tanh"])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), torch.bfloat16])
def test_gelu_and_its_gradient(approximate: str, dtype: torch.dtype) -> None:
    gelu, backward = torch.ops.aten.gelu, torch.ops.aten.gelu_backward
    x = torch.linspace(-12, 12, 999, dtype=dtype)
    gm = captured(lambda x, g: (gelu(x, approximate=approximate), backward(g, x, approximate=approximate)), x, x.cos())
    found = compile_graph(gm, "inductor", min_bytes=0)(x, x.cos())
    for a, b in zip(found, gm(x, x.cos()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=2e-6)


@pytest.mark.nightly
@needs_compiler
def test_sixteen_bits_are_rounded_where_eager_rounds_them() -> None:
    x, y = torch.randn(2, 64, 32, dtype=torch.bfloat16)
    both(lambda x, y: (((x * y + x) * y - x) * y,), x, y, exact=True)


@pytest.mark.nightly
@needs_compiler
def test_integers_shifts_and_masks_are_exact() -> None:
    x = torch.arange(1000, dtype=torch.int64)
    both(lambda x: ((((x * 2654435761) & 0xFFFFFFFF) >> 3) ^ (x << 7), (x % 3 == 0)), x, exact=True)


# Memory that is shared or written


@needs_compiler
def test_a_read_before_a_write_stays_before_it() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = x.view(-1) * 2 + 1
        x.add_(1)
        after = (x * 2 + 1).sin()
        y.copy_(before.view(8, 8).cos() + after)
        return before, after, x.t() * y

    both(step, torch.randn(8, 8), torch.randn(8, 8))


@pytest.mark.nightly
@needs_compiler
def test_a_small_sum_does_not_move_before_a_write_to_its_input() -> None:
    def step(x: torch.Tensor, w: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x + 1).exp()
        z = y @ w
        c.mul_(3)
        return z, y.sum(0) + c, y.sum(1)

    x = torch.randn(16, 16)
    both(step, x, x.cos(), torch.randn(16))


@pytest.mark.nightly
@needs_compiler
def test_a_gather_into_memory_that_exists_is_seen_only_after_its_wait() -> None:
    def step(into: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = (into + 1).sin()
        handle = shardfn.all_gather_into_start(into, own, [own.numel()], "dp")
        other = (before + own).cos()
        shardfn.wait(handle)
        return other, before.sum() + (into * 2 + before).sum(), into * 3 + before

    both(step, torch.zeros(12), torch.randn(12))


@pytest.mark.nightly
@needs_compiler
def test_views_share_memory_and_copies_do_not() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x + 1).sin()
        same, copy = x.t(), x.clone()
        return y, y.t()[1:], same, copy, copy.clone(), y.clone()

    compiled = both(step, torch.randn(6, 6))
    x = torch.randn(6, 6)
    y, part, same, copy, again, other = compiled(x)
    assert part.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert same.data_ptr() == x.data_ptr()
    assert len({t.data_ptr() for t in (x, y, copy, again, other)}) == 5


@pytest.mark.nightly
@needs_compiler
def test_copies_inside_a_region_have_memory_of_their_own() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x + 1).sin()
        z = y.clone()
        same = (x * 1 + 0).clone()
        z.add_(1)
        same.add_(1)
        return y, z, same

    both(step, torch.randn(6, 6))


@pytest.mark.nightly
@needs_compiler
def test_strides_of_outputs_are_the_graphs() -> None:
    both(lambda x: ((x.t() + 1).exp(), (x.t()[1:] * 2).sum(0) + 1), torch.randn(4, 10)[:, ::2])


@pytest.mark.nightly
@needs_compiler
def test_an_argument_of_another_layout_is_an_error_that_names_it() -> None:
    gm = captured(lambda x: ((x + 1).sin(),), torch.randn(4, 4))
    gm.graph.find_nodes(op="placeholder")[0].meta["leaf"] = "batch['x']"
    compiled = compile_graph(gm, "inductor", min_bytes=0)
    with pytest.raises(ValueError, match=r"batch\['x'\] has shape \(4, 4\) and strides \(1, 4\).*contiguous"):
        compiled(torch.randn(4, 4).t())


# Cuts into regions


def regions(function: Callable[..., Any], *args: torch.Tensor) -> list[Any]:
    steps = cut(captured(function, *args), min_bytes=0)
    return [_names(s) if isinstance(s, Region) else str(s.target) for s in steps if isinstance(s, Region) or s.args]


def _names(region: Region) -> list[str]:
    return [str(n.target).split(".")[1] for n in region.nodes if n.target is not operator.getitem]


def test_arithmetic_floats_over_transfers_and_fixed_nodes_stay() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        whole = gathered(w)
        return ((y.sin() @ whole).cos().exp(),)

    x = torch.randn(4, 4)
    found = [s for s in regions(step, x, x) if "view" not in s]
    start, wait = "shardfn.all_gather_start.default", "shardfn.wait.default"
    aten = "aten.{}.default".format
    expected = [start, wait, ["add", "sin"], aten("mm"), ["cos", "exp"], "output"]
    assert [s for s in found if s != aten("view")] == expected


def test_a_bias_gradient_joins_the_region_that_made_its_input() -> None:
    def step(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dy = g * x + 1
        dx = dy @ w
        return dx, dy.sum(0)

    x = torch.randn(16, 16)
    assert regions(step, x, x, x)[0] == ["mul", "add", "sum"]


def test_a_recomputation_is_not_moved_forward() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2 + 1
        z = y @ w
        return (z, y.sin().cos())

    x = torch.randn(16, 16)
    assert regions(step, x, x)[::2] == [["mul", "add"], ["sin", "cos"]]


@pytest.mark.nightly
def test_the_peak_of_live_bytes_does_not_grow() -> None:
    step, args = gpt_step(3)
    gm = captured(step, *args)
    before, after = peak(list(gm.graph.nodes)), peak(cut(gm, min_bytes=0))
    assert after <= before


@pytest.mark.nightly
def test_cutting_is_a_function_of_the_graph() -> None:
    step, args = gpt_step(2)
    texts = [
        [canonical(s) if isinstance(s, Region) else s.name for s in cut(captured(step, *args), min_bytes=0)]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]


def test_small_regions_and_graphs_without_metadata_stay_unchanged() -> None:
    x = torch.randn(4, 4)
    gm = captured(lambda x: ((x + 1).sin().cos(),), x)
    assert not any(isinstance(s, Region) for s in cut(gm))
    for node in gm.graph.nodes:
        node.meta.clear()
    assert cut(gm, min_bytes=0) == list(gm.graph.nodes)
    assert torch.equal(compile_graph(gm, "graph")(x)[0], gm(x)[0])


def peak(steps: list[Node | Region]) -> int:
    """Live bytes at the worst step; a region holds all its inputs until it has all its outputs."""
    size: dict[int, int] = {}
    spans: dict[int, list[int]] = collections.defaultdict(list)
    for i, step in enumerate(steps):
        nodes = [*step.inputs, *step.outputs] if isinstance(step, Region) else [step, *step.all_input_nodes]
        for node in nodes:
            value = node.meta.get("val")
            for t in value if isinstance(value, list | tuple) else [value]:
                if isinstance(t, torch.Tensor) and node.op != "placeholder":
                    storage = t.untyped_storage()
                    size[storage._cdata] = storage.nbytes()
                    spans[storage._cdata].append(i)
    arguments = [step for step in steps if isinstance(step, Node) and step.op == "placeholder"]
    for node in arguments:
        spans.pop(node.meta["val"].untyped_storage()._cdata, None)
    return max(sum(size[k] for k, v in spans.items() if v[0] <= i <= v[-1]) for i in range(len(steps)))


def test_values_are_dropped_after_their_last_use() -> None:
    alive: list[int] = []

    def count(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        alive.append(sys.getrefcount(x))
        return x + y

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(operator.add, (x, 1))
    b = graph.call_function(count, (a, x))
    c = graph.call_function(operator.mul, (b, 2))
    graph.output((graph.call_function(count, (c, b)),))
    compile_graph(GraphModule({}, graph), "graph")(torch.ones(2))
    assert max(alive) <= 4


# Which back end


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ValueError, match="'fast' must be one of"):
        resolve_backend("fast")


def test_without_a_compiler_the_graph_runs_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(_inductor, "_WARNED", [])
    with config.patch({"cpp.cxx": (None, "/nowhere/g++")}):
        with pytest.warns(UserWarning, match="no C\\+\\+ compiler found"):
            assert resolve_backend(None) == "graph"
        assert resolve_backend(None) == "graph"
        assert resolve_backend("graph") == "graph"
        with pytest.raises(RuntimeError, match="install g\\+\\+"):
            resolve_backend("inductor")


@pytest.mark.nightly
@needs_compiler
def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    program = """
        import torch
        from torch.fx.experimental.proxy_tensor import make_fx
        from shardfn.graph._inductor import compile_graph
        gm = make_fx(lambda x: ((x + 1).sin(),), tracing_mode="fake")(torch.ones(64, 64))
        try:
            compile_graph(gm, min_bytes=0)
        except RuntimeError as error:
            print(str(error)[:60])
    """
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho no headers >&2\nexit 1\n")
    broken.chmod(0o755)
    out = _in_a_process(program, CXX=str(broken), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert "cannot compile" in out or "C++ compiler" in out


@pytest.mark.nightly
@needs_compiler
def test_a_second_process_finds_the_code_on_disk_and_no_worker_is_left(tmp_path: Any) -> None:
    program = """
        import pathlib
        import torch
        from torch.fx.experimental.proxy_tensor import make_fx
        from shardfn.graph._inductor import compile_graph
        torch.set_num_threads(1)
        gm = make_fx(lambda x: ((x + 1).sin(),), tracing_mode="fake")(torch.ones(64, 64))
        c = compile_graph(gm, "inductor", min_bytes=0)
        x = torch.rand(64, 64)
        torch.testing.assert_close(c(x)[0], (x + 1).sin())
        children = [t.read_text().split() for t in pathlib.Path("/proc/self/task").glob("*/children")]
        print(c.num_compiled, c.cache_hits, sum(map(len, children)))
    """
    runs = [_in_a_process(program, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).split() for _ in range(2)]
    assert runs == [["1", "0", "0"], ["1", "1", "0"]]


def _in_a_process(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
