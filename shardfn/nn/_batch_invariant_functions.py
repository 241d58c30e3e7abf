"""Batch-invariant activations and norms: rows have the same bits next to any other rows. With derivatives.

The derivatives are closed forms in torch's operations, differentiable again. See `_batch_invariant.py` for the law.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from shardfn import kernels

from ._batch_invariant import AnyWeight, BatchInvariantWeight, wrong_dtype_error


def gelu(x_F: Tensor, w: AnyWeight) -> Tensor:
    """Returns GELU in the form with tanh, by `batch_invariant_gelu` after a layer with a batch-invariant weight."""
    if isinstance(w, BatchInvariantWeight):
        return batch_invariant_gelu(x_F)
    return F.gelu(x_F, approximate="tanh")


def gated_silu(gate_F: Tensor, up_F: Tensor, w: AnyWeight) -> Tensor:
    """Returns silu(gate) * up, by `batch_invariant_gated_silu` after a layer with a batch-invariant weight."""
    if isinstance(w, BatchInvariantWeight):
        return batch_invariant_gated_silu(gate_F, up_F)
    return F.silu(gate_F) * up_F


def batch_invariant_gelu(x_F: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns GELU in the form with tanh, by `kernels.gelu`: each element by the same expression.

    Args:
        x_F: float32 or float64.

    Example:
        >>> batch_invariant_gelu(torch.zeros(2)).tolist()
        [0.0, 0.0]
    """
    return pointwise(kernels.gelu, _gelu_partials, x_F)


def batch_invariant_gated_silu(
    gate_F: Float[Tensor, "*shape"], up_F: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Returns silu(gate) * up, by `kernels.gated_silu`: each element by the same expression.

    Args:
        gate_F: float32 or float64.
        up_F: weights as `gate_F`.

    Example:
        >>> batch_invariant_gated_silu(torch.zeros(2), torch.ones(2)).tolist()
        [0.0, 0.0]
    """
    return pointwise(kernels.gated_silu, partials_of_gated_silu, gate_F, up_F)


def pointwise(run: Callable[..., Tensor], partials: Callable[..., Any], *xs: Tensor) -> Tensor:
    """Returns an elementwise function of tensors of equal shape, with derivatives from the partial derivatives."""
    return _Pointwise.apply(run, partials, *xs)  # pyright: ignore[reportReturnType]


def batch_invariant_layer_norm(
    x_D: Float[Tensor, "*batch d"],
    w_D: Float[Tensor, " d"],
    b_D: Float[Tensor, " d"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Tensor, "*batch d"]:
    """Applies a batch-invariant `layer_norm`: rows have the same bits next to any other rows, by `kernels.row_norm`.

    Args:
        x_D: float32 or float64, any leading dims.
        w_D: scale, in the dtype of x.
        b_D: shift in the dtype of the scale, or None.
        eps: added to the variance.

    Raises:
        TypeError: for other dtypes.

    Example:
        >>> batch_invariant_layer_norm(torch.tensor([-1.0, 1.0]), torch.ones(2), eps=0.0).tolist()
        [-1.0, 1.0]
    """
    return _apply_norm(x_D, w_D, b_D, eps, True)


def batch_invariant_rms_norm(
    x_D: Float[Tensor, "*batch d"], w_D: Float[Tensor, " d"], *, eps: float = 1e-5
) -> Float[Tensor, "*batch d"]:
    """Applies a batch-invariant `rms_norm`: rows have the same bits next to any other rows, by `kernels.row_norm`.

    Args:
        x_D: float32 or float64, any leading dims.
        w_D: scale, in the dtype of x.
        eps: added to the mean square.

    Raises:
        TypeError: for other dtypes.

    Example:
        >>> batch_invariant_rms_norm(torch.tensor([2.0, -2.0]), torch.ones(2), eps=0.0).tolist()
        [1.0, -1.0]
    """
    return _apply_norm(x_D, w_D, None, eps, False)


def _apply_norm(x: Tensor, w: Tensor, b: Tensor | None, eps: float, centered: bool) -> Tensor:
    if has_torch_function((x, w, b)):  # a lazy leaf
        return handle_torch_function(_apply_norm, (x, w, b), x, w, b, eps, centered)
    dtypes = dict.fromkeys(t.dtype for t in (x, w, b) if t is not None)
    if len(dtypes) > 1 or x.dtype not in kernels.EXACT:
        raise wrong_dtype_error(f"a batch-invariant norm of {', '.join(map(str, dtypes))}:")
    return _Norm.apply(x, w, b, eps, centered)  # pyright: ignore[reportReturnType]


class _Pointwise(torch.autograd.Function):
    """Maps (an elementwise function of tensors of equal shape, the partial derivatives, the tensors) to the value."""

    generate_vmap_rule = True

    @staticmethod
    def forward(run: Callable[..., Tensor], partials: Callable[..., Any], *xs: Tensor) -> Tensor:
        del partials
        return run(*xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        _, ctx.partials, *xs = inputs
        ctx.save_for_backward(*xs)
        ctx.save_for_forward(*xs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return None, None, *(grad_outputs[0] * partial for partial in ctx.partials(*ctx.saved_tensors))

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        pairs = zip(grad_inputs[2:], ctx.partials(*ctx.saved_tensors), strict=True)
        return functools.reduce(torch.add, [t * partial for t, partial in pairs if t is not None])


def partials_of_gated_silu(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the derivatives of silu(gate) * up with regard to gate and to up.

    Example:
        >>> partials_of_gated_silu(torch.zeros(1), torch.ones(1))
        (tensor([0.5000]), tensor([0.]))
    """
    s = gate.sigmoid()
    return up * s * (1 + gate * (1 - s)), gate * s


_C = 2 * math.sqrt(2 / math.pi)


def _gelu_partials(x: Tensor) -> tuple[Tensor]:
    square = x * x
    s = (_C * x * (1 + 0.044715 * square)).sigmoid()
    # 1 - s is 0 before the factor overflows.
    return (s + x * s * (1 - s) * (_C * (1 + 3 * 0.044715 * square)),)


class _Norm(torch.autograd.Function):
    """Maps (x, w, b, eps, centered) to y = n w + b, n = (x - m) r, r = 1 / sqrt(mean((x - m)^2) + eps).

    backward  dx = r (g - [mean(g)] - n mean(g n)), g = dy w;  dw = sum of dy n;  db = sum of dy
    jvp       dy = r (t - [mean(t)] - n mean(t n)) w + n dw + db
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None, eps: float, centered: bool) -> Tensor:
        return kernels.row_norm(x, w, b, eps=eps, centered=centered)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        x, w, b, ctx.eps, ctx.centered = inputs
        ctx.biased = b is not None
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (dy,), (x, w) = grad_outputs, ctx.saved_tensors
        n, r = _normalize_rows(ctx, x)
        dx = _project_direction(ctx, dy * w, n, r) if ctx.needs_input_grad[0] else None
        return dx, (dy * n).sum_to_size(w.shape), dy.sum_to_size(w.shape) if ctx.biased else None, None, None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        (x, w), (tx, tw, tb, *_) = ctx.saved_tensors, grad_inputs
        n, r = _normalize_rows(ctx, x)
        parts = [] if tx is None else [_project_direction(ctx, tx, n, r) * w]
        parts += [] if tw is None else [n * tw]
        parts += [] if tb is None else [tb.expand_as(x)]
        return functools.reduce(torch.add, parts)


def _normalize_rows(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x - x.mean(-1, keepdim=True) if ctx.centered else x
    r = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
    return x * r, r


def _project_direction(ctx: Any, g: Tensor, n: Tensor, r: Tensor) -> Tensor:
    """Returns the derivative of n in the direction g, a symmetric map."""
    inner = g - n * (g * n).mean(-1, keepdim=True)
    return r * (inner - g.mean(-1, keepdim=True) if ctx.centered else inner)
