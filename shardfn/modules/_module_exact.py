"""The rows of a module in training, with the bits of a batch-invariant decoder: `ExactRows` with derivatives.

Linear layers of parameters and the functions of a small table are computed as in an engine of `hf_decoder`. So a
training forward has the log probabilities of the engine, bit for bit, where the decoder is batch-invariant.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn import nn

from ._module_rows import RowByRow, handlers_of, linear_operands


class BatchInvariantForward(RowByRow):
    """Computes linear layers and some other functions row by row, in float32.

    Args:
        params: parameters in the module. Products with other tensors are torch's, as in `ExactRows`.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._params = {id(p) for p in params.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function, or the batch-invariant form."""
        del types
        kwargs = kwargs or {}
        found = linear_operands(func, args, kwargs)
        if found is not None and id(found[1]) in self._params:
            x, weight, bias = found
            assert weight is not None
            if x.dtype == torch.float64:
                raise TypeError(
                    f"from_module(batch_invariant=True): x is {x.dtype}, and batch-invariant rows are those of an"
                    " engine in float32; take parameters in float32, or Policy(compute=torch.float32)."
                )
            return nn.linear(x, nn.BatchInvariantWeight.of(weight if func is F.linear else weight.T), bias)
        handler = _HANDLERS.get(func)
        return func(*args, **kwargs) if handler is None else handler(func, *args, **kwargs)


def _apply_silu(x: Tensor) -> Tensor:
    return nn.batch_invariant_gated_silu(x, torch.ones_like(x))


def _apply_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    if centered:
        return nn.batch_invariant_layer_norm(x, weight, bias, eps=eps)
    return nn.batch_invariant_rms_norm(x, weight, eps=eps)


_HANDLERS = handlers_of(_apply_silu, nn.batch_invariant_gelu, _apply_norm)
