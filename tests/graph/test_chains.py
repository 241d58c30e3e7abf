"""Runs of kernels that are one call: they have the bits of the kernels called one by one."""

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn import kernels
from shardfn.graph import compile_graph, donate
from shardfn.graph._emit import MOST_BYTES, ChainRegion, list_needed, whole_views, with_chains
from shardfn.kernels import _build

if not kernels.is_native("row_linear"):
    pytest.skip("chains are of kernels in C++", allow_module_level=True)

D = 8


class Given(NamedTuple):
    """Weights of a layer, and angles of its rows."""

    scale: Tensor
    bias: Tensor
    cos: Tensor
    sin: Tensor
    first: Tensor
    second: Tensor


def given() -> Given:
    packed = (kernels.pack_rows(torch.randn(D, D)) for _ in range(2))
    return Given(torch.randn(D), torch.randn(D), torch.randn(6, 4), torch.randn(6, 4), *packed)


def norm(x: Tensor, y: Tensor, p: Given) -> Tensor:
    return kernels.row_norm(x, p.scale, y[0].contiguous(), centered=True)


def linear(x: Tensor, y: Tensor, p: Given) -> Tensor:
    del y
    return kernels.row_linear(x, p.first, D, bias=p.bias)


def linears(x: Tensor, y: Tensor, p: Given) -> Tensor:
    a, b = kernels.row_linears(x, [p.first, p.second], [D, D])
    return kernels.gated_silu(a, b) + y


def turned(x: Tensor, y: Tensor, p: Given) -> Tensor:
    return kernels.rotate(x.view(6, 2, 4), p.cos, p.sin).view(6, D) + y


def written(x: Tensor, y: Tensor, p: Given) -> Tensor:
    return linear(x, y, p).add_(kernels.gelu(x))


def through_a_view(x: Tensor, y: Tensor, p: Given) -> Tensor:
    del p
    base = kernels.gelu(y)
    base[None][0].add_(x)
    return base


Step = Callable[[Tensor, Tensor, Given], Tensor]
STEPS: list[Step] = [norm, linear, linears, turned, written, through_a_view]
BREAKS: list[Step] = [lambda x, y, p: x.cos() * y, lambda x, y, p: x.t().contiguous().t()]


def regions(gm: torch.fx.GraphModule) -> list[ChainRegion]:
    steps = list(gm.graph.nodes)
    views = whole_views(steps)
    return [s for s in with_chains(list_needed(steps, views), views)[0] if isinstance(s, ChainRegion)]


@pytest.mark.parametrize("seed", range(8))
def test_random_runs_have_the_bits_of_single_calls(seed: int) -> None:
    draw = random.Random(seed)
    names = [draw.choice(STEPS if draw.random() < 0.8 else BREAKS) for _ in range(draw.randint(3, 12))]
    kept = draw.sample(range(len(names)), 2)

    def run(x: Tensor, *p: Tensor) -> tuple[Tensor, ...]:
        made = [x, x + 1]
        for step in names:
            made.append(step(made[-1], draw.choice(made[-3:]), Given(*p)))
        return (*(made[i + 2] for i in kept), made[-1].view(2, 3, D), made[-1][1:])

    state = draw.getstate()
    gm = make_fx(run, tracing_mode="fake")(torch.randn(6, D), *given())
    assert regions(gm)
    step = compile_graph(gm, "graph")
    for num in (1, 2, 1):
        x, p = torch.randn(6, D), given()
        draw.setstate(state)
        want = run(x.clone(), *p)
        before = torch.get_num_threads()
        torch.set_num_threads(num)
        got = step(x.clone(), *p)
        torch.set_num_threads(before)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), [n.__name__ for n in names]
            assert a.stride() == b.stride()


def block(x: Tensor, *p: Tensor) -> tuple[Tensor]:
    for _ in range(4):
        x = x + linears(kernels.row_norm(x, p[0], p[1], centered=False), x, Given(*p))
    return (x,)


def test_layers_are_one_call_in_memory_of_few_values() -> None:
    gm = make_fx(block, tracing_mode="fake")(torch.ones(6, D), *given())
    [region] = regions(gm)
    assert len(region.calls()) == 4 * 5
    assert region.room <= 6 * 6 * D * 4  # in place of 20 values
    assert [len(region.inputs), len(region.outputs)] == [5, 1]  # x, two matrices, the norm's scale and bias


def test_larger_values_are_made_one_by_one() -> None:
    rows = MOST_BYTES // (4 * D)
    assert not regions(make_fx(block, tracing_mode="fake")(torch.ones(rows, D), *given()))


def test_other_strides_and_an_implementation_that_is_asked_for_run_one_by_one() -> None:
    step = compile_graph(make_fx(block, tracing_mode="fake")(torch.ones(6, D), *given()), "graph")
    x, p = torch.randn(D, 6).t(), given()
    assert torch.equal(step(x, *p)[0], block(x, *p)[0])
    with kernels.implemented_by("reference"):
        assert torch.equal(step(x.contiguous(), *p)[0], block(x, *p)[0])


PLAN = torch.arange(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)


def attention(slots: Tensor, q: Tensor, cache: Tensor, scale: Tensor, *plan: Tensor) -> tuple[Tensor, Tensor]:
    q = kernels.row_norm(q, scale, centered=False).view(3, 1, D)
    y, lse = kernels.ragged_attention(q, q, q, cache, slots, *plan)
    return kernels.gelu(y), lse


def test_a_plan_out_of_range_is_an_error_and_nothing_is_written() -> None:
    slots, q, ones = torch.tensor([4, 5, 6], dtype=torch.int32), torch.randn(3, D), torch.ones(D)
    cache = torch.zeros(2, 2, 1, 4, D)
    gm = make_fx(attention, tracing_mode="fake")(slots, q, cache, ones, *PLAN)
    assert [len(r.calls()) for r in regions(gm)] == [3]
    step = compile_graph(gm, "graph")
    own, want = cache.clone(), cache.clone()
    for a, b in zip(step(slots, q, own, ones, *PLAN), attention(slots, q, want, ones, *PLAN), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(own, want)
    assert own.any()
    before = own.clone()
    with pytest.raises(ValueError, match="slots"):
        step(slots + 100, q + 1, own, ones, *PLAN)
    assert torch.equal(own, before)


def test_a_write_through_a_view_of_a_strided_value_is_kept() -> None:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor]:
        base = kernels.gelu(x + y) + x
        flat = (x + y).view(-1) + kernels.gelu(base).view(-1)
        return (flat.cos(),)

    gm = donate(make_fx(run, tracing_mode="fake")(torch.ones(4, 4), torch.ones(4, 4)))
    assert regions(gm)
    step = compile_graph(gm, "graph")
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    assert torch.equal(step(x, y)[0], run(x, y)[0])
    want = (x.t() + y.t() + kernels.gelu(kernels.gelu(x.t() + y.t()) + x.t())).reshape(-1).cos()
    assert torch.equal(step(x.t(), y.t())[0], want)


def test_arguments_that_shared_a_value_when_they_were_captured_are_apart() -> None:
    base = torch.randn(48)
    gm = make_fx(lambda a, b: (kernels.gelu(a) + kernels.gelu(b),), tracing_mode="fake")(
        base.view(6, D), base.view(6, D)
    )
    a, b = torch.randn(6, D), torch.randn(6, D)
    assert torch.equal(compile_graph(gm, "graph")(a, b)[0], kernels.gelu(a) + kernels.gelu(b))


def test_other_shapes_and_dtypes_run_one_by_one() -> None:
    step = compile_graph(make_fx(lambda x: (kernels.gelu(x) + x,), tracing_mode="fake")(torch.ones(6, D)), "graph")
    x = torch.randn(2, D)
    assert torch.equal(step(x)[0], kernels.gelu(x) + x)
    assert torch.equal(step(x.double())[0], kernels.gelu(x.double()) + x.double())


def test_a_default_device_is_not_that_of_values() -> None:
    step = compile_graph(make_fx(lambda x: (kernels.gelu(x) + x,), tracing_mode="fake")(torch.ones(6, D)), "graph")
    x = torch.randn(6, D)
    with torch.device("meta"):
        got = step(x)[0]
    assert torch.equal(got, kernels.gelu(x) + x)


def test_a_write_before_an_error_is_made_once() -> None:
    def run(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return (x.add_(kernels.gelu(rest[1])), *attention(*rest))

    slots, q, ones = torch.tensor([4, 5, 600], dtype=torch.int32), torch.randn(3, D), torch.ones(D)
    rest = slots, q, torch.zeros(2, 2, 1, 4, D), ones, *PLAN
    x = torch.randn(3, D)
    want = x + kernels.gelu(q)
    with pytest.raises(ValueError, match="slots"):
        compile_graph(make_fx(run, tracing_mode="fake")(x, *rest), "graph")(x, *rest)
    assert torch.equal(x, want)


def decode(table: Tensor, ids: Tensor, rows: Tensor, keys: Tensor, *how: Tensor) -> tuple[Tensor, ...]:
    """From ids to drawn tokens: rows of a table, a write to a view of them, and rows from the end on."""
    x = torch.nn.functional.embedding(ids, table)[None]
    x.add_(kernels.gelu(x))
    temperature, top_k, top_p, min_p = how
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return kernels.draw(x[0][rows], kernels.draw_uniforms(keys, keys), **drawn)


def test_a_step_from_ids_to_drawn_tokens_is_one_call() -> None:
    ids, rows = torch.tensor([6, 0, 5, 5], dtype=torch.int32), torch.tensor([-1, 2, 0])
    how = torch.tensor([0.0, 1.0, 0.7], dtype=torch.float64), torch.tensor([0, 3, 0]), torch.tensor([1.0, 0.9, 1.0])
    rest = ids, rows, torch.tensor([3, 4, 5]), *(x.double() if x.is_floating_point() else x for x in how)
    given = torch.randn(7, D), *rest, torch.zeros(3, dtype=torch.float64)
    gm = make_fx(decode, tracing_mode="fake")(*given)
    [region], step = regions(gm), compile_graph(gm, "graph")
    names = ["take_rows", "gelu", "added", "take_rows", "draw_uniforms", "draw_rows_alone"]
    assert [call.name for call in region.calls()] == names
    for _ in range(3):
        given = torch.randn(7, D), *given[1:]
        for a, b in zip(step(*given), decode(*given), strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype
    for at, wrong, text in (
        (1, torch.tensor([6, 0, 7, 5], dtype=torch.int32), "index must be from 0 to 6, got 0 to 7"),
        (2, torch.tensor([-5, 0, 0]), "index must be from -4 to 3, got -5 to 0"),
        (4, -given[4], "temperature must be from 0 to inf, got -1.0 in row 1"),
    ):
        with pytest.raises((IndexError, ValueError), match=text):
            step(*given[:at], wrong, *given[at + 1 :])


# Operations of torch that chains run, of rows x, a factor for each row, and a row of factors.
OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "product": lambda x, each, alike: x * (x + 1),
    "product in place": lambda x, each, alike: (x + 1).mul_(x),
    "factors of rows": lambda x, each, alike: each * x,
    "factors in place": lambda x, each, alike: (x + 1).mul_(each),
    "factors of columns": lambda x, each, alike: x * alike,
    "columns first": lambda x, each, alike: alike[None] * x,
    "shift": lambda x, each, alike: x + 1e-5,
    "shift in place": lambda x, each, alike: (x * x).add_(3),
    "square": lambda x, each, alike: x.pow(2),
    "root": lambda x, each, alike: torch.rsqrt(x),
    "root in place": lambda x, each, alike: (x * x).rsqrt_(),
    "norm": lambda x, each, alike: alike * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
}
_EDGES = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-42, -3e38, 1e-38])


@pytest.mark.parametrize("newest", [4, 3, 1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_torch_have_its_bits(name: str, newest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "NEWEST", newest)
    for rows, size in ((1, 1), (3, 17), (5, 64), (2, 1)):

        def run(x: Tensor, each: Tensor, alike: Tensor) -> tuple[Tensor, ...]:
            before, y = kernels.gelu(x), OPERATIONS[name](x, each, alike)
            return y, kernels.gelu(y) + before

        args = torch.randn(rows, size), torch.randn(rows, 1), torch.randn(size)
        gm = make_fx(run, tracing_mode="fake")(*args)
        chained = sum(len(r.calls()) for r in regions(gm))
        single = ("aten.mean.dim", "aten.unsqueeze.default")
        made = [n for n in gm.graph.nodes if n.op == "call_function" and str(n.target) not in single]
        assert chained == len(made), name
        args[0].view(-1)[: len(_EDGES)] = _EDGES[: args[0].numel()]
        for got, want in zip(compile_graph(gm, "graph")(*args), run(*args), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(got.signbit(), want.signbit()) or want.isnan().any()


@pytest.mark.parametrize(
    "run",
    [
        lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: x.pow(3),
        lambda x, y: x * 3,
        lambda x, y: x + ((1 << 54) + (1 << 30) + 1),
        lambda x, y: x * y[:1, :1],
        lambda x, y: x[:, None] * y[None],
        lambda x, y: x.t() * y.t(),
        lambda x, y: x * y.double(),
    ],
)
def test_other_operations_of_torch_run_one_by_one(run: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    gm = make_fx(lambda x, y: (run(kernels.gelu(x), y),), tracing_mode="fake")(x, y)
    assert not regions(gm)
    assert torch.equal(compile_graph(gm, "graph")(x, y)[0], run(kernels.gelu(x), y))


def test_results_have_the_strides_of_eager_in_dims_of_one_element() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        return kernels.gelu(x) + x, kernels.gelu(kernels.gelu(x).transpose(0, 1) + 1) + 1

    odd = torch.randn(6, 13)[:, :1]
    for like in (torch.ones(6, 1), torch.ones(1, 6), odd):
        step = compile_graph(make_fx(run, tracing_mode="fake")(like), "graph")
        for x in (like, odd) if like.shape == odd.shape else (like,):
            for got, want in zip(step(x), run(x), strict=True):
                assert torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.parametrize("change", ["half", "resize"])
def test_known_tensors_of_other_bytes_do_not_match(change: str) -> None:
    x, y = torch.ones(2, 3), torch.ones(4)
    layouts = kernels.TensorLayouts([x, y])
    assert layouts.match([x, y]) and layouts.match([x, y])
    if change == "half":
        y.data = y.half()
    else:
        y.resize_(8)
    assert not layouts.match([x, y])
    assert layouts.match([x, torch.ones(4)])
