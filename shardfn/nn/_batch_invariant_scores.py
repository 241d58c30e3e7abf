"""Batch-invariant scores of routers: rows have the same bits next to any other rows.

Torch's sums, exponentials and sigmoids depend on the width of a processor's vectors, some on the number of rows. Here
e^x and the sigmoid are made of `kernels.gated_silu`, with a fixed expression, and sums are added by halving.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from shardfn import kernels

from ._batch_invariant import wrong_dtype_error
from ._batch_invariant_functions import pointwise

_LEAST = -87.0  # below the bound e^x is 0, without subnormal numbers
_NEAR = 2.0**-60  # nearer to 0 the sigmoid is 1/2, and x no divisor


def batch_invariant_softmax(x_E: Float[Tensor, "*batch e"]) -> Float[Tensor, "*batch e"]:
    """Returns the softmax over the last dim. Rows have the same bits next to any other rows.

    Args:
        x_E: finite scores in float32 or float64, where e is 1 or more.

    Raises:
        TypeError: for other dtypes.

    Example:
        >>> batch_invariant_softmax(torch.tensor([1.0, 1.0])).tolist()
        [0.5, 0.5]
    """
    _check_dtype(x_E)
    return _Softmax.apply(x_E)  # pyright: ignore[reportReturnType]


def batch_invariant_sigmoid(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the sigmoid of each element, by the same expression.

    Args:
        x: float32 or float64, finite.

    Raises:
        TypeError: for other dtypes.

    Example:
        >>> batch_invariant_sigmoid(torch.tensor([0.0, -200.0])).tolist()
        [0.5, 0.0]
    """
    _check_dtype(x)
    return pointwise(_compute_sigmoid, _sigmoid_partials, x)


def batch_invariant_sum(x_E: Float[Tensor, "*batch e"]) -> Float[Tensor, "*batch 1"]:
    """Sums over the last dim by halving: the first half of the elements plus the second, until a single sum is left.

    Example:
        >>> batch_invariant_sum(torch.tensor([1.0, 2.0, 3.0]))
        tensor([6.])
    """
    width = 1 << (x_E.shape[-1] - 1).bit_length()
    x_E = F.pad(x_E, (0, width - x_E.shape[-1]))
    while width > 1:
        width //= 2
        x_E = x_E[..., :width] + x_E[..., width:]
    return x_E


def _check_dtype(x: Tensor) -> None:
    if x.dtype not in kernels.EXACT:
        raise wrong_dtype_error(f"batch-invariant scores of {x.dtype}:")


def _compute_sigmoid(x: Tensor) -> Tensor:
    near = x.abs() < _NEAR
    divisor = torch.where(near, 1.0, x)
    return torch.where(near, 0.5, kernels.gated_silu(divisor, torch.ones_like(divisor)) / divisor)


def _sigmoid_partials(x: Tensor) -> tuple[Tensor]:
    s = x.sigmoid()
    return (s * (1 - s),)


def _compute_exponential(x: Tensor) -> Tensor:
    """Returns e^x of x <= 0, as s / (1 - s) with the sigmoid s of x, at most 1/2."""
    s = _compute_sigmoid(x.clamp(min=_LEAST))
    return torch.where(x < _LEAST, 0.0, s / (1 - s))


class _Softmax(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        weights = _compute_exponential(x - x.amax(-1, keepdim=True))
        return weights / batch_invariant_sum(weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return _project_direction(x, grad_outputs[0])

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return _project_direction(x, grad_inputs[0])


def _project_direction(x: Tensor, g: Tensor) -> Tensor:
    """Returns the derivative in the direction g, a symmetric map."""
    p = x.softmax(-1)
    return p * (g - (g * p).sum(-1, keepdim=True))
