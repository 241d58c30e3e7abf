"""Covers `DeferredGradients`: both parts together are autograd's backward, and no product is computed twice."""

import collections
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
from shardfn.nn import DeferredGradients, Product

F = torch.nn.functional
D = 5


def _leaves() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()

    return {"embed": draw(7, D), "stack": draw(3, D, D), "qkv": draw(3 * D, D), "b": draw(D), "g": draw(D)}


TOKENS = torch.tensor([[1, 2, 6], [0, 2, 2]])


def _loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = x + p["embed"][TOKENS]
    for w in p["stack"].unbind(0):
        q, k, v = F.linear(h * p["g"], p["qkv"]).split(D, -1)
        h = h + torch.tanh((q @ k.mT) @ v) @ w.t() + p["b"]
        h = h + torch.einsum("bti,io->bto", h, p["stack"][1].float().double())  # used again, and cast
    return F.cross_entropy((h @ p["embed"].t()).flatten(0, 1), TOKENS.flatten())  # tied


class _Counted(TorchDispatchMode):
    """Counts the products that are computed, by their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.products: collections.Counter[Any] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            dims = args[0].shape[-2:].numel() * args[1].shape[-1] * args[0].shape[:-2].numel()
            self.products["multiplications"] += dims
        return func(*args, **(kwargs or {}))


def _input() -> Tensor:
    return torch.ones(2, 3, D, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("remat", [False, True])
def test_both_parts_are_the_whole_backward(remat: bool) -> None:
    p, x = _leaves(), _input()
    loss = sf.remat(_loss) if remat else _loss
    whole, first, rest = _Counted(), _Counted(), _Counted()
    y = loss(p, x)
    with whole:
        *wanted, dx = torch.autograd.grad(y, [*p.values(), x], torch.tensor(2.0, dtype=torch.float64))
    deferred = DeferredGradients(list(p.values()))
    with deferred.recorded():
        again = loss(p, x)
    assert torch.equal(again, y)
    with first:
        *early, early_dx = deferred.first([again], [torch.tensor(2.0, dtype=torch.float64)], [x])
    assert early_dx is not None
    torch.testing.assert_close(early_dx, dx)
    with rest:
        late = deferred.rest()
    assert not any(g is not None and g.requires_grad for g in (*early, *late))
    zero = torch.zeros((), dtype=torch.float64)
    for name, a, b, full in zip(p, early, late, wanted, strict=True):
        torch.testing.assert_close((zero if a is None else a) + (zero if b is None else b), full, msg=name)
    # A leaf used only in products has no gradient in the first part; one outside products has no gradient in the
    # second.
    told = {name: (a is not None, b is not None) for name, a, b in zip(p, early, late, strict=True)}
    assert told == {
        "embed": (True, True),
        "stack": (False, True),
        "qkv": (False, True),
        "b": (True, False),
        "g": (True, False),
    }
    # The chain runs once: both parts together have the multiplications of one backward.
    assert first.products["multiplications"] + rest.products["multiplications"] == whole.products["multiplications"]
    assert rest.products["multiplications"] >= 0.25 * whole.products["multiplications"]


def test_weights_that_depend_on_no_trained_activation_are_reached() -> None:
    """Products of constants, whose first part has no gradient."""
    w = torch.ones(2, 3, requires_grad=True)
    deferred = DeferredGradients([w])
    with deferred.recorded():
        y = (torch.full((4, 2), 2.0) @ w).sum()
    assert deferred.first([y], [torch.tensor(1.0)], []) == [None]
    (dw,) = deferred.rest()
    assert dw is not None and torch.equal(dw, torch.full((2, 3), 8.0))


def test_hooks_see_a_leaf_once_a_part() -> None:
    w, seen = torch.ones(2, 2, requires_grad=True), []
    w.register_hook(lambda g: seen.append(g.clone()))
    deferred = DeferredGradients([w])
    with deferred.recorded():
        y = (torch.ones(1, 2) @ w @ w).sum() + w.sum()
    deferred.first([y], [torch.tensor(1.0)], [])
    assert [g.tolist() for g in seen] == [[[1.0, 1.0], [1.0, 1.0]]]
    deferred.rest()
    assert [g.tolist() for g in seen[1:]] == [[[4.0, 4.0], [4.0, 4.0]]]


def test_between_the_parts_weights_are_not_held() -> None:
    """Only activations and cotangents are: a weight may have been gathered for the backward."""
    leaf = torch.ones(2, 2, requires_grad=True)
    deferred = DeferredGradients([leaf])
    with deferred.recorded():
        w = leaf * 1  # no view: not deferred
        v = leaf.to(torch.float64)
        y = (torch.ones(1, 2).requires_grad_() @ w).double() @ v
        here = StorageWeakRef(v.untyped_storage())
        del v, w
    deferred.first([y.sum()], [torch.tensor(1.0, dtype=torch.float64)], [])
    assert here.expired()
    (dw,) = deferred.rest()
    assert dw is not None and dw.dtype == torch.float32


def test_a_kernel_of_ones_own_is_split() -> None:
    made: list[str] = []

    def of_x(dy: Tensor, w: Tensor, _: torch.Size) -> Tensor:
        made.append("dx")
        return dy @ w.t()

    def of_w(dy: Tensor, x: Tensor, _: torch.Size) -> Tensor:
        made.append("dw")
        return x.t() @ dy

    product, w, x = Product(torch.matmul, (of_x, of_w)), torch.ones(2, 3, requires_grad=True), torch.ones(4, 2)
    x.requires_grad_()
    deferred = DeferredGradients([w])
    with deferred.recorded():
        y = product(x, w).sum()
    deferred.first([y], [torch.tensor(1.0)], [x])
    assert made == ["dx"]
    deferred.rest()
    assert made == ["dx", "dw"]


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_function_that_differentiates_itself_is_refused(create_graph: bool) -> None:
    w, x = torch.ones(2, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)
    deferred = DeferredGradients([w])
    with deferred.recorded():
        y = (x @ w).sum()
        with pytest.raises(ValueError, match="differentiates something itself cannot have its backward split"):
            torch.autograd.grad(y, x, create_graph=create_graph)
        with pytest.raises(ValueError, match="differentiates something itself cannot have its backward split"):
            torch.autograd.grad(y, [w.t()], create_graph=create_graph, allow_unused=True)
        with pytest.raises(ValueError, match="differentiates something itself cannot have its backward split"):
            (torch.ones(1, 2) @ w).sum().backward()
        (two,) = torch.autograd.grad(2 * x.sum(), x)  # contains no deferred product
        assert torch.equal(two, torch.full((1, 2), 2.0))


def test_torch_func_inside_is_left_unchanged() -> None:
    w = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 3, dtype=torch.float64)

    def f() -> Tensor:
        norms = torch.func.vmap(lambda row: (row[None] @ w).square().sum())(x)
        return torch.func.grad(lambda h: (h @ w).square().sum())(x).sum() + norms.sum()

    (wanted,) = torch.autograd.grad(f(), w)
    deferred = DeferredGradients([w])
    with deferred.recorded():
        y = f()
    (early,) = deferred.first([y], [torch.tensor(1.0, dtype=torch.float64)], [])
    assert deferred.rest() == [None]
    assert early is not None
    torch.testing.assert_close(early, wanted)
