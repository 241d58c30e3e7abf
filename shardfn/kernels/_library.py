"""The room's torch ops: every kernel is one node of a captured graph."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardfn._torch import AutogradInfo, OpOverload, make_autograd_impl

LIBRARY = torch.library.Library("shardfn_kernels", "DEF")


_SCRATCH: dict[str, Callable[..., int]] = {}


def define(
    schema: str, impl: Callable[..., Any], fake: Callable[..., Any], *, scratch: Callable[..., int] | None = None
) -> None:
    """Registers `torch.ops.shardfn_kernels.<name>`, from a schema, a function, and one that gives the result's shapes.

    `scratch(*args)` returns the bytes that it allocates on a CPU and frees before it returns; None if these are few.
    """
    name = schema.partition("(")[0]
    if scratch is not None:
        _SCRATCH[f"shardfn_kernels::{name}"] = scratch
    LIBRARY.define(schema)
    LIBRARY.impl(name, impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardfn_kernels::{name}", fake, lib=LIBRARY)


def refuse_backward(name: str, remedy: str) -> None:
    """Makes a backward through an op an error. Without it torch warns, and leaves the gradients out."""

    def refuse(context: Any, *cotangents: Any) -> Any:
        del context, cotangents
        raise NotImplementedError(f"kernels.{name} has no derivative; {remedy}")

    op = getattr(torch.ops.shardfn_kernels, name).default
    if op._schema.is_mutable:  # to register a derivative of such an op is an error in torch, even this one
        LIBRARY.impl(name, make_autograd_impl(op, AutogradInfo(refuse, None)), "Autograd", with_keyset=True)
    else:
        torch.library.register_autograd(f"shardfn_kernels::{name}", refuse, lib=LIBRARY)


def scratch_bytes(op: Any, args: Sequence[Any]) -> int:
    """The bytes that an op of this room allocates on a CPU while it runs, and frees again; 0 for other ops.

    Args:
        op: of torch.
        args: tensors, whose shapes and dtypes alone are read, and numbers.

    Example:
        >>> scratch_bytes(torch.ops.aten.add.Tensor, (torch.ones(2), torch.ones(2)))
        0
    """
    found = _SCRATCH.get(op._schema.name) if isinstance(op, OpOverload) else None
    return 0 if found is None else found(*args)
