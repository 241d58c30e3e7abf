"""Marks in a captured step on values with padding as last rows: `arrived_rows`, `rows_as`.

A graph has a single size for the rows of an exchange: the most rows that may come, as with tokens for experts. A back
end that runs op by op can hold exactly the rows that have come, if every op on such values can. `graph.exact_rows`
finds such values. Both marks are the identity on whole values: a graph means the same without the pass.
"""

from typing import Any

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from shardfn._torch import functorch

from ._call_sites import recording


def arrived_rows(x: Shaped[Tensor, "rows ..."], sizes: Int64[Tensor, "n n"]) -> Shaped[Tensor, "rows ..."]:
    """Returns `x`, marked: only rows that have come by the table `sizes` are used, in the gradient, too.

    All values with one table have the same number of rows in use. Outside of captures the mark does nothing.

    Args:
        x: the result of `exchange_rows`, or the operand of the exchange back.
        sizes: the table of the exchange that has brought the rows.

    Example:
        >>> arrived_rows(torch.ones(3), torch.tensor([[2]]))
        tensor([1., 1., 1.])
    """
    if not _can_mark(x, sizes):
        return x
    return _Arrived.apply(x, sizes)  # pyright: ignore[reportReturnType]


def rows_as(x: Shaped[Tensor, "rows ..."], like: Shaped[Tensor, "come ..."]) -> Shaped[Tensor, "come ..."]:
    """Returns the first `len(like)` rows of `x`, where the step runs. `x` has no gradient.

    Args:
        x: integers, such as the places of the rows of `like`. In the capture both have the same number of rows.
        like: a value with `arrived_rows`.

    Example:
        >>> rows_as(torch.tensor([0, 1, -1]), torch.ones(2))
        tensor([0, 1])
    """
    return torch.ops.shardfn.rows_as(x, like.detach()) if _can_mark(x, like) else x[: len(like)]


def _can_mark(*tensors: Tensor) -> bool:
    return recording() and not any(functorch.is_batchedtensor(x) for x in tensors)


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, sizes: Tensor) -> Tensor:
        return torch.ops.shardfn.arrived_rows(x, sizes)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return _Arrived.apply(grad_outputs[0], *ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        return _Arrived.apply(grad_inputs[0], *ctx.saved_tensors)


_LIBRARY = torch.library.Library("shardfn", "FRAGMENT")
# As views, neither reads memory: a table may be freed, or written over, before the last mark with its name.
_LIBRARY.define("arrived_rows(Tensor(a) x, Tensor sizes) -> Tensor(a)")
_LIBRARY.define("rows_as(Tensor(a) x, Tensor like) -> Tensor(a)")


def _arrived_rows(x: Tensor, sizes: Tensor) -> Tensor:
    del sizes
    return x[:]


def _rows_as(x: Tensor, like: Tensor) -> Tensor:
    return x[: len(like)]


for name, run in (("arrived_rows", _arrived_rows), ("rows_as", _rows_as)):
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardfn::{name}", run, lib=_LIBRARY)
