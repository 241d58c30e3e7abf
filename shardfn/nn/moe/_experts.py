"""Experts: feed-forward layers of groups of rows, each group with separate weights.

`f(params, rows, counts) -> rows`: `counts[e]` consecutive rows belong to expert e. Leaves have the experts along dim 0.
M rows, E experts, D model, F ffn.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from shardfn.collectives import axis_index, axis_size, pvary
from shardfn.core import Axes, PyTree, save_inputs, save_tensors
from shardfn.kernels import gated_silu_gradient, grouped_outer, grouped_product
from shardfn.nn import (
    Product,
    Trilinear,
    batch_invariant_gated_silu,
    batch_invariant_gelu,
    batch_invariant_sigmoid,
    derivative,
    partials_of_gated_silu,
    run_op,
    runs_as_ops,
    splitting,
)

from ._permute import Permutation, combine, copies


def grouped(
    x: Float[Tensor, "rows k"],
    w: Float[Tensor, "e inputs outputs"],
    counts: Int64[Tensor, " e"],
    transposed: bool = False,
    *,
    batch_invariant: bool = False,
) -> Float[Tensor, "rows n"]:
    """Returns the rows of each expert times the expert's matrix, and exact zeros in rows past the sum of the counts.

    An expert may have no row, and no size has to divide anything: counts [3, 0, 4] are fine, for example. Rows of the
    tail are not read, forward or backward, so NaNs in the tail reach no gradient. Where a pipeline's schedule splits
    backwards, the gradients of `x` and of `w` are computed separately, as for torch's products.

    Args:
        x: rows in the order of experts, as from `dispatch`.
        w: a matrix [k, n] for each expert, in the dtype of `x`.
        counts: the rows of each expert.
        transposed: whether `w` has matrices [n, k], as in Hugging Face's experts.
        batch_invariant: whether each row of the forward has the bits of `kernels.row_linear` on any device, for float32
            or float64.

    Raises:
        TypeError: dtypes differ or are not floating point.
        ValueError: shapes do not fit. On a CPU, the counts are not sizes of groups of the rows.

    Example:
        >>> import torch
        >>> x, w = torch.ones(3, 2), torch.ones(2, 2, 1, requires_grad=True)
        >>> grouped(x, w, torch.tensor([0, 2])).sum().backward()
        >>> w.grad.flatten()
        tensor([0., 0., 2., 2.])
    """
    form = FORMS[transposed, batch_invariant]
    if runs_as_ops():
        return run_op(torch.ops.shardfn_kernels.multiplied_rows, x, w, counts, transposed, batch_invariant)
    if has_torch_function((x, w)):  # a lazy leaf, or a mode for split backwards
        product = Product(
            lambda x, w: derivative(form, 2, x, w, counts),
            (
                lambda dy, w, shape: derivative(form, 0, w, dy, counts),
                lambda dy, x, shape: derivative(form, 1, x, dy, counts),
            ),
        )
        return handle_torch_function(product, (x, w), x, w)
    return derivative(form, 2, x, w, counts)


# t(x, w, y) = sum over rows of (x w[group]) . y, and the three derivatives.


def _gradient_of_x(w: Tensor, y: Tensor, counts: Tensor, *, transposed: bool) -> Tensor:
    return grouped_product(y, w, counts, transposed=not transposed)


def _gradient_of_w(x: Tensor, y: Tensor, counts: Tensor, *, transposed: bool) -> Tensor:
    return grouped_outer(y, x, counts) if transposed else grouped_outer(x, y, counts)


def _recompute_product(x: Tensor, w: Tensor, counts: Tensor, *, transposed: bool, batch_invariant: bool) -> Tensor:
    return grouped_product(x, w, counts, transposed=transposed, batch_invariant=batch_invariant)


def _make_form(transposed: bool, batch_invariant: bool) -> Trilinear:
    of_x, of_w = (functools.partial(f, transposed=transposed) for f in (_gradient_of_x, _gradient_of_w))
    return of_x, of_w, functools.partial(_recompute_product, transposed=transposed, batch_invariant=batch_invariant)


# By `transposed` and `batch_invariant`.
FORMS = {
    (transposed, batch_invariant): _make_form(transposed, batch_invariant)
    for transposed in (False, True)
    for batch_invariant in (False, True)
}


_OPS = torch.ops.shardfn_kernels


def _multiply_groups(x: Tensor, w: Tensor, counts: Tensor, transposed: bool, batch_invariant: bool) -> Tensor:
    return grouped(x, w, counts, transposed, batch_invariant=batch_invariant)


def _combine_rows(y: Tensor, weights: Tensor, source: Tensor, places: Tensor) -> Tensor:
    return combine(y, Permutation(source, places), weights)


# By op: see `as_ops`.
FUNCTIONS_OF_OPS: Mapping[Any, Callable[..., Tensor]] = {
    _OPS.multiplied_rows.default: _multiply_groups,
    _OPS.copied_rows.default: copies,
    _OPS.combined_rows.default: _combine_rows,
}


def gated_silu(gate: Float[Tensor, "*n"], up: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Returns silu(gate) * up, with the bits and derivatives of torch's operations.

    For a third less memory of the backward: silu(gate) is computed there again.

    Example:
        >>> gated_silu(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
        tensor([0.0000, 1.4621])
    """
    if runs_as_ops():
        return F.silu(gate) * up
    return _GatedSilu.apply(gate, up)  # pyright: ignore[reportReturnType]


class _GatedSilu(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    setup_context = staticmethod(save_inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return gradients_of_gated_silu(grad_outputs[0], *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        (gate, up), (dgate, dup) = ctx.saved_tensors, grad_inputs
        parts = [] if dgate is None else [_silu_gradient(dgate * up, gate)]
        parts += [] if dup is None else [dup * F.silu(gate)]
        return functools.reduce(torch.add, parts)


def gradients_of_gated_silu(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up.

    Example:
        >>> gradients_of_gated_silu(torch.ones(1), torch.zeros(1), torch.ones(1))
        (tensor([0.5000]), tensor([0.]))
    """
    # As in torch: the second form can be differentiated again, where autograd records.
    of_silu = _silu_gradient if torch.is_grad_enabled() else torch.ops.aten.silu_backward
    return of_silu(dy * up, gate), dy * F.silu(gate)


def _silu_gradient(dy: Tensor, gate: Tensor) -> Tensor:
    """Returns `dy` times the derivative of silu."""
    s = gate.sigmoid()
    return dy * s * (1 + gate * (1 - s))


def gated_product(
    x_MI: Float[Tensor, "m i"],
    w_EDF: Float[Tensor, "e d f"],
    counts_E: Int64[Tensor, " e"],
    *,
    batch_invariant: bool = False,
) -> Float[Tensor, "m d"]:
    """Returns `(silu(gate) * up) w^T` with the matrix of each row's expert.

    The halves of a row of `x_MI` are gate and up.

    Bits and derivatives equal `gated_silu` and `grouped`. Memory until the backward is a third less, and the backward
    computes silu(gate) * up again. Where a pipeline's schedule splits backwards, the two functions run.

    Args:
        x_MI: rows in the order of experts.
        w_EDF: a matrix for each expert, in the dtype of `x_MI`.
        counts_E: the rows of each expert.
        batch_invariant: as of `grouped`.

    Example:
        >>> gated_product(torch.ones(1, 4), torch.ones(1, 3, 2), torch.tensor([1]))
        tensor([[1.4621, 1.4621, 1.4621]])
    """
    run = _apply_in_parts if runs_as_ops() or splitting() else _apply_fused
    return run(x_MI, w_EDF, counts_E, batch_invariant)


def _apply_fused(x: Tensor, w: Tensor, counts: Tensor, batch_invariant: bool) -> Tensor:
    if has_torch_function((x, w)):  # a lazy leaf, or a mode
        return handle_torch_function(_apply_fused, (x, w), x, w, counts, batch_invariant)
    return _GatedProduct.apply(x, w, counts, batch_invariant)  # pyright: ignore[reportReturnType]


def _apply_in_parts(x: Tensor, w: Tensor, counts: Tensor, batch_invariant: bool) -> Tensor:
    return grouped(_gate_halves(x, batch_invariant), w, counts, transposed=True, batch_invariant=batch_invariant)


def _gate_halves(x: Tensor, batch_invariant: bool) -> Tensor:
    gate, up = x.chunk(2, -1)
    return batch_invariant_gated_silu(gate, up) if batch_invariant else gated_silu(gate, up)


class _GatedProduct(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, counts: Tensor, batch_invariant: bool) -> Tensor:
        return _apply_in_parts(x, w, counts, batch_invariant)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        *tensors, ctx.batch_invariant = inputs
        save_tensors(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (x, w, counts), dy, form = ctx.saved_tensors, grad_outputs[0], FORMS[True, ctx.batch_invariant]
        # In order: the recomputed value is freed before the gradient of the same size is made.
        dw = derivative(form, 1, _gate_halves(x, ctx.batch_invariant), dy, counts) if ctx.needs_input_grad[1] else None
        dx = (
            _halves_gradient(derivative(form, 0, w, dy, counts), x, ctx.batch_invariant)
            if ctx.needs_input_grad[0]
            else None
        )
        return dx, dw, None, None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        (x, w, counts), (tx, tw, *_), form = ctx.saved_tensors, grad_inputs, FORMS[True, ctx.batch_invariant]
        out = x.new_zeros(len(x), w.shape[1])
        if tx is not None:
            (tgate, tup), (of_gate, of_up) = tx.chunk(2, -1), partials_of_gated_silu(*x.chunk(2, -1))
            out = out + derivative(form, 2, tgate * of_gate + tup * of_up, w, counts)
        return out if tw is None else out + derivative(form, 2, _gate_halves(x, ctx.batch_invariant), tw, counts)


def _halves_gradient(dh: Tensor, x: Tensor, batch_invariant: bool) -> Tensor:
    """Returns the gradient of `x`."""
    gate, up = x.chunk(2, -1)
    if batch_invariant:
        return torch.cat([dh * partial for partial in partials_of_gated_silu(gate, up)], -1)
    if torch.is_grad_enabled():
        return torch.cat(gradients_of_gated_silu(dh, gate, up), -1)
    return gated_silu_gradient(x, dh)


ExpertFunction = Callable[[PyTree, Tensor, Tensor], Tensor]


class ClampedGate(NamedTuple):
    """Gate of gpt-oss: `(up + 1) gate sigmoid(alpha gate)` of clamped halves.

    Attributes:
        alpha: slope of the sigmoid.
        limit: most of a gate, and most of the absolute value of the other half.

    Example:
        >>> ClampedGate(alpha=1.0)(torch.tensor([0.0, 9.0]), torch.tensor([3.0, -1.0]))
        tensor([0., 0.])

    References:
        OpenAI, gpt-oss-120b and gpt-oss-20b Model Card, 2025, https://arxiv.org/abs/2508.10925
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(
        self, gate: Float[Tensor, "*n"], up: Float[Tensor, "*n"], *, batch_invariant: bool = False
    ) -> Float[Tensor, "*n"]:
        """Returns the gated values. With `batch_invariant` they have the same bits on any processor."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        share = (batch_invariant_sigmoid if batch_invariant else torch.sigmoid)(gate * self.alpha)
        return (up + 1) * (gate * share)


def swiglu_experts(
    params: Mapping[str, Any],
    x_MD: Float[Tensor, "m d"],
    counts_E: Int64[Tensor, " e"],
    *,
    gate: ClampedGate | None = None,
    axis: Axes = None,
    batch_invariant: bool = False,
) -> Float[Tensor, "m d"]:
    """Returns `(silu(x w_gate^T) * x w_up^T) w_down^T` with the weights of each row's expert, as in Mixtral.

    Args:
        params: leaves `{"w_gate_up": [E, 2, F, D], "w_down": [E, D, F]}`, and "b_gate_up" [E, 2, F] and "b_down" [E, D]
            or neither. Where an axis cuts F, the result is the rank's part of a sum.
        x_MD: rows, by expert. Rows past the last count are zeros, and stay zeros.
        counts_E: rows of each expert.
        gate: gate in place of silu, as in gpt-oss.
        axis: mesh axes along which F is cut, for a bias that only the first rank adds. None means a single device.
        batch_invariant: whether a row has the same bits next to any other rows, for float32 or float64.

    Example:
        >>> import torch
        >>> params = {"w_gate_up": torch.zeros(2, 2, 4, 3), "w_down": torch.ones(2, 3, 4)}
        >>> swiglu_experts(params, torch.ones(5, 3), torch.tensor([2, 3])).shape
        torch.Size([5, 3])
    """
    w_E2FD, w_EDF = params["w_gate_up"], params["w_down"]
    b_E2F, b_ED = params.get("b_gate_up"), _add_once(params.get("b_down"), axis)
    b_EI = None if b_E2F is None else b_E2F.flatten(1, 2)
    gate_up_MI = _apply_affine(x_MD, w_E2FD.flatten(1, 2), b_EI, counts_E, batch_invariant)
    if gate is None and b_ED is None:
        return gated_product(gate_up_MI, w_EDF, counts_E, batch_invariant=batch_invariant)
    if gate is None:
        h_MF = _gate_halves(gate_up_MI, batch_invariant)
    else:
        h_MF = gate(*gate_up_MI.chunk(2, -1), batch_invariant=batch_invariant)
    return _apply_affine(h_MF, w_EDF, b_ED, counts_E, batch_invariant)


def _add_once(b_ED: Tensor | None, axis: Axes) -> Tensor | None:
    """Returns a bias of sums over the ranks of an axis, which is 0 except on the first rank."""
    return b_ED if b_ED is None or axis_size(axis) == 1 else pvary(b_ED, axis) * (axis_index(axis) == 0)


def gelu_experts(
    params: Mapping[str, Any],
    x_MD: Float[Tensor, "m d"],
    counts_E: Int64[Tensor, " e"],
    *,
    axis: Axes = None,
    batch_invariant: bool = False,
) -> Float[Tensor, "m d"]:
    """Returns `gelu(x w_up^T + b_up) w_down^T + b_down` with the weights of each row's expert, as in GPT-MoE.

    Args:
        params: `{"w_up": [E, F, D], "w_down": [E, D, F]}`, and "b_up" [E, F] and "b_down" [E, D] or neither.
        x_MD: rows, by expert. Rows past the last count are zeros, and stay zeros.
        counts_E: rows of each expert.
        axis: mesh axes along which F is cut. All ranks have the same rows, and the result is the rank's part of a sum,
            with the second bias only on the first rank. None means a single device.
        batch_invariant: whether a row has the same bits next to any other rows, for float32 or float64.

    Example:
        >>> import torch
        >>> params = {"w_up": torch.ones(2, 4, 3), "w_down": torch.zeros(2, 3, 4), "b_down": torch.ones(2, 3)}
        >>> gelu_experts(params, torch.zeros(2, 3), torch.tensor([1, 0])).tolist()
        [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    """
    up_MF = _apply_affine(x_MD, params["w_up"], params.get("b_up"), counts_E, batch_invariant)
    h_MF = batch_invariant_gelu(up_MF) if batch_invariant else F.gelu(up_MF, approximate="tanh")
    b_ED = _add_once(params.get("b_down"), axis)
    return _apply_affine(h_MF, params["w_down"], b_ED, counts_E, batch_invariant)


def _apply_affine(x_MD: Tensor, w_EFD: Tensor, b_EF: Tensor | None, counts_E: Tensor, batch_invariant: bool) -> Tensor:
    y_MF = grouped(x_MD, w_EFD, counts_E, transposed=True, batch_invariant=batch_invariant)
    return y_MF if b_EF is None else y_MF + _expand_bias(b_EF, y_MF, counts_E, batch_invariant)


def _expand_bias(b_EF: Tensor, like_MF: Tensor, counts_E: Tensor, batch_invariant: bool) -> Tensor:
    """Returns the bias of each row's expert: a product with a matrix of 1, so the transpose sums in a fixed order."""
    return grouped(torch.ones_like(like_MF[:, :1]), b_EF[:, None], counts_E, batch_invariant=batch_invariant)
