"""Adapted weights: the choice of leaves, and products with `w + scale * (left @ right)`.

Leaves with an adapter, and the choice of rank and scale by patterns.

Weight with a low-rank part that is never added: `w + scale * (left @ right)`, as two thin products.

    x @ w                                   written in the model
    x @ w + scale * (x @ left) @ right      computed

A `LowRankWeight` is a tensor under `isinstance`, and a pytree node with three parts as children for transforms such as
`scan` and `remat`. Operations other than products, transposes and taking layers from a stack see the sum.
"""

import dataclasses
import re
import string
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardfn import core
from shardfn.nn import Product, product_of

V = TypeVar("V")


@dataclasses.dataclass(frozen=True)
class Site:
    """Leaf with an adapter, or with a trained copy.

    Attributes:
        entries: keys of the path.
        shape: global shape.
        spec: spec of the leaf.
        stacked: whether layers are gathered in sequence (`Sharding`).
        rank: r.
        alpha: the numerator of the scale.
        full: whether a copy of the whole leaf is trained, in place of an adapter.
    """

    entries: tuple[Any, ...]
    shape: tuple[int, ...]
    spec: core.P
    stacked: bool = False
    rank: int = 0
    alpha: float = 0.0
    full: bool = False


def of_pattern(patterns: Mapping[str, V], path: str, default: V) -> V:
    """Returns the value of the first pattern that matches the end of a module's path after a dot, as in `peft`.

    Example:
        >>> of_pattern({"v_proj": 4}, "layers.0.v_proj.weight", 8), of_pattern({"proj": 4}, "layers.0.v_proj.weight", 8)
        (4, 8)
    """
    names = {path, path.removesuffix(".weight")}
    fits = (v for p, v in patterns.items() if any(re.match(rf"(.*\.)?({p})$", name) for name in names))
    return next(fits, default)


def unused(patterns: Mapping[str, Any], paths: list[str]) -> list[str]:
    """Returns the patterns that match no path."""
    missing = object()
    return [p for p in patterns if all(of_pattern({p: 0}, path, missing) is missing for path in paths)]


class _WithoutValues(torch.autograd.Function):
    """Maps the parts to the weight without values. Gradients of code that bypasses torch's functions arrive here."""

    @staticmethod
    def forward(ctx: Any, scale: float, weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(left, right)
        return LowRankWeight.empty(weight.shape, weight.dtype, weight.device, weight.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        left, right = ctx.saved_tensors
        scaled = ctx.scale * grads[0]
        return None, grads[0], scaled @ right.mT, left.mT @ scaled


class LowRankWeight(core.MetadataTensor):
    """Weight `[..., m, n]` that behaves as the sum `weight + scale * (left @ right)`.

    Attributes:
        weight: `[..., m, n]`.
        left: `[..., m, r]`.
        right: `[..., r, n]`.
        scale: a number.
        drop: function of the operand of the thin products, such as dropout. None: the identity.
    """

    weight: Tensor
    left: Tensor
    right: Tensor
    scale: float
    drop: Callable[[Tensor], Tensor] | None

    @staticmethod
    def of(weight: Tensor, left: Tensor, right: Tensor, scale: float, drop: Any = None) -> "LowRankWeight":
        """Returns the weight of these parts.

        Raises:
            ValueError: the shapes do not fit.
        """
        *batch, m, n = weight.shape
        r = left.shape[-1]
        if tuple(left.shape) != (*batch, m, r) or tuple(right.shape) != (*batch, r, n):
            raise ValueError(
                f"left {tuple(left.shape)} and right {tuple(right.shape)} do not make a weight {tuple(weight.shape)}."
            )
        made: Any = _WithoutValues.apply(scale, weight, left, right)
        made.weight, made.left, made.right, made.scale, made.drop = weight, left, right, scale, drop
        return made

    def whole(self) -> Tensor:
        """Returns the base weight plus the product of the adapter's matrices."""
        return self.weight + self.scale * (self.left @ self.right)

    def with_parts(self, f: Callable[[Tensor], Tensor]) -> "LowRankWeight":
        """Returns the weight with `f` applied to each part."""
        return LowRankWeight.of(f(self.weight), f(self.left), f(self.right), self.scale, self.drop)

    def transposed(self) -> "LowRankWeight":
        """Returns the weight with the last two dims exchanged."""
        return LowRankWeight.of(self.weight.mT, self.right.mT, self.left.mT, self.scale, self.drop)

    @classmethod
    def on_values(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns a product computed by the parts, or the result of another function for the sum."""
        if type(args[0] if args else None) is LowRankWeight:
            view = _view_parts(func, args[0], args[1:], kwargs)
            if view is not None:
                return view
        product, operands = product_of(func, args, kwargs)
        known = product is not None and not isinstance(func, Product)
        if known and sum(type(x) is LowRankWeight for x in operands[:2]) == 1:
            return _multiply_parts(func, args, operands)
        return func(*(_merge_operands(x) for x in args), **{k: _merge_operands(x) for k, x in kwargs.items()})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"a weight with a low-rank part reached {func} unopened: this op bypasses torch's functions. Leave that"
            " leaf out of the targets, or merge it."
        )


_TENSOR: Any = torch.Tensor
_TRANSPOSES: set[Any] = {_TENSOR.t, torch.t, _TENSOR.T.__get__, _TENSOR.mT.__get__}
_SWAPS: set[Any] = {_TENSOR.transpose, torch.transpose, _TENSOR.swapaxes, _TENSOR.swapdims}


def _view_parts(func: Any, x: LowRankWeight, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of an operation that keeps the parts separate.

    A transpose, or layers of a stack. None for other operations.
    """
    if kwargs and func is not _TENSOR.unbind:
        return None
    if func in _TRANSPOSES and (x.ndim == 2 or func is _TENSOR.mT.__get__):
        return x.transposed()
    if func in _SWAPS and {d % x.ndim for d in args} == {x.ndim - 2, x.ndim - 1}:
        return x.transposed()
    if x.ndim < 3:
        return None
    if func in (_TENSOR.unbind, torch.unbind) and (args or (kwargs.get("dim", 0),))[0] == 0:
        parts = zip(x.weight.unbind(0), x.left.unbind(0), x.right.unbind(0), strict=True)
        return tuple(LowRankWeight.of(*own, x.scale, x.drop) for own in parts)
    if func is _TENSOR.__iter__:
        return iter(x.unbind(0))
    if func is _TENSOR.__getitem__ and isinstance(args[0], int):
        return x.with_parts(lambda part: part[args[0]])
    return None


def _multiply_parts(func: Any, args: tuple[Any, ...], operands: tuple[Any, ...]) -> Any:
    """Returns a product with the weight: the product with the base weight, plus the two thin products."""
    a, b, *bias = operands
    x, w, on_right = (a, b, True) if type(b) is LowRankWeight else (b, a, False)
    if func is torch.nn.functional.linear and not on_right:  # the weight is the mapped operand
        return torch.nn.functional.linear(w.whole(), x, *bias)
    thin = x if w.drop is None else w.drop(x)
    if func is torch.einsum:
        return torch.einsum(args[0], *(_base_of(y) for y in operands)) + w.scale * _thin_einsum(
            args[0], thin, w, on_right
        )
    base = func(*(_base_of(y) for y in args))
    if func is torch.nn.functional.linear:
        return base + w.scale * ((thin @ w.right.mT) @ w.left.mT)
    return base + w.scale * ((thin @ w.left) @ w.right if on_right else w.left @ (w.right @ thin))


def _thin_einsum(equation: str, x: Tensor, w: LowRankWeight, on_right: bool) -> Tensor:
    """Returns the low-rank part of an einsum of two operands. The factor that is contracted with `x` comes first."""
    inputs, _, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    of_x, of_w = terms if on_right else terms[::-1]
    rank = next(c for c in string.ascii_letters if c not in inputs)
    left, right = (of_w[:-1] + rank, w.left), (of_w[:-2] + rank + of_w[-1], w.right)
    (first, a), (second, b) = (right, left) if of_w[-1] in of_x else (left, right)
    return torch.einsum(f"{of_x},{first},{second}->{out}", x, a, b)


def _base_of(x: Any) -> Any:
    return x.weight if type(x) is LowRankWeight else x


def _merge_operands(x: Any) -> Any:
    if type(x) is LowRankWeight:
        return x.whole()
    if type(x) in (list, tuple):
        return type(x)(_merge_operands(y) for y in x)
    return x


def _parts_of(x: LowRankWeight) -> tuple[tuple[Any, ...], tuple[float, Any], tuple[str, ...]]:
    return (x.weight, x.left, x.right), (x.scale, x.drop), ("weight", "left", "right")


def _join_parts(kept: tuple[float, Any], parts: Any) -> Any:
    weight, left, right = parts
    if all(isinstance(x, Tensor) for x in (weight, left, right)):
        return LowRankWeight.of(weight, left, right, *kept)
    return {"weight": weight, "left": left, "right": right}  # parts of another tree, of specs or names


core.register_pytree_node(LowRankWeight, _parts_of, _join_parts)
