"""One kernel in place of a group of torch's operations has their bits, and other groups do not change."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import shardfn as sf
from shardfn import kernels
from shardfn.core import op_by_op
from shardfn.graph import compile_graph, donate
from shardfn.graph._fusions import with_fusions

if not kernels.is_native("rotate"):
    pytest.skip("the kernels are in C++", allow_module_level=True)

ROTATE, SILU = torch.ops.shardfn_kernels.rotate.default, torch.ops.shardfn_kernels.gated_silu.default
Run = Callable[..., tuple[Tensor, ...]]


def captured(run: Run, *args: Tensor, alone: bool = True) -> GraphModule:
    """The graph of a function, captured as under `op_by_op` if `alone`."""
    gm = make_fx(run, tracing_mode="fake")(*args)
    for node in gm.graph.nodes:
        if alone and node.op == "call_function":
            node.meta["op_by_op"] = True
    return gm


def kernels_of(gm: GraphModule) -> list[object]:
    return [n.target for n in with_fusions(gm).graph.nodes if n.target in (ROTATE, SILU)]


def halves(x: Tensor) -> Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def own(*args: Tensor) -> tuple[Tensor, ...]:
    """Values that the graph makes: strides of others may differ in each call."""
    return tuple(map(kernels.gelu, args))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """As models of transformers do it: x [batch, time, features], tables [batch, time, k]."""
    x, cos, sin = own(x, cos, sin)
    q = x.view(*x.shape[:-1], -1, cos.shape[-1]).transpose(1, 2)
    q = q * cos.unsqueeze(1) + halves(q) * sin.unsqueeze(1)
    return (q.transpose(1, 2).reshape(x.shape) * 2,)


def given(batch: int, time: int, heads: int, k: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, time, heads * k), *(torch.randn(batch, time, k) for _ in range(2))


@pytest.mark.parametrize("sizes", [(1, 1, 2, 4), (1, 7, 3, 6), (3, 5, 1, 2), (2, 9, 4, 34)])
def test_a_rotation_has_the_bits_of_its_operations(sizes: tuple[int, int, int, int]) -> None:
    args = given(*sizes)
    gm = captured(turned, *args)
    assert kernels_of(gm) == [ROTATE]
    args = given(*sizes)
    for backend in ("graph", "inductor"):
        assert torch.equal(compile_graph(gm, backend)(*args)[0], turned(*args)[0])


def gated(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    gate, up = own(gate, up)
    return (up * kernels.gated_silu(gate, torch.ones_like(gate)) + 1,)


def test_a_gated_activation_has_the_bits_of_its_product() -> None:
    args = torch.randn(7, 13) * 9, torch.randn(7, 13)
    gm = captured(gated, *args)
    assert kernels_of(gm) == [SILU] and len(with_fusions(gm).graph.nodes) == 7
    assert torch.equal(compile_graph(gm, "graph")(*args)[0], gated(*args)[0])


def other_half(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    x, cos, sin = own(x, cos, sin)
    q = x.view(*x.shape[:-1], -1, cos.shape[-1]).transpose(1, 2)
    a, b = q[..., : q.shape[-1] // 2], q[..., q.shape[-1] // 2 :]
    return (q * cos.unsqueeze(1) + torch.cat((-a, b), dim=-1) * sin.unsqueeze(1),)


def of_another(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    x, cos, sin = own(x, cos, sin)
    q = x.view(*x.shape[:-1], -1, cos.shape[-1]).transpose(1, 2)
    return (q * cos.unsqueeze(1) + halves(q + 1) * sin.unsqueeze(1),)


def read_inside(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    x, cos, sin = own(x, cos, sin)
    q = x.view(*x.shape[:-1], -1, cos.shape[-1]).transpose(1, 2)
    product = halves(q) * sin.unsqueeze(1)
    return q * cos.unsqueeze(1) + product, product + 1


def by_heads(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    x, cos, sin = own(x, cos, sin)
    q = x.view(x.shape[0], -1, x.shape[1], cos.shape[-1])
    return (q * cos.unsqueeze(1) + halves(q) * sin.unsqueeze(1),)


def overwritten(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    x, cos, sin = own(x, cos, sin)
    q = x.view(*x.shape[:-1], -1, cos.shape[-1]).transpose(1, 2)
    other = halves(q)
    return (q.mul_(cos.unsqueeze(1)) + other * sin.unsqueeze(1), x + 1)


def alpha(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    x, cos, sin = own(x, cos, sin)
    q = x.view(*x.shape[:-1], -1, cos.shape[-1]).transpose(1, 2)
    return (torch.add(q * cos.unsqueeze(1), halves(q) * sin.unsqueeze(1), alpha=2),)


def of_gates(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    x, cos, sin = own(x, cos, sin)
    silu = kernels.gated_silu(x, torch.ones_like(x))
    return silu * cos[..., :1], silu * x, kernels.gated_silu(x, torch.zeros_like(x)) * x + sin.sum()


def returned(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    x, cos, sin = own(x, cos, sin)
    q = x.view(*x.shape[:-1], -1, cos.shape[-1]).transpose(1, 2)
    q = q * cos.unsqueeze(1) + halves(q) * sin.unsqueeze(1)
    return q.transpose(1, 2), q.sum()


def of_arguments(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q = x.view(*x.shape[:-1], -1, cos.shape[-1]).transpose(1, 2)
    q = q * cos.unsqueeze(1) + halves(q) * sin.unsqueeze(1)
    return q.sum(), (kernels.gated_silu(x, torch.ones_like(x)) * x).sum()


def written_between(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    x, cos, sin = own(x, cos, sin)
    q = x.view(*x.shape[:-1], -1, cos.shape[-1]).transpose(1, 2)
    product = q * cos.unsqueeze(1)
    cos.zero_()
    silu = kernels.gated_silu(x, torch.ones_like(x))
    x.view(-1).add_(1)
    return (product + halves(q) * sin.unsqueeze(1)).sum(), silu * x


def write_to_an_operand(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    x, gate = own(x, x + 1)
    x.view(-1).mul_(kernels.gated_silu(gate, torch.ones_like(gate)).view(-1))
    return (x + cos.sum() + sin.sum(),)


@pytest.mark.parametrize("run", [returned, of_arguments, written_between, write_to_an_operand])
def test_values_that_others_may_see_stay(run: Run) -> None:
    args = given(2, 5, 3, 4)
    gm = captured(run, *args)
    assert len(with_fusions(gm).graph.nodes) == len(gm.graph.nodes)
    for got, want in zip(compile_graph(gm, "graph")(*args), run(*args), strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


def nested(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    x, cos, sin = own(x, cos, sin)
    q = x.view(*x.shape[:-1], -1, cos.shape[-1]).transpose(1, 2)
    for _ in range(2):
        sin = kernels.gated_silu(sin, torch.ones_like(sin)) * cos
        q = q * cos.unsqueeze(1) + halves(q) * sin.unsqueeze(1)
    y = q.transpose(1, 2).reshape(x.shape)
    y = kernels.gated_silu(y, torch.ones_like(y)) * (kernels.gated_silu(x, torch.ones_like(x)) * y)
    return (y * 2,)


@pytest.mark.parametrize("give", [False, True])
def test_groups_read_the_results_of_others(give: bool) -> None:
    args = given(2, 5, 3, 4)
    gm = captured(nested, *args)
    gm = donate(gm) if give else gm
    assert sorted(map(str, kernels_of(gm))) == sorted(map(str, [ROTATE] * 2 + [SILU] * 4))
    assert torch.equal(compile_graph(gm, "graph")(*args)[0], nested(*args)[0])


def layers(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    with op_by_op():
        gate = kernels.row_linear(x, kernels.pack_rows(w), len(w))
        up = kernels.row_linear(x, kernels.pack_rows(v), len(v))
        up = torch.relu(up * kernels.gated_silu(gate, torch.ones_like(gate)) + 1)
    return (up,)


def test_a_jitted_function_has_the_bits_of_eager() -> None:
    args = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 8)
    with torch.no_grad():
        want = layers(*args)[0]
        for backend in ("graph", "inductor"):
            assert torch.equal(sf.jit(layers, backend=backend)(*args)[0], want)


@pytest.mark.parametrize("run", [other_half, of_another, read_inside, by_heads, overwritten, alpha, of_gates])
def test_others_stay(run: Run) -> None:
    args = given(2, 5, 3, 4)
    gm = captured(run, *[x.clone() for x in args])
    assert len(with_fusions(gm).graph.nodes) == len(gm.graph.nodes)
    want = run(*[x.clone() for x in args])
    for got, one in zip(compile_graph(gm, "graph")(*[x.clone() for x in args]), want, strict=True):
        assert torch.equal(got, one)


def test_wide_values_and_those_of_a_compiler_stay() -> None:
    args = given(1, 3, 2, 4)
    assert not kernels_of(captured(turned, *args, alone=False))
    wide = [x.double() for x in args]
    assert not kernels_of(captured(turned, *wide))
    assert torch.equal(compile_graph(captured(turned, *wide), "graph")(*wide)[0], turned(*wide)[0])
