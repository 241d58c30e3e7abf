"""Chains of views, which emitted code takes from the first tensor at once."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn.graph import compile_graph
from shardfn.graph._emit import list_needed, whole_views

# By name, a view of a tensor of two dims or more; the last two show it in another order, or a part of it.
LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda x: x.reshape(x.numel() // 2, 2),
    "unsqueeze": lambda x: x[None],
    "select": lambda x: x[None][0],
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "alias": lambda x: x.detach(),
    "transposed": lambda x: x.transpose(0, 1),
    "part": lambda x: x[:, :-1] if x.shape[1] > 1 else x,
}


def program(names: list[str], write: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """A chain of views with a write to one of them, which later reads must show."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        base = x + 1
        chain = [base]
        for name in names:
            chain.append(LOOKS[name](chain[-1]))
        if write < len(chain):
            chain[write].mul_(3)
        return chain[-1] * 2, base * chain[0], chain[-1], chain[len(chain) // 2].sum(0)

    return run


@pytest.mark.parametrize("seed", range(12))
def test_random_chains_have_the_values_of_eager(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(12):
        names = draw.choices(list(LOOKS), k=draw.randint(1, 6))
        run = program(names, draw.randint(0, 9))
        x = torch.randn(draw.randint(1, 3) * 2, draw.randint(1, 3) * 2)
        try:
            want = run(x)
        except RuntimeError:
            continue  # a `reshape` to a copy, which the chain wrote
        gm = make_fx(run, tracing_mode="fake")(x)
        got = compile_graph(gm, "graph")(x)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), names
            assert a.stride() == b.stride(), names


def test_a_chain_is_one_view() -> None:
    gm = make_fx(lambda x: (torch.relu((x + 1).view(4, 3)[None][0].view(2, 6)),), tracing_mode="fake")(torch.ones(12))
    steps = list(gm.graph.nodes)
    first = whole_views(steps)
    assert [str(step) for step in list_needed(steps, first)] == ["x_1", "add", "view_1", "relu", "output"]
    assert {str(a): str(b) for a, b in first.items()}["view_1"] == "add"


def test_a_returned_view_is_a_tensor_of_its_own() -> None:
    gm = make_fx(lambda x: (y := x + 1, y.view(2, 3).view(6)), tracing_mode="fake")(torch.ones(6))
    y, view = compile_graph(gm, "graph")(torch.ones(6))
    assert y is not view
    assert y.data_ptr() == view.data_ptr()


def test_an_end_of_a_transfer_is_no_view() -> None:
    ops = torch.ops.shardfn
    gm = make_fx(lambda x: (ops.wait(ops.all_gather_start(x, [1, 1], "dp"))[None][0] + 1,), tracing_mode="fake")(
        torch.ones(2)
    )
    steps = list(gm.graph.nodes)
    first = whole_views(steps)
    assert {str(a): str(b) for a, b in first.items()} == {"unsqueeze": "wait", "select": "wait"}
    assert "wait" in map(str, list_needed(steps, first))


def test_conjugates_and_negatives_are_values_of_their_own() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        return x.conj() * 2, x.conj().imag, (x * x.conj()).real

    x = torch.randn(3, dtype=torch.complex64)
    got = compile_graph(make_fx(run, tracing_mode="fake")(x), "graph")(x)
    for a, b in zip(got, run(x), strict=True):
        assert torch.equal(a, b)


def shape_in_place(x: Tensor) -> tuple[Tensor, ...]:
    base = x + 1
    view = base.t().t()
    view.t_()
    other = x * 2
    flat = other.t().t()
    other.unsqueeze_(0)
    return base, view * 1, other * 1, flat * 1


def strides_in_memory(x: Tensor) -> tuple[Tensor, ...]:
    return x.as_strided((3, 2), (1, 3)).as_strided((2, 3), (3, 1)) * 1, (x + 1).t().t() * 2


@pytest.mark.parametrize("run", [shape_in_place, strides_in_memory])
def test_changes_of_shape_and_strides_in_memory_are_no_looks(run: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    step = compile_graph(make_fx(run, tracing_mode="fake")(torch.ones(2, 3)), "graph")
    for x in (torch.randn(2, 3), torch.randn(3, 2).t()):
        for got, want in zip(step(x), run(x), strict=True):
            assert torch.equal(got, want) and got.stride() == want.stride()
