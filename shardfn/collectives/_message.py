"""Several tensors as a single message: the bytes of each row, in sequence, and back."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import UInt8
from torch import Tensor

from . import _native as native
from ._axis_group import AxisGroup

Parts = tuple[Tensor, ...]


class _MessagePlace(NamedTuple):
    """Place of a tensor in a row: number among the tensors, first byte, shape and dtype."""

    number: int
    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def exchange_rows(parts: Sequence[Parts], line: AxisGroup | None, *, name: str) -> Callable[[], list[Parts]]:
    """Sends row i of every tensor to index i, in a single message each. The result waits for a row from each index.

    Args:
        parts: groups of tensors with leading dims of the line's size.
        line: the ranks. None means only this rank.
        name: the operation's name for the traffic counter.
    """
    if line is None:
        return lambda: list(parts)
    rows, places = _pack_rows(parts)
    each = [rows.shape[1]] * line.size
    wait = native.exchange_start(rows.view(-1), each, each, line, name=name)
    return lambda: _unpack_rows(wait().view(line.size, -1), places, parts)


def gather_rows(parts: Sequence[Parts], line: AxisGroup | None) -> Callable[[], list[Parts]]:
    """Gathers the rows of every tensor, in a single message. The result waits for the rows, in the order of indices.

    Args:
        parts: groups of tensors with equal leading dims, the same on all ranks.
        line: the ranks. None means only this rank.
    """
    if line is None:
        return lambda: list(parts)
    rows, places = _pack_rows(parts)
    wait = native.all_gather_start(rows, line)
    return lambda: _unpack_rows(wait().flatten(0, 1), places, parts)


def _pack_rows(parts: Sequence[Parts]) -> tuple[UInt8[Tensor, "rows bytes"], list[_MessagePlace]]:
    """Returns the message, and the places in the message.

    The widest elements come first, so that each element begins at a multiple of the element's width.
    """
    flat = [part for group in parts for part in group]
    places: list[_MessagePlace] = []
    start = 0
    for number in sorted(range(len(flat)), key=lambda i: -flat[i].dtype.itemsize):
        places.append(_MessagePlace(number, start, flat[number].shape[1:], flat[number].dtype))
        start += places[-1].width
    return torch.cat([_view_bytes(flat[place.number]) for place in places], 1), places


def _view_bytes(part: Tensor) -> UInt8[Tensor, "rows bytes"]:
    return part.contiguous().view(part.shape[0], -1).view(torch.uint8)


def _unpack_rows(
    message: UInt8[Tensor, "rows bytes"], places: list[_MessagePlace], like: Sequence[Parts]
) -> list[Parts]:
    flat: dict[int, Tensor] = {}
    for place in places:
        if not place.width:  # torch calls the tensor contiguous for any strides, and then cannot view the bytes
            flat[place.number] = message.new_empty((len(message), *place.shape), dtype=place.dtype)
            continue
        row_bytes = message.narrow(1, place.start, place.width).contiguous()
        flat[place.number] = row_bytes.view(place.dtype).view(-1, *place.shape)
    tensors = iter([flat[i] for i in range(len(flat))])
    return [tuple(next(tensors) for _ in group) for group in like]
