"""The mark of a leaf that steps do not train: `requires_grad=False` of a parameter, kept by copies."""

from typing import Any

import torch
from torch import Tensor, nn

from shardfn._torch import DisableTorchFunctionSubclass


class FrozenParameter(nn.Parameter):
    """Parameter without gradient. Copies and conversions are frozen, too. Other results are plain tensors."""

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Frozen parameter containing:\n{self.as_subclass(Tensor)!r}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        with DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return frozen(out) if func in COPIES and type(out) is Tensor and not out.requires_grad else out


COPIES = frozenset(
    [torch.clone, torch.detach]
    + [getattr(Tensor, name) for name in ("clone", "detach", "contiguous", "to", "type", "cpu", "cuda", "pin_memory")]
    + [getattr(Tensor, name) for name in ("float", "double", "half", "bfloat16")]
)


def frozen(x: Tensor) -> Tensor:
    """Returns the tensor, sharing memory, marked as not trained unless `trainable=` includes the leaf.

    Example:
        >>> is_frozen(frozen(torch.ones(2))), is_frozen(frozen(torch.ones(2)).clone()), is_frozen(torch.ones(2))
        (True, True, False)
    """
    if type(x) in (Tensor, nn.Parameter):
        return FrozenParameter(x.detach(), requires_grad=False)
    # torch counts a tensor of another class as a parameter by the attribute.
    x._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
    return x


def is_frozen(x: Any) -> bool:
    """Returns whether a leaf is a parameter without gradient, or began as such a parameter.

    Example:
        >>> is_frozen(nn.Parameter(torch.ones(2), requires_grad=False)), is_frozen(nn.Parameter(torch.ones(2)))
        (True, False)
    """
    if isinstance(x, Tensor):
        return isinstance(x, nn.Parameter) and not x.requires_grad
    return getattr(x, "frozen", False)
