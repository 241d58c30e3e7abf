"""Modules compiled by `torch.compile`, run uncompiled: compiled code is bound to the module's tensors."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardfn.core import is_compiled, uncompiled

_COMPILED = "_compiled_call_impl"  # the attribute that `module.compile()` sets, called in place of the module


def original(module: nn.Module) -> nn.Module:
    """Returns the module before `torch.compile`, and warns where a part is compiled.

    Args:
        module: any module.
    """
    paths = [path for path, _ in _compiled_modules(module)]
    if paths:
        shown = ", ".join(path or "the module" for path in paths[:3]) + (" and others" if len(paths) > 3 else "")
        warnings.warn(
            f"from_module runs {shown} without torch.compile, as a step gives the module other tensors; compile the"
            ' whole step instead: sf.jit(loss, backend="inductor").',
            UserWarning,
            stacklevel=3,
        )
    return uncompiled(module)


@contextlib.contextmanager
def running_as_written(module: nn.Module) -> Iterator[None]:
    """Lets a module and all submodules run without `torch.compile`.

    Args:
        module: module, with the compiled parts back afterwards.
    """
    shadows = []
    for _, sub in _compiled_modules(module):
        inner = uncompiled(sub)
        shadows.append((sub, "forward", inner.__call__) if inner is not sub else (sub, _COMPILED, None))
    before = [(sub, name, sub.__dict__[name]) for sub, name, _ in shadows]
    try:
        _put_values(shadows)
        yield
    finally:
        _put_values(before)


def _compiled_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (path, sub)
        for path, sub in module.named_modules()
        if is_compiled(sub) or sub.__dict__.get(_COMPILED) is not None
    ]


def _put_values(values: list[tuple[nn.Module, str, Any]]) -> None:
    for sub, name, value in values:
        sub.__dict__[name] = value
