"""`cross`: leaves from a mesh to another, from rank to rank, a bounded number of bytes at a time.

All ranks start transfers in the same order: by leaf, then by `overlaps`, then by `pieces`. A rank waits only for the
oldest transfer. So both ranks of the first unfinished transfer have started the transfer, or will, and there is no
deadlock. A message of several parts has the place of the first part. Both ranks of a message know all parts between the
two, so the ranks agree on the message, and the message comes before the end of each leaf inside.

The messages by which a leaf goes from a mesh to another: the overlaps of its present blocks with the wanted blocks.

The distinct blocks of a leaf lie side by side. A rank with a new block needs the overlap of the new block with each old
block, and may itself have some overlap already. The rank receives every other overlap once. So the bytes sent are the
fewest possible:

    bytes to a rank = bytes of its new block - bytes of the overlap of its new block with its old block
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardfn import core
from shardfn.collectives.transport import Channel
from shardfn.core import Mesh, P

# Start and stop along each dim, in the coordinates of the leaf.
Box = tuple[tuple[int, int], ...]


class Overlap(NamedTuple):
    """Box that a rank has and another rank wants.

    Attributes:
        sender: the rank of the program that has the box, perhaps the receiver itself.
        receiver: the rank that wants the box.
        box: place in the leaf.
    """

    sender: int
    receiver: int
    box: Box


def overlaps(shape: tuple[int, ...], src: tuple[P, Mesh], dst: tuple[P, Mesh], rank: int) -> list[Overlap]:
    """Returns the parts of a leaf that a rank sends, receives and has already, in an order equal on all ranks.

    Where several ranks hold a block, the receivers are shared out among the holders in turn, for example 2 of 4 to each
    of 2.

    Args:
        shape: the leaf's global shape.
        src: present spec and mesh.
        dst: new spec and mesh.
        rank: rank of the program, in at least one mesh.

    Example:
        >>> import torch
        >>> pair, rest = (Mesh({"dp": 2}, torch.device("cpu"), ranks=r) for r in ([0, 1], [1, 2]))
        >>> [(x.sender, x.receiver, x.box) for x in overlaps((6,), (P("dp"), pair), (P(), rest), 1)]
        [(0, 1, ((0, 3),)), (1, 1, ((3, 6),)), (1, 2, ((3, 6),))]
    """
    wanted = np.array(blocks_of(shape, *dst), dtype=np.int64).reshape(dst[1].size, len(shape), 2)
    holders: dict[Box, list[int]] = {}
    for holder, box in zip(src[1].ranks, blocks_of(shape, *src), strict=True):
        holders.setdefault(box, []).append(holder)
    out: list[Overlap] = []
    for box, ranks in holders.items():
        held = np.array(box, dtype=np.int64).reshape(len(shape), 2)
        starts, stops = np.maximum(wanted[..., 0], held[:, 0]), np.minimum(wanted[..., 1], held[:, 1])
        turn = 0
        for i in np.flatnonzero((starts < stops).all(1)).tolist():
            receiver = dst[1].ranks[i]
            sender = receiver if receiver in ranks else ranks[turn % len(ranks)]
            turn += receiver not in ranks
            if rank in (sender, receiver):
                out.append(Overlap(sender, receiver, tuple(zip(starts[i].tolist(), stops[i].tolist(), strict=True))))
    return out


def blocks_of(shape: tuple[int, ...], spec: P, mesh: Mesh) -> list[Box]:
    """Returns the blocks of a leaf, in the order of the mesh's ranks."""
    cuts = (core.block_slices(shape, spec, mesh.shape, coords) for coords in core.all_coords(mesh.shape))
    return [tuple((s.start, s.stop) for s in slices) for slices in cuts]


def pieces(box: Box, most: int) -> Iterator[Box]:
    """Yields a box as boxes of at most `most` elements, in row-major order.

    Example:
        >>> list(pieces(((0, 2), (0, 5)), 4))
        [((0, 1), (0, 4)), ((0, 1), (4, 5)), ((1, 2), (0, 4)), ((1, 2), (4, 5))]
    """
    sizes = [stop - start for start, stop in box]
    dim = next((d for d, n in enumerate(sizes) if n > 1), None)
    if dim is None or np.prod(sizes) <= most:
        yield box
        return
    rows = max(1, int(most // np.prod(sizes[dim + 1 :])))
    start, stop = box[dim]
    for lo in range(start, stop, rows):
        yield from pieces((*box[:dim], (lo, min(lo + rows, stop)), *box[dim + 1 :]), most)


# Bytes of a message, bytes of all messages that a rank has in flight, and the number of these messages.
PIECE, WINDOW, MESSAGES = 4 << 20, 32 << 20, 256
# Parts of fewer bytes share messages.
SMALL = 64 << 10


class LeafCrossing(NamedTuple):
    """Leaf on its way to another mesh, as a single rank sees the leaf. A box is in the coordinates of the whole leaf.

    Attributes:
        overlaps: result of `overlaps` for this rank.
        dtype: dtype of the elements on the wire.
        take: function from a box to this rank's elements inside, on any device, in any dtype.
        put: function that stores new elements of a box, given as a tensor on the host, in `dtype`, perhaps a view.
        done: function that is called when this rank has sent and received all of its part.
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
        places: rank of the program -> index in the channel.
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
    """Parts of leaves, in sequence, in a single message from rank to rank.

    Attributes:
        sender: a rank of the program.
        receiver: another rank of the program.
        dtype: dtype of all parts.
        parts: leaves, each with a box.
        numel: the number of elements of all parts.
    """

    sender: int
    receiver: int
    dtype: torch.dtype
    parts: list[tuple[LeafCrossing, Box]] = dataclasses.field(default_factory=list)
    numel: int = 0

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the message."""
        return self.numel * self.dtype.itemsize

    def add(self, crossing: LeafCrossing, box: Box) -> None:
        """Adds a box of elements to the message."""
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
    """Returns this rank's messages in the order of their starts, and each leaf after all messages of the leaf."""
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
    pending: core.Pending[Tensor] | None
    then: Callable[[], None]


class _CrossWindow:
    """Transfers that a rank has started, oldest first. Results are stored in the same order."""

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
