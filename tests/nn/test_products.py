"""Covers `Product` and the products that a split backward knows: each operand's gradient is autograd's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from shardfn.nn import Product
from shardfn.nn._products import product_of

F = torch.nn.functional
CALLS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(2, 3, 4), (5, 4)]),
    "linear of a vector": (F.linear, [(4,), (5, 4)]),
    "linear with a bias": (F.linear, [(2, 3, 4), (5, 4), (5,)]),
    "linear of nothing": (F.linear, [(0, 4), (5, 4), (5,)]),
    "linear to nothing": (F.linear, [(3, 0), (5, 0)]),
    "matmul": (torch.matmul, [(3, 4), (4, 5)]),
    "batched by matrix": (torch.Tensor.matmul, [(2, 3, 4), (4, 5)]),
    "matrix by batched": (torch.Tensor.__matmul__, [(3, 4), (2, 4, 5)]),
    "batches that broadcast": (torch.matmul, [(2, 1, 3, 4), (7, 4, 5)]),
    "reflected": (torch.Tensor.__rmatmul__, [(4, 5), (3, 4)]),
    "mm": (torch.mm, [(3, 4), (4, 5)]),
    "bmm": (torch.Tensor.bmm, [(2, 3, 4), (2, 4, 5)]),
    "addmm": (torch.addmm, [(5,), (3, 4), (4, 5)]),
    "addmm, bias whole": (torch.Tensor.addmm, [(3, 5), (3, 4), (4, 5)]),
    "einsum": (lambda a, b: torch.einsum("bti,io->bto", a, b), [(2, 3, 4), (4, 5)]),
    "einsum of experts": (lambda a, b: torch.einsum("eti, eoi -> teo", a, b), [(2, 3, 4), (2, 5, 4)]),
    "einsum that broadcasts": (lambda a, b: torch.einsum("bti,bio->bto", a, b), [(2, 3, 4), (1, 4, 5)]),
}


def _drawn(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]


def _read(call: Any, operands: list[Tensor]) -> tuple[Product | None, tuple[Any, ...]]:
    """The product found for a call: for the torch function itself, as a mode sees it."""
    seen: list[Any] = []

    class _Look(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = product_of(func, args, kwargs or {})
            if found[0] is not None:
                seen.append(found)
            return func(*args, **(kwargs or {}))

    with _Look():
        call(*operands)
    return seen[0] if seen else (None, ())


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(CALLS)]
)
def test_gradients_are_those_of_autograd(name: str) -> None:
    call, shapes = CALLS[name]
    operands = _drawn(shapes)
    out = call(*operands)
    dy = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    product, given = _read(call, operands)
    assert product is not None
    torch.testing.assert_close(product.forward(*given), out)
    a, b = given[:2]
    wanted = torch.autograd.grad(out, (a, b), dy)
    torch.testing.assert_close(product.grads[0](dy, b.detach(), a.shape), wanted[0])
    torch.testing.assert_close(product.grads[1](dy, a.detach(), b.shape), wanted[1])


UNKNOWN: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "a vector": (torch.matmul, [(4,), (4, 5)]),
    "factors": (lambda *x: torch.addmm(*x, alpha=2), [(5,), (3, 4), (4, 5)]),
    "three operands": (lambda *x: torch.einsum("ij,jk,kl->il", *x), [(2, 3), (3, 4), (4, 5)]),
    "a diagonal": (lambda *x: torch.einsum("ii,ij->ij", *x), [(3, 3), (3, 4)]),
    "a dim that is summed alone": (lambda *x: torch.einsum("ijs,jk->ik", *x), [(2, 3, 5), (3, 4)]),
    "an ellipsis": (lambda *x: torch.einsum("...j,jk->...k", *x), [(2, 3), (3, 4)]),
    "an output of its own": (lambda a, b: torch.mm(a, b, out=torch.empty(0)), [(3, 4), (4, 5)]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(UNKNOWN)]
)
def test_others_are_left_unchanged(name: str) -> None:
    call, shapes = UNKNOWN[name]
    operands = [x.detach().float() for x in _drawn(shapes)]
    assert _read(call, operands)[0] is None


def test_autocast_and_complex_numbers_are_left_unchanged() -> None:
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert _read(torch.matmul, [a, b])[0] is None
    assert _read(torch.matmul, [a.to(torch.complex64), b.to(torch.complex64)])[0] is None


def test_a_product_of_ones_own_has_its_gradients() -> None:
    gram = Product(lambda a, b: a @ b.t(), (lambda dy, b, _: dy @ b, lambda dy, a, _: dy.t() @ a))
    operands = tuple(_drawn([(3, 4), (5, 4)]))
    assert gradcheck(gram, operands) and gradgradcheck(gram, operands)
