"""`cross`: leaves from one mesh to another, from rank to rank, a bounded number of bytes at a time.

All ranks start their transfers in one order, that of leaves, of `overlaps` and of `pieces`, and a rank waits only for
its oldest. So both ranks of the first unfinished transfer in that order have started it, or will, and no rank waits for
ever.
"""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.collectives.transport import Channel
from shardfn.core import Pending

from ._overlaps import Box, Overlap, pieces

# Bytes of a message, and of those that a rank has under way; and how many these are.
PIECE, WINDOW, MESSAGES = 4 << 20, 32 << 20, 256


class LeafCrossing(NamedTuple):
    """A leaf on its way to another mesh, as one rank sees it. A box is in the coordinates of the whole leaf.

    Attributes:
        overlaps: from `overlaps`, for this rank.
        dtype: of the elements while they travel.
        take: from a box to this rank's elements in it, on any device, in any dtype.
        put: stores new elements of a box; a tensor of its own on the host, in `dtype`.
        done: called when this rank has sent and received its whole part.
    """

    overlaps: Sequence[Overlap]
    dtype: torch.dtype
    take: Callable[[Box], Tensor]
    put: Callable[[Box, Tensor], None]
    done: Callable[[], None]


def cross(crossings: Sequence[LeafCrossing], channel: Channel, places: Mapping[int, int]) -> None:
    """Carries out crossings of leaves.

    Collective over the channel, with the same leaves in the same order on all ranks.

    Args:
        crossings: the leaves.
        channel: from `Channels.between`.
        places: rank of the program -> its index in the channel.
    """
    window, tags = _CrossWindow(), collections.Counter[tuple[int, int]]()
    for crossing in crossings:
        for sender, receiver, whole in crossing.overlaps:
            for box in pieces(whole, max(1, PIECE // crossing.dtype.itemsize)):
                if sender == receiver:
                    crossing.put(box, _copied(crossing, box))
                    continue
                window.make_room(_numel(box) * crossing.dtype.itemsize)
                pair = places[sender], places[receiver]
                window.add(_start(crossing, box, channel, *pair, tags[pair]))
                tags[pair] += 1
        window.add(_UnderWay(0, None, crossing.done))
    window.make_room(WINDOW + 1)  # waits for all


class _UnderWay(NamedTuple):
    nbytes: int
    pending: Pending[Tensor] | None
    then: Callable[[], None]


class _CrossWindow:
    """The transfers that a rank has started, oldest first. Their results are stored in that order, too."""

    def __init__(self) -> None:
        self._queue: collections.deque[_UnderWay] = collections.deque()
        self._nbytes = 0

    def make_room(self, nbytes: int) -> None:
        """Waits until `nbytes` more fit in."""
        while self._queue and (self._nbytes + nbytes > WINDOW or len(self._queue) >= MESSAGES):
            oldest = self._queue.popleft()
            if oldest.pending is not None:
                oldest.pending.result()
            oldest.then()
            self._nbytes -= oldest.nbytes

    def add(self, x: _UnderWay) -> None:
        self._queue.append(x)
        self._nbytes += x.nbytes


def _start(crossing: LeafCrossing, box: Box, channel: Channel, sender: int, receiver: int, tag: int) -> _UnderWay:
    if sender == channel.index:
        piece = _copied(crossing, box)
        return _UnderWay(piece.nbytes, channel.send(piece, receiver, tag), lambda: None)
    piece = torch.empty(_shape(box), dtype=crossing.dtype)
    pending = channel.receive(piece, sender, tag)
    return _UnderWay(piece.nbytes, pending, lambda: crossing.put(box, piece))


def _copied(crossing: LeafCrossing, box: Box) -> Tensor:
    return torch.empty(_shape(box), dtype=crossing.dtype).copy_(crossing.take(box))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _numel(box: Box) -> int:
    return math.prod(_shape(box))
