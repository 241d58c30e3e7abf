"""`cross`: leaves from one mesh to another, from rank to rank, a bounded number of bytes at a time.

All ranks start their transfers in one order, that of leaves, of `overlaps` and of `pieces`, and a rank waits only for
its oldest. So both ranks of the first unfinished transfer in that order have started it, or will, and no rank waits for
ever. A message of several parts has the place of its first. Both its ranks know all parts between them, so they agree
on the message, and it comes before the end of each leaf in it.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.collectives.transport import Channel
from shardfn.core import Pending

from ._overlaps import Box, Overlap, pieces

# Bytes of a message, and of those that a rank has under way, and how many these are.
PIECE, WINDOW, MESSAGES = 4 << 20, 32 << 20, 256
# Parts of fewer bytes share messages.
SMALL = 64 << 10


class LeafCrossing(NamedTuple):
    """A leaf on its way to another mesh, as one rank sees it. A box is in the coordinates of the whole leaf.

    Attributes:
        overlaps: overlaps from `overlaps`, for this rank.
        dtype: dtype of the elements while they travel.
        take: function from a box to this rank's elements in it, on any device, in any dtype.
        put: stores new elements of a box; a tensor on the host, in `dtype`, which may be part of a larger one.
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
        channel: channel from `Channels.between`.
        places: rank of the program -> its index in the channel.
    """
    window, tags = _CrossWindow(), collections.Counter[tuple[int, int]]()
    for message in _make_messages(crossings):
        if isinstance(message, LeafCrossing):
            window.add(_UnderWay(0, None, message.done))
        elif message.sender == message.receiver:
            message.put(message.taken())
        else:
            window.make_room(message.nbytes)
            pair = places[message.sender], places[message.receiver]
            window.add(_start_message(message, channel, *pair, tags[pair]))
            tags[pair] += 1
    window.make_room(WINDOW + 1)  # waits for all


@dataclasses.dataclass
class _Message:
    """Parts of leaves, one after another, that travel together from rank to rank.

    Attributes:
        sender: a rank of the program.
        receiver: likewise.
        dtype: dtype of all parts.
        parts: leaves and boxes of these.
        numel: the number of all their elements.
    """

    sender: int
    receiver: int
    dtype: torch.dtype
    parts: list[tuple[LeafCrossing, Box]] = dataclasses.field(default_factory=list)
    numel: int = 0

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.numel * self.dtype.itemsize

    def add(self, crossing: LeafCrossing, box: Box) -> None:
        """Adds a part."""
        self.parts.append((crossing, box))
        self.numel += _box_numel(box)

    def taken(self) -> Tensor:
        """Returns the elements, from the sender's blocks."""
        whole = torch.empty(self.numel, dtype=self.dtype, device="cpu")
        for crossing, box, piece in self._split_parts(whole):
            piece.copy_(crossing.take(box))
        return whole

    def put(self, whole: Tensor) -> None:
        """Stores the elements in the receiver's blocks."""
        for crossing, box, piece in self._split_parts(whole):
            crossing.put(box, piece)

    def _split_parts(self, whole: Tensor) -> Iterator[tuple[LeafCrossing, Box, Tensor]]:
        split = whole.split([_box_numel(box) for _, box in self.parts])
        for (crossing, box), piece in zip(self.parts, split, strict=True):
            yield crossing, box, piece.view(_box_shape(box))


def _make_messages(crossings: Sequence[LeafCrossing]) -> list[_Message | LeafCrossing]:
    """This rank's messages in the order of their starts, and each leaf after all messages with parts of it."""
    out: list[_Message | LeafCrossing] = []
    shared: dict[tuple[int, int, torch.dtype], _Message] = {}
    for crossing in crossings:
        for sender, receiver, whole in crossing.overlaps:
            key = sender, receiver, crossing.dtype
            for box in pieces(whole, max(1, PIECE // crossing.dtype.itemsize)):
                nbytes = _box_numel(box) * crossing.dtype.itemsize
                small = nbytes < SMALL and sender != receiver
                message = shared.get(key) if small else None
                if message is None or message.nbytes + nbytes > PIECE:
                    out.append(message := _Message(*key))
                    if small:
                        shared[key] = message
                message.add(crossing, box)
        out.append(crossing)
    return out


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


def _start_message(message: _Message, channel: Channel, sender: int, receiver: int, tag: int) -> _UnderWay:
    if sender == channel.index:
        return _UnderWay(message.nbytes, channel.send(message.taken(), receiver, tag), lambda: None)
    whole = torch.empty(message.numel, dtype=message.dtype, device="cpu")
    pending = channel.receive(whole, sender, tag)
    return _UnderWay(message.nbytes, pending, lambda: message.put(whole))


def _box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _box_numel(box: Box) -> int:
    return math.prod(_box_shape(box))
