"""One unit of leaves between the start of its transfer and its last use."""

from collections.abc import Sequence

from torch import Tensor

from shardfn.capture import capturing, traced_once
from shardfn.collectives import GatherWire
from shardfn.core import Pending
from shardfn.leaves import LeafLayout
from shardfn.memory import Fetch

# A piece of a leaf that this rank keeps: on the device, or on its way there.
Piece = Tensor | Fetch


class GatheredUnit:
    """The leaves of one unit, being gathered or complete.

    Made when its transfer starts. Also a unit that is dropped must `arrive`, as other ranks may wait for it.

    Args:
        wire: on which it is gathered.
        pieces: this rank's; of two hops, the result of the first.
        leaves: the leaves of the unit.

    Attributes:
        arrived: whether its transfer has ended.
    """

    def __init__(self, wire: GatherWire, pieces: Sequence[Piece], leaves: Sequence[LeafLayout]) -> None:
        self._wire = wire
        # In flight (`_pending`), then here as a message (`_out`), then as leaves (`_tensors`): one of them at a time.
        self._pending: Pending[Tensor] | None = None
        self._out: Tensor | None = None
        self._tensors: list[Tensor] = []
        # Those in codes are decoded when they are first used.
        self._leaves, self._coded = leaves, {k for k, leaf in enumerate(leaves) if leaf.places.quantization is not None}
        # In a capture a transfer is waited for where it is issued. The passes set the two apart.
        self.arrived = capturing()
        # Neither sent nor packed: only the move from its memory is waited for.
        if wire.size == 1 and len(pieces) == 1 and isinstance(pieces[0], Fetch) and not self.arrived:
            self._pending = pieces[0]
            self.move_if_ready()
            return
        own = arrived(pieces)
        if self.arrived:  # a capture sends nothing, and each layer of a stack has the same steps
            looks = *(leaf.looks for leaf in leaves), wire.axes

            def gather(*own: Tensor) -> list[Tensor]:
                return wire.packing.unpack(wire.start(own).result())

            self._tensors = list(traced_once(("gather", looks), gather, own))
        else:
            self._pending = wire.start(own)

    def move_if_ready(self) -> None:
        """Starts the copy to the device of pieces that have been read from disk."""
        if isinstance(self._pending, Fetch):
            self._pending.move_if_ready()

    def arrive(self) -> None:
        """Waits until the message is here."""
        if self._pending is not None:
            out = self._pending.result()
            # Without a message nothing has been cast.
            self._out = out.to(self._wire.dtype) if isinstance(self._pending, Fetch) else out
            self._pending, self.arrived = None, True

    def leaf(self, slot: int) -> Tensor:
        """Returns the whole leaf of that number in the unit, and waits for it."""
        if not self._tensors:
            self.arrive()
            assert self._out is not None
            self._tensors = self._wire.packing.unpack(self._out)
            # Its views hold the memory: that goes with the last of the leaves.
            self._out = None
        if slot in self._coded:
            self._tensors[slot] = self._leaves[slot].opened(self._tensors[slot])
            self._coded.remove(slot)
        return self._tensors[slot]


def arrived(pieces: Sequence[Piece]) -> list[Tensor]:
    """Returns the pieces on the device. All copies start before the first is waited for."""
    for piece in pieces:
        if isinstance(piece, Fetch):
            piece.move()
    return [p.result() if isinstance(p, Fetch) else p for p in pieces]
