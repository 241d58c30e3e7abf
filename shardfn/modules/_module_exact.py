"""The rows of a module in training, with the bits of an exact decoder: `ExactRows` with derivatives.

Linear layers of parameters and the functions of a small table are computed as an engine of `hf_decoder` does. So a
training forward has the log probabilities of the engine, bit for bit, where the decoder is exact.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardfn import nn

from ._module_rows import HANDLERS, linear_operands


class ExactForward(TorchFunctionMode):
    """Computes linear layers and some other functions row by row, in float32.

    Args:
        params: as the module has them. Products with other tensors are torch's, as in `ExactRows`.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._params = {id(p) for p in params.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function, or its exact form."""
        del types
        kwargs = kwargs or {}
        found = linear_operands(func, args, kwargs)
        if found is not None and id(found[1]) in self._params:
            x, weight, bias = found
            assert weight is not None
            return nn.linear(x, nn.ExactWeight.of(weight if func is F.linear else weight.T), bias)
        handler = _HANDLERS.get(func)
        return func(*args, **kwargs) if handler is None else handler(func, *args, **kwargs)


def _silu(func: Any, input: Tensor, inplace: bool = False) -> Tensor:
    del func
    y = nn.exact_gated_silu(input, torch.ones_like(input))
    return input.copy_(y) if inplace else y


def _gelu(func: Any, input: Tensor, approximate: str = "none") -> Tensor:
    del func
    return nn.exact_gelu(input) if approximate == "tanh" else input * 0.5 * (1 + torch.erf(input * math.sqrt(0.5)))


def _layer_norm(
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if len(normalized_shape) != 1:
        return func(input, normalized_shape, weight, bias, eps)
    return nn.exact_layer_norm(input, _scale(input, weight), bias, eps=eps)


def _rms_norm(
    func: Any, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if len(normalized_shape) != 1:
        return func(input, normalized_shape, weight, eps)
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return nn.exact_rms_norm(input, _scale(input, weight), eps=eps)


def _scale(input: Tensor, weight: Tensor | None) -> Tensor:
    return input.new_ones(input.shape[-1]) if weight is None else weight


_HANDLERS: dict[Any, Any] = {
    **HANDLERS,
    F.silu: _silu,
    F.gelu: _gelu,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
}
