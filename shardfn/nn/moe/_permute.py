"""Rows of tokens in the order of experts, and back: gathers in a fixed order, each the transpose of the other.

No two sources add into the same row (no atomics), so results have the same bits in each run and on any number of
threads. Shapes depend only on sizes, never on the choices.

Shapes: s tokens, k choices a token, e experts, d width.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn.core import save_tensors
from shardfn.kernels import combined_to_rows, gather_rows, row_dots
from shardfn.nn import Trilinear, derivative, run_op, runs_as_ops


class Permutation(NamedTuple):
    """Places of the rows of tokens.

    Attributes:
        source: token of each sorted row, int64 [rows], or -1 in the tail without choices.
        places: int64 [s, k]: the row of each choice, or -1 for a choice without a row.
    """

    source: Int64[Tensor, " rows"]
    places: Int64[Tensor, "s k"]


def permutation(
    experts: Int64[Tensor, "s k"], num_experts: int, rows: int | None = None
) -> tuple[Permutation, Int64[Tensor, " e"]]:
    """Returns the order of the choices by expert, then token, then choice.

    Args:
        experts: chosen experts of each token. Choices not from 0 to `num_experts` - 1, such as -1, have no row.
        num_experts: e.
        rows: static number of rows, or None for s k. Choices past `rows` have no row.

    Returns:
        The permutation, and the number of rows of each expert. Rows past the sum of the numbers are the tail.

    Example:
        >>> p, counts = permutation(torch.tensor([[1, 0], [1, -1]]), 2)
        >>> p.source.tolist(), p.places.tolist(), counts.tolist()
        ([0, 0, 1, -1], [[1, 0], [2, -1]], [1, 2])
    """
    s, k = experts.shape
    num = s * k if rows is None else rows
    flat = experts.flatten()
    keys = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = keys.argsort(stable=True)
    # Sums of integers, in any order. The last sum counts choices without an expert.
    chosen = keys.new_zeros(num_experts + 1).scatter_add(0, keys, torch.ones_like(keys))
    bounds = torch.cat([chosen.new_zeros(1), chosen[:-1].cumsum(0).clamp(max=num)])
    counts, used = bounds[1:] - bounds[:-1], bounds[-1]
    row = torch.arange(s * k, device=flat.device)
    tokens = torch.where(row < used, order // max(k, 1), -1)
    source = torch.cat([tokens[:num], tokens.new_full((max(num - s * k, 0),), -1)])
    # Each place is written once.
    places = torch.empty_like(order).scatter(0, order, torch.where(row < used, row, -1))
    return Permutation(source, places.view(s, k)), counts


def dispatch(x: Float[Tensor, "s d"], p: Permutation) -> Float[Tensor, "rows d"]:
    """Returns the rows of the experts: a copy of a token for each of its choices, and zeros in the tail.

    The gradient of a token is the sum of the gradients of the token's rows, in the order of choices.

    Args:
        x: tokens.
        p: parameters from `permutation`.

    Example:
        >>> p, _ = permutation(torch.tensor([[1], [0], [-1]]), 2)
        >>> dispatch(torch.tensor([[1.0], [2.0], [3.0]]), p).T
        tensor([[2., 1., 0.]])
    """
    return copies(x, p.source[:, None], p.places)


def combine(y: Float[Tensor, "rows d"], p: Permutation, weights: Float[Tensor, "s k"]) -> Float[Tensor, "s d"]:
    """Returns the weighted sum of each token's rows, in the order of choices. A choice without a row adds nothing.

    Args:
        y: the experts' results, in the order of `dispatch`. The tail is not read.
        p: parameters from `permutation`.
        weights: weights of the choices. A wider dtype than `y` is the dtype of the sums.

    Example:
        >>> p, _ = permutation(torch.tensor([[1, 0], [0, -1]]), 2)
        >>> y = torch.tensor([[1.0], [2.0], [3.0], [float("nan")]])
        >>> combine(y, p, torch.tensor([[0.5, 0.5], [1.0, 1.0]])).T  # rows 0 and 2 are of the first token
        tensor([[2., 2.]])
    """
    if runs_as_ops():
        return run_op(torch.ops.shardfn_kernels.combined_rows, y, weights, p.source, p.places)
    return derivative(_WEIGHTED, 1, y, weights, p.source, p.places)


def undispatch(y: Float[Tensor, "rows d"], p: Permutation) -> Float[Tensor, "s d"]:
    """Returns the sum of each token's rows.

    The transpose of `dispatch`, and the inverse where each token has a single choice.

    Equal to `combine` with weights of 1, and keeps nothing for a gradient of weights.

    Args:
        y: rows, in the order of `dispatch`. The tail is not read.
        p: parameters from `permutation`.

    Example:
        >>> p, _ = permutation(torch.tensor([[1], [0], [-1]]), 2)
        >>> undispatch(dispatch(torch.tensor([[1.0], [2.0], [3.0]]), p), p).T
        tensor([[1., 2., 0.]])
    """
    return copies(y, p.places, p.source[:, None])


def copies(x: Tensor, index: Tensor, back: Tensor) -> Tensor:
    """Sums of rows by an index. `back` is the index of the transpose."""
    if runs_as_ops():
        return run_op(torch.ops.shardfn_kernels.copied_rows, x, index, back)
    return _Copies.apply(x, index, back)  # pyright: ignore[reportReturnType]


class _Copies(torch.autograd.Function):
    """Rows by an index. Sums by the index `back` are the transpose."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        del back
        return gather_rows(x, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        _, *indices = inputs
        save_tensors(ctx, *indices)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        index, back = ctx.saved_tensors
        return _Copies.apply(grad_outputs[0], back, index), None, None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        return _Copies.apply(grad_inputs[0], *ctx.saved_tensors)


# t(y, x, w) = sum over tokens s and choices j of w[s, j] (y[places[s, j]] . x[s]), and the three derivatives.


def _token_gradient(y: Tensor, weights: Tensor, source: Tensor, places: Tensor) -> Tensor:
    del source
    return gather_rows(y, places, weights)


def _weight_gradient(y: Tensor, x: Tensor, source: Tensor, places: Tensor) -> Tensor:
    del source
    return row_dots(y, x, places)


_WEIGHTED: Trilinear = (combined_to_rows, _token_gradient, _weight_gradient)
