"""Taking layers from a stack that travels layer by layer: one, all, or a slice of them."""

import numbers
from typing import Any

import torch
from torch import Tensor

_TENSOR: Any = torch.Tensor
_NARROWING = _TENSOR.narrow, torch.narrow
TAKING: Any = {
    *(_TENSOR.__getitem__, _TENSOR.__iter__, _TENSOR.unbind, torch.unbind, _TENSOR.select, torch.select),
    *_NARROWING,
}


def select_layers(func: Any, layers: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Any:
    """Returns the layers that `func` takes from a stack, without opening it.

    Several as a slice. None for other operations.
    """
    if func is _TENSOR.__getitem__:
        first, *rest = args[0] if type(args[0]) is tuple and args[0] else (args[0],)
        if isinstance(first, slice) and not rest and first.step in (None, 1):
            return first if all(isinstance(x, int | None) for x in (first.start, first.stop)) else None
        if not isinstance(first, numbers.Integral) or isinstance(first, bool):
            return None
        layer = layers[int(first)]
        return layer[tuple(rest)] if rest else layer
    if func is _TENSOR.__iter__:
        return iter(layers)
    dim = args[0] if args else kwargs.get("dim", 0)
    if dim != 0:
        return None
    if func in _NARROWING:
        return _narrow_layers(len(layers), **dict(zip(("dim", "start", "length"), args, strict=False)), **kwargs)
    if func in (_TENSOR.unbind, torch.unbind):
        return layers
    return layers[args[1] if len(args) > 1 else kwargs["index"]]


def _narrow_layers(num: int, *, dim: int, start: Any, length: Any) -> slice | None:
    """Returns the layers of a `narrow` along dim 0, or None if torch is to refuse it."""
    del dim
    if not isinstance(start, int) or not isinstance(length, int):
        return None
    start += num if start < 0 else 0
    return slice(start, start + length) if 0 <= start and 0 <= length and start + length <= num else None
