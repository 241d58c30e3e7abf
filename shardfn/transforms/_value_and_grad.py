"""`value_and_grad` and `grad`: reverse mode over pytrees, one microbatch at a time.

Both use `torch.autograd.grad`: `torch.func.grad` refuses the saved-tensor hooks that keep gathered parameters out of
the graph. Transforms of torch.func stay usable inside the loss.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor, local
from shardfn.core import PyTree, tree_flatten, tree_leaves, tree_paths, tree_unflatten
from shardfn.engine import COMMS, Loss, NoGradientError, WeightedMean, evaluate, fold, losing_no_peer_purely


def value_and_grad(loss: Loss, *, has_aux: bool = False) -> Callable[..., Any]:
    """Returns a function to the loss and the gradient with respect to the first argument.

    Leaves may be `GlobalTensor`s, in a `sharded` function. Their gradients are then `GlobalTensor`s, too.

    Args:
        loss: `loss(params, ...)` -> 0-d tensor, or `(0-d tensor, aux)`, or with a `WeightedMean` for the tensor.
        has_aux: whether the loss returns an aux.

    Returns:
        `f(params, *args) -> (value, grads)`, or `((value, aux), grads)`. The gradients have the structure of params,
        with zeros where the loss does not depend on a leaf.

    Raises:
        TypeError: (when called) a leaf of params is not a floating-point tensor. All such leaves are listed.
        ValueError: (when called) the loss depends on no leaf at all, or a weight of the mean requires a gradient.

    Example:
        >>> import torch
        >>> value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
        (tensor(5.), {'w': tensor([2., 4.])})
    """

    def sum_microbatches(params: PyTree, *args: Any) -> Any:
        leaves, treedef = tree_flatten(params)
        _check_leaves(params, leaves)
        handles = [x.detach().requires_grad_() for x in local(leaves)]
        tree = tree_unflatten(treedef, map(_restore_leaf, handles, leaves))

        def differentiate_one(inner: Loss, batch: PyTree) -> _Totals:
            with torch.enable_grad():
                value = evaluate(inner, tree, (batch, *args[1:]) if args else (), has_aux)
            grads, total = _compute_grads(value.total, handles), 0.0 + value.total.detach()
            return _Totals(total, 1.0 if value.weight is None else value.weight, grads, [value.aux])

        total, weight, grads, auxes = (
            fold(loss, args[0], differentiate_one, _add_totals) if args else differentiate_one(loss, None)
        )
        if handles and all(g is None for g in grads):
            raise NoGradientError(tree_paths(params, "params"))
        scaled = [torch.zeros_like(x) if g is None else g / weight for g, x in zip(grads, handles, strict=True)]
        out: Any = total / weight
        if has_aux:
            out = out, {k: sum(a[k].total for a in auxes) / sum(a[k].weight for a in auxes) for k in auxes[0]}
        return out, tree_unflatten(treedef, map(_gradient_of, leaves, scaled))

    def value_and_grad_call(params: PyTree, *args: Any) -> Any:
        # A function of only this rank's blocks need not be called by all ranks, and has no communicators.
        meshes = [x.mesh for x in tree_leaves(params) if isinstance(x, GlobalTensor)]
        mesh = next((m for m in meshes if COMMS.get(m) is not None), None)
        with contextlib.nullcontext() if mesh is None else losing_no_peer_purely(mesh, ""):
            return sum_microbatches(params, *args)

    return value_and_grad_call


def grad(loss: Loss, *, has_aux: bool = False) -> Callable[..., Any]:
    """Returns a function to the gradient only, or to `(grads, aux)`. See `value_and_grad`.

    Example:
        >>> import torch
        >>> grad(lambda p: p**3)(torch.tensor(2.0))
        tensor(12.)
    """
    both = value_and_grad(loss, has_aux=has_aux)

    def grad_call(params: PyTree, *args: Any) -> Any:
        value, grads = both(params, *args)
        return (grads, value[1]) if has_aux else grads

    return grad_call


class _Totals(NamedTuple):
    """Sums over microbatches, and the aux of each microbatch."""

    total: Tensor
    weight: Any
    grads: list[Tensor | None]
    auxes: list[dict[str, WeightedMean]]


def _add_totals(a: _Totals, b: _Totals) -> _Totals:
    pairs = zip(a.grads, b.grads, strict=True)
    grads = [y if x is None else x if y is None else x + y for x, y in pairs]
    return _Totals(a.total + b.total, a.weight + b.weight, grads, a.auxes + b.auxes)


def _compute_grads(total: Tensor, handles: list[Tensor]) -> list[Tensor | None]:
    # torch.autograd.grad would raise. A loss that uses no parameter has no gradient, like a parameter without a use.
    if not total.requires_grad:
        return [None] * len(handles)
    return list(torch.autograd.grad(total, handles, allow_unused=True))


def _check_leaves(params: PyTree, leaves: list[Any]) -> None:
    pairs = zip(tree_paths(params, "params"), leaves, strict=True)
    bad = [f"{p} is {getattr(x, 'dtype', type(x).__name__)}" for p, x in pairs if not _is_float(x)]
    if bad:
        raise TypeError("can only differentiate floating-point tensors; " + ", ".join(bad) + ". Close over the others.")


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor | GlobalTensor) and x.dtype.is_floating_point


def _gradient_of(leaf: Any, x: Tensor) -> Any:
    """Returns the gradient of a leaf. The gradient of a leaf on disk is on the host."""
    return leaf.replace_block(x) if isinstance(leaf, GlobalTensor) else x


def _restore_leaf(x: Tensor, leaf: Any) -> Any:
    """Returns a tensor in the place of a leaf: for a sharded leaf, with the tensor as this rank's block."""
    return leaf.with_block(x) if isinstance(leaf, GlobalTensor) else x
