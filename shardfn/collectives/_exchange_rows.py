"""Exchanges, gathers and sums of rows whose numbers all ranks know, and `check_room`, which compares numbers with room.

`ragged_all_to_all` compares the numbers of the ranks in a separate message. Here the caller has gathered a table of the
numbers, so that every rank finds the same places, and the same rows without room, without a message.

Marks in a captured step on values with padding as last rows: `arrived_rows`, `rows_as`.

A graph has a single size for the rows of an exchange: the most rows that may come, as with tokens for experts. A back
end that runs op by op can hold exactly the rows that have come, if every op on such values can. `graph.exact_rows`
finds such values. Both marks are the identity on whole values: a graph means the same without the pass.
"""

from typing import Any

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import has_side_effect

from shardfn._torch import FakeTensor, functorch
from shardfn.core import Axes, raise_all, save_tensors

from ._axis_group import AxisGroup, axis_group_along
from ._axis_type_mode import run_one_operation
from ._primitive import Call, bind, recording


def arrived_rows(x: Shaped[Tensor, "rows ..."], sizes: Int64[Tensor, "..."]) -> Shaped[Tensor, "rows ..."]:
    """Returns `x`, marked: only rows that have come by the table `sizes` are used, in the gradient, too.

    All values with a single table have the same number of rows in use. Outside of captures the mark does nothing.

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
        save_tensors(ctx, inputs[1])

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


def exchange_rows(
    x: Shaped[Tensor, "..."], sizes: Int64[Tensor, "n n"], axis: Axes, *, rows: int | None = None
) -> Shaped[Tensor, "..."]:
    """Sends rank 0 the first rows of `x`, rank 1 the next rows, and so on, by a table that all ranks have: `V -> V`.

        NCCL: all_to_all of unequal parts.

        [a A B] [c C]  =>  [a c .] [A B C]        with sizes [[1, 2], [1, 1]] and rows=3

    Transpose: the exchange back, by the transposed table. Rows of `x` that stay have the gradient zero.

    When: ranks have gathered the numbers of rows, such as the tokens for each expert. Where only sender and receiver
    know a number, use `ragged_all_to_all`, which compares the numbers.

    Args:
        x: `[rows here, ...]`.
        sizes: `sizes[i, j]` rows go from index i along `axis` to index j; the same table on all ranks.
        axis: mesh axes, major to minor; along None, a missing axis and an axis of size 1 rows stay in place.
        rows: number of rows of the result, with zeros behind the rows that come. Needed in a captured step. Elsewhere
            None means exactly the rows that come. `check_room` compares the number with the table on all ranks.

    Raises:
        ValueError: the table has another shape, or `rows` is missing in a capture, or under vmap over the table.

    Example:
        >>> exchange_rows(torch.tensor([5, 6, 7]), torch.tensor([[2]]), "ep", rows=3)
        tensor([5, 6, 0])
    """
    line = _line_of("exchange_rows", x, sizes, axis, rows, square=True)
    return run_one_operation(_exchange_by_table, x, sizes, line, rows, along=axis)


def all_gather_rows(
    x: Shaped[Tensor, "..."], sizes: Int64[Tensor, " n"], axis: Axes, *, rows: int | None = None
) -> Shaped[Tensor, "..."]:
    """Returns the first `sizes[i]` rows of `x` of every rank i, one rank after another: `V -> V`.

        NCCL: all_gather of unequal parts.

        [a .] [A B]  =>  [a A B] [a A B]        with sizes [1, 2]

    Transpose: `psum_scatter_rows`. Rows of `x` that stay have the gradient zero.

    When: ranks work on the rows of all ranks, and the numbers of rows are data. Where shapes say the numbers, use
    `all_gather`.

    Args:
        x: `[rows here, ...]`.
        sizes: number of rows of each index along `axis`, the same on all ranks.
        axis: axis as in `exchange_rows`.
        rows: number of rows of the result, as in `exchange_rows`.

    Raises:
        ValueError: as `exchange_rows`.

    Example:
        >>> all_gather_rows(torch.tensor([5, 6, 7]), torch.tensor([2]), "tp", rows=3)
        tensor([5, 6, 0])
    """
    line = _line_of("all_gather_rows", x, sizes, axis, rows)
    return run_one_operation(_gather_by_sizes, x, sizes, line, rows, along=axis)


def psum_scatter_rows(
    x: Shaped[Tensor, "..."], sizes: Int64[Tensor, " n"], axis: Axes, *, rows: int | None = None
) -> Shaped[Tensor, "..."]:
    """Returns the sum over ranks of this rank's rows: the first `sizes[0]` rows are rank 0's, and so on: `V -> V`.

        NCCL: reduce_scatter of unequal parts.

        [a b c] [A B C]  =>  [a+A] [b+B c+C]        with sizes [1, 2]

    The sum goes in the order of ranks. Transpose: `all_gather_rows`.

    When: each rank has a summand of the rows of all ranks, and the numbers of rows are data.

    Args:
        x: `[rows of all ranks, ...]`.
        sizes: number of rows of each index along `axis`, the same on all ranks.
        axis: axis as in `exchange_rows`.
        rows: number of rows of the result, as in `exchange_rows`.

    Raises:
        ValueError: as `exchange_rows`.

    Example:
        >>> psum_scatter_rows(torch.tensor([5, 6, 7]), torch.tensor([2]), "tp", rows=3)
        tensor([5, 6, 0])
    """
    line = _line_of("psum_scatter_rows", x, sizes, axis, rows)
    return run_one_operation(_scatter_by_sizes, x, sizes, line, rows, along=axis)


def check_room(
    sizes: Int64[Tensor, "m n"],
    room: Int64[Tensor, " n"],
    axis: Axes,
    *,
    name: str,
    remedy: str = "give it more, or a rule to drop some",
) -> None:
    """Raises on all ranks if more rows come to a rank than the rank has room for, in a captured step, too.

    Args:
        sizes: the table, as in `exchange_rows`, from any number of sources.
        room: the rows of each index's result.
        axis: axis as in `exchange_rows`.
        name: name of the exchange, for the message.
        remedy: end of each rank's message.

    Raises:
        ValueError: lists the ranks, each with both numbers. A captured step raises the error when the step runs.

    Example:
        >>> check_room(torch.tensor([[2]]), torch.tensor([3]), "ep", name="blocks.0")
    """
    line = axis_group_along(axis)
    torch.ops.shardfn.check_room(sizes, room, name, "" if line is None else ",".join(line.axes), remedy)


def values_are_known(*tensors: Tensor) -> bool:
    """Returns whether shapes may depend on the values of tensors.

    Not in a capture, and not where vmap has batched them.

    Example:
        >>> values_are_known(torch.ones(2))
        True
    """
    if recording() or get_proxy_mode() is not None:
        return False
    return not any(isinstance(x, FakeTensor) or functorch.is_batchedtensor(x) for x in tensors)


def _line_of(name: str, x: Tensor, sizes: Tensor, axis: Axes, rows: int | None, *, square: bool = False) -> AxisGroup:
    """Returns the ranks along `axis`, after a check of the numbers."""
    line = axis_group_along(axis) or AxisGroup.alone()
    wanted = (line.size, line.size) if square else (line.size,)
    if tuple(sizes.shape) != wanted:
        raise ValueError(f"{name}: sizes must have shape {wanted} along {axis!r}, got {tuple(sizes.shape)}.")
    if rows is None and not values_are_known(x, sizes):
        raise ValueError(
            f"{name}(rows=None) returns all rows that come, whose number a capture or a vmap cannot know. Give rows=,"
            " the most that may come."
        )
    return line


def _exchange_by_table(x: Tensor, sizes: Tensor, line: AxisGroup, rows: int | None) -> Tensor:
    leaving, coming = sizes.detach()[line.index], sizes.detach()[:, line.index]
    return _move_rows(x, line, (_starts_of(leaving), leaving), (_starts_of(coming), coming), rows)


def _gather_by_sizes(x: Tensor, sizes: Tensor, line: AxisGroup, rows: int | None) -> Tensor:
    sizes = sizes.detach()
    return _move_rows(x, line, _same_for_all(sizes, line), (_starts_of(sizes), sizes), rows)


def _scatter_by_sizes(x: Tensor, sizes: Tensor, line: AxisGroup, rows: int | None) -> Tensor:
    sizes = sizes.detach()
    return _move_rows(x, line, (_starts_of(sizes), sizes), _same_for_all(sizes, line), rows, added=True)


# Where rows for each rank, or from each rank, begin, and the numbers of these rows.
_Places = tuple[Tensor, Tensor]


def _starts_of(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0) - sizes


def _same_for_all(sizes: Tensor, line: AxisGroup) -> _Places:
    """Returns the places of this rank's rows, which go to every rank or are summed."""
    return torch.zeros_like(sizes), sizes[line.index].expand_as(sizes).contiguous()


def _move_rows(
    x: Tensor, line: AxisGroup, leaving: _Places, coming: _Places, rows: int | None, *, added: bool = False
) -> Tensor:
    if rows is None:
        rows = int(coming[1][0] if added else coming[1].sum())
    call = Call("ragged_all_to_all", line, size=rows, concat_size=x.shape[0])
    return bind(x, call, *leaving, *coming)


_LIBRARY.define("check_room(Tensor sizes, Tensor room, str name, str axes, str remedy) -> ()")


def _check_room(sizes: Tensor, room: Tensor, name: str, axes: str, remedy: str) -> None:
    pairs = zip(sizes.sum(0).tolist(), room.tolist(), strict=True)
    full = [
        f"{name}: {come} rows come to rank {rank} of {axes!r}, which has room for {most}; {remedy}"
        for rank, (come, most) in enumerate(pairs)
        if come > most
    ]
    raise_all(ValueError, "an exchange has more rows than room. Nothing was sent:", full)


_LIBRARY.impl("check_room", _check_room, "CompositeExplicitAutograd")


@torch.library.register_fake("shardfn::check_room", lib=_LIBRARY)
def _(sizes: Tensor, room: Tensor, name: str, axes: str, remedy: str) -> None:
    del sizes, room, name, axes, remedy


# The result has no use, so that dead code would be removed.
has_side_effect(torch.ops.shardfn.check_room.default)
