"""The room's torch ops: every kernel is a single node of a captured graph."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardfn._torch import AutogradInfo, OpOverload, make_autograd_impl

LIBRARY = torch.library.Library("shardfn_kernels", "DEF")


_SCRATCH: dict[str, Callable[..., int]] = {}
_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}


def define(
    schema: str, impl: Callable[..., Any], fake: Callable[..., Any], *, scratch: Callable[..., int] | None = None
) -> None:
    """Registers `torch.ops.shardfn_kernels.<name>`, from a schema, a function, and a function for the result's shapes.

    `scratch(*args)` returns the bytes that the function allocates on a CPU and frees before the return, or None if the
    bytes are few.
    """
    name = schema.partition("(")[0]
    if scratch is not None:
        _SCRATCH[f"shardfn_kernels::{name}"] = scratch
    _IMPLEMENTATIONS[f"shardfn_kernels::{name}"] = impl
    LIBRARY.define(schema)
    LIBRARY.impl(name, impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardfn_kernels::{name}", fake, lib=LIBRARY)


def refuse_backward(name: str, remedy: str) -> None:
    """Makes a backward through an op an error. Otherwise torch would warn, and leave the gradients out."""

    def raise_no_derivative(context: Any, *cotangents: Any) -> Any:
        del context, cotangents
        raise NotImplementedError(f"kernels.{name} has no derivative: {remedy}")

    op = getattr(torch.ops.shardfn_kernels, name).default
    if op._schema.is_mutable:  # to register a derivative of such an op is an error in torch, even this one
        LIBRARY.impl(
            name, make_autograd_impl(op, AutogradInfo(raise_no_derivative, None)), "Autograd", with_keyset=True
        )
    else:
        torch.library.register_autograd(f"shardfn_kernels::{name}", raise_no_derivative, lib=LIBRARY)


def map_rows(name: str, num: int) -> None:
    """Registers a rule for vmap: a mapped dim of an op's first `num` tensors joins their leading dims.

    Where another argument is mapped, too, each part of the argument gets a separate call. For example 8 mapped weights
    make 8 calls.

    Args:
        name: name of an op with a single result, a row for each row of the first tensors.
        num: number of tensors of equal shape, up to a last dim.
    """

    def map_in_turn(info: Any, in_dims: Any, *args: Any) -> Any:
        op, pairs = getattr(torch.ops.shardfn_kernels, name), list(zip(args, in_dims, strict=True))
        if all(dim is None for dim in in_dims[num:]):
            mapped = [_move_to_front(x, dim, info.batch_size) for x, dim in pairs[:num]]
            return op(*mapped, *args[num:]), 0
        each = range(info.batch_size)
        return torch.stack([op(*(x if d is None else x.select(d, i) for x, d in pairs)) for i in each]), 0

    torch.library.register_vmap(f"shardfn_kernels::{name}", map_in_turn, lib=LIBRARY)


def _move_to_front(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def without_dispatch(op: Any) -> Callable[..., Any] | None:
    """Returns the function of an op of the room, for calls by position without autograd and transforms.

    None for other ops.

    Torch's dispatcher takes 10 us for an op in Python, twice as long as the called function.

    Example:
        >>> without_dispatch(torch.ops.aten.add.Tensor) is None
        True
    """
    return _IMPLEMENTATIONS.get(op._schema.name) if isinstance(op, OpOverload) else None


def scratch_bytes(op: Any, args: Sequence[Any]) -> int:
    """Returns the bytes that an op of the room allocates on a CPU for a run, and frees again, or 0 for other ops.

    Args:
        op: of torch.
        args: tensors and numbers. Only shapes and dtypes of tensors are read.

    Example:
        >>> scratch_bytes(torch.ops.aten.add.Tensor, (torch.ones(2), torch.ones(2)))
        0
    """
    found = _SCRATCH.get(op._schema.name) if isinstance(op, OpOverload) else None
    return 0 if found is None else found(*args)
