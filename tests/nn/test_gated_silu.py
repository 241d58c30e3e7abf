"""Covers SwiGLU's activation: the bits of torch's operations, derivatives of any order, two tensors kept."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vmap

from shardfn.nn.moe._experts import gated_silu


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def drawn(dtype: torch.dtype = torch.float32) -> Tensor:
    """Gate and up, side by side, as one product gives them."""
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).to(dtype)


def gradients(f: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_(True)
    y = f(*x.chunk(2, -1))
    return [y, *torch.autograd.grad(y.square().sum(), x)]


def test_values_and_gradients_have_the_bits_of_torch() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for got, want in zip(gradients(gated_silu, drawn(dtype)), gradients(plain, drawn(dtype)), strict=True):
            assert torch.equal(got, want)


def test_it_keeps_its_inputs_alone() -> None:
    kept: set[int] = set()

    def pack(x: Tensor) -> Tensor:
        kept.add(x.untyped_storage()._cdata)
        return x

    x = drawn().requires_grad_(True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        gated_silu(*(x * 1).chunk(2, -1))
    assert len(kept) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
def test_derivatives_of_any_order() -> None:
    gate, up = (t.clone().requires_grad_(True) for t in drawn(torch.float64).chunk(2, -1))
    assert torch.autograd.gradcheck(gated_silu, (gate, up), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(gated_silu, (gate, up))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
def test_transforms_of_torch() -> None:
    gate, up = drawn(torch.float64).chunk(2, -1)

    def total(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda g, u: f(g, u).square().sum()

    for one, other in zip(*(vmap(grad(total(f), argnums=(0, 1)))(gate, up) for f in (gated_silu, plain)), strict=True):
        torch.testing.assert_close(one, other)
    found = jvp(lambda g: gated_silu(g, up), (gate,), (up,))[1]
    torch.testing.assert_close(found, up * grad(lambda g: plain(g, up).sum())(gate))
    torch.testing.assert_close(jvp(lambda u: gated_silu(gate, u), (up,), (gate,))[1], plain(gate, gate))
