"""Functions with a custom backward as ops of torch, where a graph of a forward is differentiated at the run.

Such a graph has the ops of a function's forward and not the function's backward. An op of torch brings the derivative
along.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardfn.core import Ambient

_AS_OPS = Ambient[bool]("functions as ops of torch")
_WITH_GRAD = Ambient[bool]("an op of torch that is differentiated")


def as_ops() -> AbstractContextManager[Any]:
    """Returns a context for captures of a forward that is differentiated when the graph runs.

    Functions of `nn.moe` are ops.

    Example:
        >>> from shardfn.nn import moe
        >>> places, _ = moe.permutation(torch.tensor([[1], [0]]), 2)
        >>> with as_ops():
        ...     rows = moe.dispatch(torch.ones(2, 3, requires_grad=True), places)
        >>> type(rows.grad_fn).__name__
        'GeneratedBackwardFor_shardfn_kernels_copied_rows_defaultBackward'
    """
    return _AS_OPS.bound(True)


def runs_as_ops() -> bool:
    """Returns whether functions are to be ops of torch."""
    return _AS_OPS.innermost() is not None


def run_op(op: Any, *args: Any) -> Tensor:
    """Calls an op with a derivative."""
    if not torch.is_grad_enabled():
        return op(*args)
    with _WITH_GRAD.bound(True):
        return op(*args)


def is_differentiated() -> bool:
    """Returns whether gradients are enabled at the call of the op.

    Inside of an op with a derivative torch disables them.

    Example:
        >>> is_differentiated()
        True
    """
    return torch.is_grad_enabled() or _WITH_GRAD.innermost() is not None
