"""Resident parameters that a loss waits for late: other ranks' updated parts are awaited where a leaf is used.

`Pace(refresh="use")`. The gather after an update writes to the blocks of the new state, which anybody may have; so what
is under way goes with the state (`GlobalTensor.coming`). In a loss these leaves are lazy leaves, always, whether or not
they have come: what a loss sees does not depend on timing.
"""

import atexit
import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from shardfn.collectives import AnyChannels, Arrival, Channels, TransportError
from shardfn.core import Mesh, Stored

from ._plan import Plan

# Seconds that parameters under way get after an error, and at the end of the program.
MOMENT, LAST_MOMENT = 1.0, 10.0


class LateLeaves:
    """Gives the leaves of a step that enter late; the others come from `rest`.

    Args:
        plan: the layout.
        blocks: by layer, this rank's block.
        coming: by layer, what is still being written to it; None = nothing.
        rest: gives the other lazy leaves.
    """

    def __init__(
        self,
        plan: Plan,
        blocks: Sequence[Tensor | Stored],
        coming: Sequence[Arrival | None],
        rest: Callable[[int], Tensor],
    ) -> None:
        self._plan, self._blocks, self._coming, self._rest = plan, blocks, list(coming), rest
        # Made at the first use of a leaf that a loss sees in another dtype, and kept for the step.
        self._cast: dict[int, Tensor] = {}

    def whole(self, leaf: int) -> Tensor:
        """The whole leaf; waits for it."""
        if leaf not in self._plan.late:
            return self._rest(leaf)
        self._wait(leaf)
        block, dtype = self._blocks[leaf], self._plan.layers[leaf].dtypes.compute
        assert isinstance(block, Tensor)
        if block.dtype == dtype:
            return block
        if leaf not in self._cast:
            self._cast[leaf] = block.to(dtype)
        return self._cast[leaf]

    def settle(self) -> None:
        """Waits for what nobody has used: from here on blocks are read and written as they are."""
        for leaf in range(len(self._coming)):
            self._wait(leaf)

    def _wait(self, leaf: int) -> None:
        arrival, self._coming[leaf] = self._coming[leaf], None
        if arrival is not None:
            arrival.wait()


class _LastRefresh(NamedTuple):
    """The transfers of a state that are still under way, and the channels that they use."""

    arrivals: "weakref.WeakSet[Arrival]"
    channels: "weakref.ref[AnyChannels]"


# By mesh, of its last step: that has waited for those of the step before.
_UNDER_WAY: "weakref.WeakKeyDictionary[Mesh, _LastRefresh]" = weakref.WeakKeyDictionary()


def note_under_way(mesh: Mesh, channels: AnyChannels, arrivals: Iterable[Arrival]) -> None:
    """Records the transfers that a step leaves under way, so that an orderly end of the mesh waits for them."""
    of = _UNDER_WAY[mesh] = _LastRefresh(weakref.WeakSet(arrivals), weakref.ref(channels))

    def settle(why: str) -> None:
        del why
        for arrival in list(of.arrivals):
            with contextlib.suppress(TransportError):  # whoever reads it is told
                arrival.wait()

    mesh.at_close("parameters under way", settle)


def rescue(mesh: Mesh) -> None:
    """Waits a moment for transfers of the state before connections are closed after an error.

    All ranks have started it, so it comes unless one of them has died or was stopped. The state is whole then, and may
    be used by those who have caught the error.
    """
    if (of := _UNDER_WAY.get(mesh)) is not None:
        _pass_by(of, MOMENT)


def _pass_by(of: _LastRefresh, seconds: float) -> None:
    deadline, channels = time.monotonic() + seconds, of.channels()
    while not (all([x.ready() for x in of.arrivals]) and (channels is None or _has_sent(channels))):
        if time.monotonic() > deadline:
            return
        time.sleep(0.002)


def _has_sent(channels: AnyChannels) -> bool:
    return not isinstance(channels, Channels) or channels.has_sent()


@atexit.register
def _at_exit() -> None:
    """Sends the parts that this rank still owes to others when its program ends."""
    for of in list(_UNDER_WAY.values()):
        _pass_by(of, LAST_MOMENT)
