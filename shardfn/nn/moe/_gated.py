"""Second half of SwiGLU's experts: only gate and up are kept for the backward, not silu(gate) * up in addition.

M rows, E experts, D model, F ffn, I = 2 F.
"""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from shardfn.kernels import gated_silu_gradient
from shardfn.nn._as_ops import runs_as_ops
from shardfn.nn._batch_invariant_functions import batch_invariant_gated_silu, partials_of_gated_silu
from shardfn.nn._deferred import splitting
from shardfn.nn._gated_silu import gated_silu, gradients_of_gated_silu
from shardfn.nn._trilinear import derivative

from ._grouped import FORMS, grouped


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
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

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
