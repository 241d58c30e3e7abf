"""Placeholders for values on another rank: shape and dtype without data.

A stage of a pipeline runs the module's own forward, where values computed by other stages are absent. Functions of
absent values give absent results, with the shapes inferred by torch on the meta device, and cost no arithmetic and no
gather.
"""

from typing import Any

import torch
from torch import Tensor

from shardfn._torch import DisableTorchFunctionSubclass, disable_current_modes, pytree
from shardfn.core import MetadataTensor

from ._module_buffers import writes

# Other functions that need no value.
_ANSWERED = frozenset({"requires_grad_", "__format__"})


class NeedsValue(BaseException):
    """Raised where the running code needs an absent value. Not an `Exception`, so no forward catches the error."""


class AbsentTensor(MetadataTensor):
    """Tensor without data, on the device of the absent value.

    Raises:
        NeedsValue: the value is needed, or written to a tensor with data.
    """

    _meta: Tensor

    @staticmethod
    def of(x: Tensor) -> "AbsentTensor":
        """Returns an absent tensor with the shape and dtype of a tensor."""
        return _wrap_meta(_make_meta(x), x.device)

    @classmethod
    def on_values(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function on tensors without data."""
        name = getattr(func, "__name__", "")
        if name in _ANSWERED or (name == "__get__" and func not in _VIEWS):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        written = (args[:1] if writes(name) else (), kwargs.get("out"))
        if any(isinstance(x, Tensor) and type(x) is not AbsentTensor for x in pytree.tree_leaves(written)):
            raise NeedsValue(f"{name} writes it to a tensor")
        device = next(x.device for x in pytree.tree_leaves((args, kwargs)) if type(x) is AbsentTensor)
        try:
            # A capture must not record the operations: the graph would run on tensors of the meta device.
            with DisableTorchFunctionSubclass(), disable_current_modes(), torch.no_grad():
                on_meta = pytree.tree_map(_convert_arg, (args, {k: v for k, v in kwargs.items() if k != "device"}))
                out = func(*on_meta[0], **on_meta[1])
        except (RuntimeError, NotImplementedError) as error:  # torch's errors for meta tensors without values
            raise NeedsValue(f"{name}: {error}") from error
        if writes(name):
            return args[0]
        return pytree.tree_map_only(Tensor, lambda x: _wrap_meta(x, device), out)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses calls from outside of `__torch_function__`."""
        del types, args, kwargs
        raise NeedsValue(f"{func} takes it by another way than a function of torch")


def is_absent(x: Any) -> bool:
    """Returns whether anything in a tree is absent."""
    for leaf in pytree.tree_leaves(x):
        if type(leaf) is AbsentTensor:
            return True
    return False


_VIEWS: Any = frozenset(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag"))


def _wrap_meta(meta: Tensor, device: torch.device) -> AbsentTensor:
    made = AbsentTensor.empty(meta.shape, meta.dtype, device, meta.stride(), meta.storage_offset())
    made._meta = meta
    return made


def _convert_arg(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x._meta if type(x) is AbsentTensor else _make_meta(x)
    return torch.device("meta") if isinstance(x, torch.device) else x


def _make_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
