"""Parts of a module of torch: names without the prefix of `torch.compile`, and the mark of a frozen leaf."""

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


_WRAPPED = "_orig_mod"  # the attribute by which a compiled module holds the original


def uncompiled(module: nn.Module) -> nn.Module:
    """Returns the original of a module in `torch.compile` or `DistributedDataParallel`, in any order.

    Other modules are returned unchanged.

    Example:
        >>> import torch
        >>> linear = nn.Linear(2, 1)
        >>> uncompiled(torch.compile(linear, backend="eager")) is linear is uncompiled(linear)
        True
    """
    while (inner := _inner_module(module)) is not None:
        module = inner
    return module


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a module is a result of `torch.compile`."""
    return _WRAPPED in module._modules


def _inner_module(module: nn.Module) -> nn.Module | None:
    parallel = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
    return module.module if parallel else module._modules.get(_WRAPPED)


def named_modules(module: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, nn.Module]]:
    """Returns `module.named_modules()`, with originals in the places of compiled modules.

    Example:
        >>> import torch
        >>> [path for path, _ in named_modules(nn.Sequential(torch.compile(nn.Tanh(), backend="eager")))]
        ['', '0']
    """
    named = module.named_modules(remove_duplicate=remove_duplicate)
    return [(_plain_name(path), sub) for path, sub in named if _WRAPPED not in sub._modules]


def named_parameters(module: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, Tensor]]:
    """Returns `module.named_parameters()`, under the names without `torch.compile`.

    Example:
        >>> import torch
        >>> [name for name, _ in named_parameters(nn.Sequential(torch.compile(nn.Linear(2, 1), backend="eager")))]
        ['0.weight', '0.bias']
    """
    return [(_plain_name(name), p) for name, p in module.named_parameters(remove_duplicate=remove_duplicate)]


def named_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns `module.named_buffers()`, under the names without `torch.compile`.

    Example:
        >>> import torch
        >>> named_buffers(torch.compile(nn.BatchNorm1d(1), backend="eager"))[0]
        ('running_mean', tensor([0.]))
    """
    return [(_plain_name(name), x) for name, x in module.named_buffers()]


def state_names(module: nn.Module) -> list[str]:
    """Returns the keys of `module.state_dict()`, without the prefixes of `torch.compile`.

    Example:
        >>> import torch
        >>> state_names(torch.compile(nn.Linear(2, 1), backend="eager"))
        ['weight', 'bias']
    """
    return [_plain_name(name) for name in module.state_dict()]


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _WRAPPED)
