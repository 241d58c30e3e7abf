"""Products of layers with rounded operands: training in 8 bits, and quantization-aware training.

    y  = Q(x) Q(w)^T            blocks of 32 neighbours along the inputs of the layer
    dx = Q(dy) Q'(w)            blocks of 32 neighbours along the outputs of the layer
    dw = dy^T x                 not rounded, as its sum goes over tokens

Rounding has the derivative 1 (straight-through). Values are rounded and multiplied in the dtype of the operands, which
is the definition of what hardware with scales of blocks computes, but is not faster.

References:
    Wortsman et al., Stable and Low-Precision Training (SwitchBack), 2023, https://arxiv.org/abs/2304.13013
    Rouhani et al., Microscaling Data Formats, 2023, https://arxiv.org/abs/2310.10537
    Jacob et al., Quantization-Aware Training, 2017, https://arxiv.org/abs/1712.05877
"""

import contextlib
import functools
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from shardfn.core import Again, Ambient, Rounding, RoundingPolicy, rebind_ambient, rebind_in_checkpoints
from shardfn.kernels import GROUP, Quantization, dequantize_blocks, quantize_blocks

from ._products import Product

_ROUNDING = Ambient[RoundingPolicy]("rounding of the operands of layers", by_thread=True)
_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max  # 448
# The exponent of the largest power of two of e4m3.
_TOP = 8


def rounding_products(policy: RoundingPolicy | None) -> AbstractContextManager[object]:
    """Rounds the operands of attention's projections and of MLPs while a loss runs.

    Routers, experts, heads and layers of modules are not rounded.

    Args:
        policy: rounding of each operand. None rounds nothing, also inside another rounding.

    Example:
        >>> from shardfn.nn import column_linear
        >>> x, w = torch.full((1, 32), 0.3), torch.ones(2, 32)
        >>> with rounding_products(RoundingPolicy(inputs="mxfp8")):
        ...     column_linear(x, w)[0, 0].item()
        10.0
    """
    if policy is None:
        return _ROUNDING.hidden() if _ROUNDING else contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(_ROUNDING.bound(policy))
    stack.enter_context(rebind_in_checkpoints())
    return stack


@rebind_ambient
def _repeat_rounding() -> list[Again]:
    return [functools.partial(rounding_products, policy) for policy in _ROUNDING.all[-1:]]


def is_rounding() -> bool:
    """Returns whether operands are rounded in the loss that runs."""
    return bool(_ROUNDING)


def round_operand(x: Float[Tensor, "*batch k"], rounding: Rounding) -> Float[Tensor, "*batch k"]:
    """Returns rounded values. Each block of 32 neighbours along the last dim has a separate scale.

    Args:
        x: values. k is a multiple of 32.
        rounding: "int8": multiples of max|x| / 127. "fp8": the format e4m3, scaled so that the largest value is 448.
            "mxfp8": e4m3 with a power of two as scale. "int4": 16 values from the smallest to the largest of a block.

    Raises:
        ValueError: another rounding, or another k.

    Example:
        >>> round_operand(torch.tensor([127.0, 0.4, 0.6] + [0.0] * 29), "int8")[:3]
        tensor([127.,   0.,   1.])
    """
    _check_size("the last dim", x.shape[-1])
    if rounding == "int4":
        return _decode_served(x, rounding)
    blocks = x.unflatten(-1, (-1, GROUP))
    largest = blocks.abs().amax(-1, keepdim=True)
    if rounding == "int8":
        scale = _avoid_zero(largest / 127)
        return ((blocks / scale).round().clamp(-127, 127) * scale).flatten(-2)
    if rounding not in ("fp8", "mxfp8"):
        raise ValueError(f"rounding must be 'int8', 'int4', 'fp8' or 'mxfp8', got {rounding!r}.")
    if rounding == "mxfp8":
        exponent = torch.frexp(_avoid_zero(largest)).exponent - 1 - _TOP
        scale = torch.ldexp(torch.ones_like(largest), exponent)
    else:
        scale = _avoid_zero(largest / _LARGEST)
    values = (blocks / scale).clamp(-_LARGEST, _LARGEST)
    return (values.to(torch.float32).to(_FP8).to(x.dtype) * scale).flatten(-2)


def multiply_rounded(x: Tensor, w: Tensor) -> Tensor:
    """Returns `x w^T` by the rounding of the loss that runs, which `is_rounding` has found.

    Raises:
        ValueError: inputs, or with rounded gradients outputs, are not a multiple of 32.
    """
    policy = _ROUNDING.innermost()
    assert policy is not None
    _check_size("the inputs of a layer on each rank", w.shape[1])
    if policy.grads is not None:
        _check_size("the outputs of a layer on each rank", w.shape[0])
    return _make_product(policy)(x, w)


def _check_size(what: str, size: int) -> None:
    if size % GROUP:
        raise ValueError(f"rounded operands: {what} must be a multiple of {GROUP}, the size of a block, got {size}.")


@functools.cache
def _make_product(policy: RoundingPolicy) -> Product:
    """Returns the product of an input and a weight [F, D]."""

    def multiply(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(_round(x, policy.inputs), _round_weight(w, policy.weights))

    def compute_input_gradient(dy: Tensor, w: Tensor, shape: torch.Size) -> Tensor:
        if policy.grads is None or policy.weights == "int4":
            return F.linear(_round(dy, policy.grads), _round_weight(w, policy.weights).t()).view(shape)
        return F.linear(_round(dy, policy.grads), _round(w.t(), policy.weights)).view(shape)

    def compute_weight_gradient(dy: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        return (dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])).view(shape)

    return Product(multiply, (compute_input_gradient, compute_weight_gradient))


def _round(x: Tensor, rounding: Rounding | None) -> Tensor:
    return x if rounding is None else round_operand(x, rounding)


def _round_weight(w: Tensor, rounding: Rounding | None) -> Tensor:
    return _decode_served(w, "int8") if rounding == "int8" else _round(w, rounding)


def _decode_served(w: Tensor, quantization: Quantization) -> Tensor:
    """Returns the values of the codes that an engine serves."""
    k = w.shape[-1]
    return dequantize_blocks(quantize_blocks(w.reshape(-1, k), quantization), k, w.dtype).view(w.shape)


def _avoid_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)
