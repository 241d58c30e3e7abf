"""Tensors without data, and operations of the engine that are not a part of the transformed function.

A captured graph relies on shapes, dtypes and strides. For example, a `view` of a result runs only if the result has the
strides that the capture saw. So `Fakes` gives the kernels' layouts for the operations whose fake results in torch
differ. The op table (`shardfn/graph/_ops.py`) lists the operations.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import FakeTensorMode
from shardfn.core import Ambient, frozen, is_frozen
from shardfn.graph import find_op

# By thread: another thread may run the function's operations at the same time.
_PLUMBING = Ambient[None]("the engine is at work", by_thread=True)


def plumbing() -> AbstractContextManager[None]:
    """Marks the operations inside as the engine's, such as transfers of a leaf. Such operations differ from run to run.

    Example:
        >>> with plumbing():
        ...     in_plumbing()
        True
        >>> in_plumbing()
        False
    """
    return _PLUMBING.bound(None)


def in_plumbing() -> bool:
    """Returns whether the engine is at work."""
    return bool(_PLUMBING)


class Fakes(FakeTensorMode):
    """Mode of tensors without data in a capture, corrected ahead of torch's cache of answers."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the results of an operation."""
        kwargs = kwargs or {}
        op, overload = find_op(func), getattr(func, "_overloadname", "")
        if overload in op.abstract:
            with self:
                # In this mode again: intermediate tensors have no data either.
                return op.abstract[overload](*args, **kwargs)
        out: Any = super().dispatch(func, types, args, kwargs)
        if overload not in op.strides:
            return out
        lay_out = op.strides[overload]
        with self:
            if isinstance(out, Tensor):
                return lay_out(out, args)
            return tuple(lay_out(x, args) if x is not None and x.ndim > 1 else x for x in out)


def fakes(inputs: Sequence[Any], device: torch.device | str = "meta") -> list[Tensor]:
    """Returns tensors without data, with the shapes, dtypes and strides of `inputs`. Device "meta" becomes `device`."""
    with Fakes(allow_non_fake_inputs=True):
        return [fake(x, device) for x in inputs]


def fake(x: Any, device: torch.device | str) -> Tensor:
    """Returns a tensor as `fakes` does, in the active mode."""
    where = device if x.device.type == "meta" else x.device
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=where)
    return frozen(out) if is_frozen(x) else out
