"""Exchanges of rows whose numbers are data: `ragged_all_to_all`, `ragged_exchange`.

The primitive under both is linear in `x` and knows no other rank's offsets: this rank sends rank j `send_sizes[j]` rows
of `x`, from `input_offsets[j]` on, and puts the `sizes[j]` rows from rank j into zeros, from `offsets[j]` on. The
transpose has the two pairs exchanged. `ragged_places` brings the offsets from the senders to each rank.
"""

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardfn._torch import FakeTensor, functorch
from shardfn.collectives.transport import Channel, loss_channel
from shardfn.core import Axes, raise_all

from ._axis_group import AxisGroup, axis_group_along
from ._axis_type_mode import run_one_operation
from ._native import start_op
from ._primitive import (
    PRIMITIVES,
    Call,
    Operands,
    Primitive,
    bind,
    join_transfers,
    no_transpose,
    recording,
    swap_dims,
    transferred,
)
from ._ragged_ops import Header, compared_places

_INTEGERS = (torch.int32, torch.int64)


def ragged_all_to_all(
    x: Shaped[Tensor, "..."],
    out: Shaped[Tensor, "..."],
    input_offsets: Tensor,
    send_sizes: Tensor,
    output_offsets: Tensor,
    recv_sizes: Tensor,
    axis: Axes,
) -> Shaped[Tensor, "..."]:
    """Sends each rank rows of `x`, which replace rows of the rank's `out`. The numbers are data: `V -> V`.

        NCCL: all_to_all of unequal parts.  Slow spec, for ranks i and j, from the blocks of all:
        `out[j][output_offsets[i][j] :][: send_sizes[i][j]] = x[i][input_offsets[i][j] :][: send_sizes[i][j]]`

        [a A B] [c C]  =>  [a c .] [A B C]        with send_sizes [1, 2] and [1, 1], output_offsets [0, 0] and [1, 2]

    The function is `jax.lax.ragged_all_to_all`. Shapes do not depend on the sizes, so a single captured graph serves
    all sizes. The numbers of all ranks are compared first, in a message of 5 + 4 n integers. If the numbers do not fit,
    all ranks raise the same error before any row is sent.

    Transpose: for `x` the exchange back, which adds rows that were sent several times, and for `out` the rows that have
    not been replaced. Offsets and sizes have no derivative.

    When: tokens go to the ranks of their experts, within a capacity. In eager code, where shapes may depend on the
    data, `ragged_exchange` needs no capacity. For equal parts use `all_to_all`, without a comparison.

    Args:
        x: `[rows, ...]`. Any number of rows, which may differ between ranks.
        out: `[capacity, ...]`, with rows of the same shape and dtype as in `x`. The capacity may differ between ranks.
        input_offsets: int32 or int64 numbers, a number for each rank along `axis`: the first row of `x` for the rank.
        send_sizes: numbers as above: how many rows of `x` go to the rank.
        output_offsets: numbers as above: the row of the rank's `out` at which the rows begin.
        recv_sizes: numbers as above: how many rows come from the rank.
        axis: mesh axes, major to minor; along None, a missing axis and an axis of size 1 there is only this rank.

    Returns:
        A tensor like `out`, with the received rows in place.

    Raises:
        ValueError: unknown axis, operands of other shapes or dtypes, rows that differ between ranks, a size that is
            negative or differs between sender and receiver, rows beyond the end of `x` or `out`, or two ranks that
            write the same row. The message names the ranks, and all ranks raise the error.

    References:
        JAX, `jax.lax.ragged_all_to_all`, https://docs.jax.dev/en/latest/_autosummary/jax.lax.ragged_all_to_all.html

    Example:
        >>> one = torch.tensor([1])
        >>> ragged_all_to_all(torch.tensor([5, 6]), torch.zeros(4, dtype=torch.int64), one, one, one + 1, one, "ep")
        tensor([0, 0, 6, 0])
    """
    line = axis_group_along(axis) or AxisGroup.alone()
    places = {
        "input_offsets": input_offsets,
        "send_sizes": send_sizes,
        "output_offsets": output_offsets,
        "recv_sizes": recv_sizes,
    }
    problems = [*_wrong_rows(x, out), *_wrong_places(line, places)]
    if problems:
        _refuse_problems(line, problems)
    return run_one_operation(_exchange_ragged, x, out, *places.values(), line, along=axis)


def ragged_exchange(
    x: Shaped[Tensor, "..."], send_sizes: Tensor, axis: Axes
) -> tuple[Shaped[Tensor, "..."], Shaped[Tensor, " n"]]:
    """Sends rank 0 the first rows of `x`, rank 1 the next rows, and so on. Returns the rows that come: `V -> V`.

        [a A B] [c C]  =>  [a c] [A B C]        with send_sizes [1, 2] and [1, 1]

    The rows of `x` beyond the sum of the sizes stay, with gradient zero. As the shape of the result is data, the
    function is only for eager code. A capture refuses the call.

    Transpose: the exchange back.

    When: tokens go to the ranks of their experts, in any number, in eager code.

    Args:
        x: `[rows, ...]`. Any number of rows, which may differ between ranks.
        send_sizes: int32 or int64 numbers, a number for each rank along `axis`: how many rows go to the rank.
        axis: see `ragged_all_to_all`.

    Returns:
        The received rows, in the order of ranks, and the number from each rank (int64).

    Raises:
        ValueError: as `ragged_all_to_all`, or the numbers have no values here: in a capture, or batched by vmap.

    Example:
        >>> rows, sizes = ragged_exchange(torch.tensor([5, 6, 7]), torch.tensor([2]), "ep")
        >>> rows, sizes
        (tensor([5, 6]), tensor([2]))
    """
    line = axis_group_along(axis) or AxisGroup.alone()
    if (
        recording()
        or get_proxy_mode() is not None
        or isinstance(x, FakeTensor)
        or functorch.is_batchedtensor(send_sizes)
    ):
        raise ValueError(
            "ragged_exchange returns all received rows, so it cannot be captured, or vmapped over send_sizes."
            " Use sf.ragged_all_to_all, with an `out` that has room for the largest number of rows."
        )
    problems = [*_wrong_rows(x, x), *_wrong_places(line, {"send_sizes": send_sizes})]
    if problems:
        _refuse_problems(line, problems)
    return run_one_operation(_arrived_sizes, x, send_sizes, line, along=axis)


@join_transfers
def _exchange_ragged(
    x: Tensor,
    out: Tensor,
    input_offsets: Tensor,
    send_sizes: Tensor,
    output_offsets: Tensor,
    recv_sizes: Tensor,
    line: AxisGroup,
) -> Tensor:
    rows, capacity = x.shape[0], out.shape[0]
    compare = Call("ragged_places", line, size=capacity, concat_size=rows, looks=_describe_rows(x))
    offsets = bind(output_offsets, compare, input_offsets, send_sizes, recv_sizes)
    exchange = Call("ragged_all_to_all", line, size=capacity, concat_size=rows)
    come = bind(x, exchange, input_offsets, send_sizes, offsets, recv_sizes)
    replaced = _covered_rows(offsets, recv_sizes, capacity).view(capacity, *[1] * (out.ndim - 1))
    return torch.where(replaced, come, out)


@join_transfers
def _arrived_sizes(x: Tensor, send_sizes: Tensor, line: AxisGroup) -> tuple[Tensor, Tensor]:
    sizes = send_sizes.detach().long()
    starts = sizes.cumsum(0) - sizes
    given = torch.stack([starts, sizes, torch.full_like(sizes, -1), torch.full_like(sizes, -1)]).unsqueeze(1)
    told = Header(_describe_rows(x), False, x.shape[0], -1)
    axes = ",".join(line.axes)
    places = _order_by_rank(given, line).cpu()
    of_all = transferred("ragged_places", lambda: compared_places(_channel_for(line), axes, told, places).result())
    here = line.ranks[line.index]
    come = _order_by_index(of_all[:, 1, 0, here], line).to(sizes.device)
    exchange = Call("ragged_all_to_all", line, size=int(come.sum()), concat_size=x.shape[0])
    return bind(x, exchange, starts, sizes, come.cumsum(0) - come, come), come


def _channel_for(line: AxisGroup) -> Channel | None:
    return loss_channel(line.mesh, line.axes) if line.axes else None


def _describe_rows(x: Tensor) -> str:
    return f"rows of {str(x.dtype).removeprefix('torch.')} {tuple(x.shape[1:])}"


def _covered_rows(offsets: Tensor, sizes: Tensor, capacity: int) -> Tensor:
    """Returns which rows lie in some range."""
    some = (sizes > 0).long()
    steps = torch.zeros(capacity + 1, dtype=torch.int64, device=offsets.device)
    begins, ends = (x.clamp(0, capacity) for x in (offsets, offsets + sizes))
    return steps.scatter_add(0, begins, some).scatter_add(0, ends, -some)[:-1].cumsum(0) > 0


# Refusals.


def _wrong_rows(x: Tensor, out: Tensor) -> list[str]:
    if not x.ndim or not out.ndim:
        return [f"x and out must have rows along dim 0, got shapes {tuple(x.shape)} and {tuple(out.shape)}"]
    problems = []
    if x.shape[1:] != out.shape[1:]:
        problems.append(f"rows of x and out must have one shape, got {tuple(x.shape[1:])} and {tuple(out.shape[1:])}")
    if x.dtype != out.dtype:
        problems.append(f"x is {x.dtype}, out {out.dtype}. Cast one of them")
    if x.device != out.device:
        problems.append(f"x is on {x.device}, out on {out.device}. Move one of them")
    return problems


def _wrong_places(line: AxisGroup, places: dict[str, Tensor]) -> list[str]:
    n, problems = line.size, list[str]()
    for name, place in places.items():
        if tuple(place.shape) != (n,):
            problems.append(f"{name} must have one entry a rank, ({n},), got shape {tuple(place.shape)}")
        if place.dtype not in _INTEGERS:
            problems.append(f"{name} must be torch.int32 or torch.int64, got {place.dtype}")
    return problems


def _refuse_problems(line: AxisGroup, problems: list[str]) -> None:
    """Raises on all ranks that exchange. A capture agrees separately."""
    if line.size > 1 and not recording() and get_proxy_mode() is None:
        axes, words = ",".join(line.axes), "; ".join(problems)
        nothing = torch.zeros(4, 1, line.size, dtype=torch.int64)
        compared_places(_channel_for(line), axes, Header(words, True), nothing).result()
    raise_all(ValueError, "ragged_all_to_all: operands do not go together. Nothing was sent:", problems)


# The rows of the table. A group counts ranks in the mesh's order, a caller in the order of the named axes.


def _order_by_rank(places: Tensor, line: AxisGroup) -> Tensor:
    return places if line.in_order else places[..., line.indices]


def _order_by_index(places: Tensor, line: AxisGroup) -> Tensor:
    return places if line.in_order else places[..., list(line.ranks)]


# ragged_places: V -> V


def _ragged_places(output_offsets: Tensor, call: Call, *rest: Tensor) -> Tensor:
    batch, line = output_offsets.shape[: call.batch_dims], call.line
    each = [_order_by_rank(x.expand(*batch, line.size), line) for x in (output_offsets, *rest)]
    compared = start_op("ragged_places", line, *each, call.concat_size, call.size, call.looks)
    return _order_by_index(compared(), line)


# ragged_all_to_all: V -> V


def _ragged_all_to_all(x: Tensor, call: Call, *places: Tensor) -> Tensor:
    line, batch, (rows, capacity) = call.line, x.shape[: call.batch_dims], (call.concat_size, call.size)
    if all(p.numel() == line.size for p in places):
        each = [_order_by_rank(p.reshape(-1), line) for p in places]
        first = x.movedim(call.batch_dims, 0).contiguous()
        come = start_op("ragged_all_to_all", line, first, *each, capacity)()
        return come.movedim(0, call.batch_dims).contiguous()
    # Each member has separate places. All places go together, member by member.
    member = torch.arange(batch.numel(), device=x.device).view(*batch, 1)
    shifts = (member * rows, 0, member * capacity, 0)
    each = [
        _order_by_rank((p + s).expand(*batch, line.size), line).reshape(-1) for p, s in zip(places, shifts, strict=True)
    ]
    tail = x.shape[call.batch_dims + 1 :]
    flat = x.reshape(batch.numel() * rows, *tail)
    come = start_op("ragged_all_to_all", line, flat, *each, batch.numel() * capacity)()
    return come.view(*batch, capacity, *tail)


def _turn_places(places: Operands) -> Operands:
    starts, leaving, offsets, coming = places
    return offsets, coming, starts, leaving


PRIMITIVES["ragged_places"] = Primitive(_ragged_places, no_transpose)
PRIMITIVES["ragged_all_to_all"] = Primitive(_ragged_all_to_all, swap_dims, turned=_turn_places)
