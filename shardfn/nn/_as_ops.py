"""Functions with a backward of their own as ops of torch, where a graph of a forward is differentiated when it runs.

Such a graph has the ops of a function's forward and not its backward. An op of torch brings its derivative along.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardfn.core import Ambient

_AS_OPS = Ambient[bool]("functions as ops of torch")
_WITH_GRAD = Ambient[bool]("an op of torch that is differentiated")


def as_ops() -> AbstractContextManager[Any]:
    """While a forward is captured that is differentiated when its graph runs: functions of `nn.moe` are ops then.

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
    """Returns whether gradients are enabled where this op was called.

    Inside of an op with a derivative torch disables them.

    Example:
        >>> is_differentiated()
        True
    """
    return torch.is_grad_enabled() or _WITH_GRAD.innermost() is not None
