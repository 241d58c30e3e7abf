"""Storage -> compute for leaves that are sharded at rest: gather late, free early, prefetch along the agreed order.

Which transfers start, and when, depends only on the position in the agreed order. So all ranks start the same
transfers in the same order, whatever branches their own data leads them to.

If a leaf is gathered in two hops, the result of the first hop is kept for the whole step, as parameters do not change.
`Gathered` is one unit of leaves between the start of its transfer and its last use.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import (
    AnyChannels,
    AnyRounds,
    GatherWire,
    gather_wires,
)
from shardfn.core import Pending, RankError, StoredValue
from shardfn.engine.agreement import named_range
from shardfn.engine.plan import Turn, UseOrder
from shardfn.leaves import LeafLayout, Unit
from shardfn.memory import Fetch
from shardfn.state import is_read, prefetch

# A piece of a leaf that this rank keeps: on the device, or on its way there.
Piece = Tensor | Fetch


class GatheredUnit:
    """The leaves of a single unit, being gathered or complete.

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
        self.arrived = False
        # Neither sent nor packed: only the move from its memory is waited for.
        if wire.size == 1 and len(pieces) == 1 and isinstance(pieces[0], Fetch):
            self._pending = pieces[0]
            self.move_if_ready()
            return
        self._pending = wire.start(arrived(pieces))

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
            self._tensors = self._wire.unpack(self._out)
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


# The codes that a rank sends in a round where it wants no unit: it is done; it failed. It is done with the step's
# backwards, without a gradient from any.
DONE, FAILED, IDLE = -1, -2, -3
# How much further ahead than leaves are gathered their pieces cross the far axes, and are read from the disk.
FAR_AHEAD, READ_AHEAD = 2, 3


class Gatherer:
    """Serves the whole leaves of a single step. Made anew each step. Only `order` is kept.

    Args:
        leaves: the layout.
        units: groups of leaves gathered together.
        blocks: this rank's piece of each leaf as stored. Those of leaves in no unit are not read.
        channels: the step's communicators.
        rounds: agreement between the ranks that share the leaves.
        order: the agreed order of use; extended in place.
        window: bytes of whole leaves that may be alive ahead of their use.
        device: where leaves are wanted.
        keep: whether the result of the first hop is kept, for later gathers of the leaf.
    """

    def __init__(
        self,
        leaves: Sequence[LeafLayout],
        units: Sequence[Unit],
        blocks: Sequence[StoredValue],
        channels: AnyChannels,
        rounds: AnyRounds,
        order: UseOrder,
        window: int,
        device: torch.device,
        *,
        keep: bool = True,
    ) -> None:
        self._leaves, self._units, self._blocks, self._device = leaves, units, blocks, device
        self._on_disk = {u for u, unit in enumerate(units) if any(is_read(blocks[i]) for i in unit.leaves)}
        # Begun ahead, on this rank alone; taken when the unit is issued or sets out.
        self._reads: dict[int, list[Piece]] = {}
        self._keep = keep
        self._wires = gather_wires(channels, [(leaves[unit.leaves[0]].ways.use, unit.packing) for unit in units])
        self._hops = {u for u, wire in enumerate(self._wires) if wire.in_two}
        self._brought: dict[int, Pending[Tensor] | Tensor] = {}
        self._channels, self._rounds, self._order, self._window = channels, rounds, order, window
        # Those of the largest rank's blocks: windows are the same on all ranks.
        self._sizes = [u.nbytes for u in units]
        self._slot = {i: (u, k) for u, unit in enumerate(units) for k, i in enumerate(unit.leaves)}
        # The transfers to issue depend on the position in the agreed order alone, never on arrivals or on this rank's
        # pieces: so all ranks issue the same transfers in the same order. Only reads from the disk are local.
        self._scheduled: dict[int, GatheredUnit] = {}
        # The unit that this rank has asked for: held until it asks for another, or the phase ends.
        self._asked: tuple[int, GatheredUnit] | None = None
        # Let go before they arrived, empty after `end_phase`.
        self._unused: list[GatheredUnit] = []
        self._phase, self._pos = -1, 0
        # Units that were gathered in this phase because a rank asked: the same on all ranks. They join the order at its
        # end.
        self._served: list[int] = []
        # Void as soon as the order grows; from then on moves are worked out one by one.
        self._schedule: list[list[Turn]] | None = order.schedule(self._sizes, window)

    def begin_phase(self) -> None:
        """Starts the next phase of the agreed order."""
        self._phase, self._pos, self._served = self._phase + 1, 0, []
        self._order.phase(self._phase)
        self._read_ahead()

    def whole(self, leaf: int) -> Tensor:
        """Returns the whole leaf. Waits for it, and starts the gathers of leaves that are used next."""
        unit, slot = self._slot[leaf]
        with named_range("gather", self._leaves, self._units[unit].leaves, leaf):
            return self._request_unit(unit).leaf(slot)

    def end_phase(self, *, ask: bool, says: int = DONE) -> bool:
        """Starts the gathers of the agreed order that this rank did not use, and serves ranks that need more.

        Args:
            ask: whether to exchange a message even if no leaf is gathered, to hear of errors before waiting.
            says: the code that this rank sends to the others: `DONE` or `IDLE`.

        Returns:
            Whether all ranks have sent `IDLE`; the same on all of them.

        Raises:
            RankError: another rank failed.
        """
        if not self._units and not ask:
            return False
        self._catch_up()
        # A rank that is done serves until all are: it has a piece of each unit that another still wants.
        wants = self._ask_ranks(says)
        while any(w >= 0 for w in wants):
            wants = self._ask_ranks(says)
        # Not before: within a phase the order is the one that all ranks began with.
        if self._served:
            self._order.extend(self._phase, self._served)
            self._schedule = None
        self._asked = None
        # Between phases only scheduled or brought units are in flight.
        for whole in self._unused:
            whole.arrive()
        self._unused.clear()
        return all(w == IDLE for w in wants)

    def fail(self, what: str) -> None:
        """Sends the other ranks word that this one cannot continue. They raise `RankError` at their next agreement."""
        if self._phase < 0:
            self.begin_phase()
        self._catch_up()
        # At the point where the others ask: their next round receives it, and all continue to the gather with the
        # reason.
        wants = self._rounds.exchange(FAILED)
        self._rounds.gather((self._rounds.rank, what if FAILED in wants else ""))

    def close(self) -> None:
        """Drops everything and waits until this rank's pieces may be written again."""
        for whole in self._scheduled.values():
            whole.arrive()
        for brought in self._brought.values():
            if isinstance(brought, Pending):
                brought.result()
        self._scheduled.clear()
        self._brought.clear()
        self._reads.clear()
        self._asked = None
        self._channels.flush()

    def _request_unit(self, unit: int) -> GatheredUnit:
        if self._asked is not None and self._asked[0] == unit:
            return self._asked[1]
        order = self._order.phase(self._phase)
        if self._pos and order[self._pos - 1] == unit and unit in self._scheduled:
            return self._scheduled[unit]
        if self._pos < len(order) and order[self._pos] == unit:
            self._step()
            return self._scheduled[unit]
        # Units in between are issued and let go unused, as other ranks may use them.
        found = self._order.find(self._phase, self._pos, unit)
        # In no later position, it may still be here from an earlier one.
        if found is None:
            return self._scheduled[unit] if unit in self._scheduled else self._need_unplanned(unit)
        while self._pos <= found:
            self._step()
        return self._scheduled[unit]

    def _step(self) -> None:
        move = self._advance_fetches() if self._schedule is None else self._schedule[self._phase][self._pos]
        for unit in move.drop:
            self._drop_unit(self._scheduled.pop(unit))
        self._read_ahead()
        self._bring_ahead()
        if self._on_disk:
            for unit in self._on_disk.intersection(self._scheduled):
                self._scheduled[unit].move_if_ready()
        for unit in move.issue:
            with named_range("gather", self._leaves, self._units[unit].leaves):
                self._scheduled[unit] = self._issue_gather(unit)
        self._pos += 1

    def _read_ahead(self) -> None:
        """Begins to read pieces from disk that will be needed. Unlike transfers, ranks need not do so alike."""
        if not self._on_disk:
            return
        # Further than transfers are issued, as a disk is slower; pieces that are read early wait on the host.
        ahead = self._order.window(self._phase, self._pos, self._sizes, READ_AHEAD * self._window)
        for unit in ahead:
            here = unit in self._scheduled or unit in self._brought or unit in self._reads
            if unit in self._on_disk and not here:
                self._reads[unit] = self._fetch_pieces(unit)

    def _bring_ahead(self) -> None:
        """Starts first hops, across the far axes, before they are needed; like all transfers, by position alone."""
        if self._hops.issubset(self._brought):
            return
        for unit in self._order.window(self._phase, self._pos, self._sizes, FAR_AHEAD * self._window):
            if unit in self._hops and unit not in self._scheduled and unit not in self._brought:
                with named_range("gather", self._leaves, self._units[unit].leaves):
                    self._brought[unit] = self._bring_unit(unit)

    def _fetch_pieces(self, unit: int) -> list[Piece]:
        """This rank's pieces of the leaves of a unit. Those in other memories are being fetched."""
        out: list[Piece] = []
        for i in self._units[unit].leaves:
            out.append(prefetch(self._blocks[i], self._leaves[i].home, self._device))
        return out

    def _advance_fetches(self) -> Turn:
        ahead = self._order.window(self._phase, self._pos, self._sizes, self._window)
        return Turn.between(self._scheduled, ahead)

    def _catch_up(self) -> None:
        while self._pos < len(self._order.phase(self._phase)):
            self._step()

    def _need_unplanned(self, unit: int) -> GatheredUnit:
        self._catch_up()
        self._asked = None
        # A round serves the units that any rank wants, this rank's among them.
        while self._asked is None:
            self._ask_ranks(unit)
        return self._asked[1]

    def _ask_ranks(self, want: int) -> list[int]:
        """One round of requests: gathers the units that any rank needs.

        Returns each rank's request: a unit, or a code below 0.
        """
        wants = self._rounds.exchange(want)
        if FAILED in wants:
            _raise_failed(self._rounds, wants)
        # In rank order, each once: all ranks have heard the same, and send the same.
        for unit in dict.fromkeys(w for w in wants if w >= 0):
            with named_range("gather", self._leaves, self._units[unit].leaves):
                whole = self._issue_gather(unit)
            self._served.append(unit)
            if unit == want:
                self._asked = (unit, whole)
            else:
                self._drop_unit(whole)
        return wants

    def _drop_unit(self, whole: GatheredUnit) -> None:
        """Drops a unit. One that was never used must still arrive, since other ranks may wait for its transfer."""
        if not whole.arrived:
            self._unused.append(whole)

    def _issue_gather(self, unit: int) -> GatheredUnit:
        members = [self._leaves[i] for i in self._units[unit].leaves]
        brought = [self._take_secondary(unit)] if unit in self._hops else None
        return GatheredUnit(self._wires[unit], brought or self._rank_pieces(unit), members)

    def _take_secondary(self, unit: int) -> Tensor:
        """Returns the result of a unit's first hop."""
        brought = self._brought.pop(unit, None)
        brought = self._bring_unit(unit) if brought is None else brought
        piece = brought.result() if isinstance(brought, Pending) else brought
        if self._keep:
            self._brought[unit] = piece
        return piece

    def _bring_unit(self, unit: int) -> Pending[Tensor]:
        return self._wires[unit].bring(arrived(self._rank_pieces(unit)))

    def _rank_pieces(self, unit: int) -> list[Piece]:
        return self._reads.pop(unit, None) or self._fetch_pieces(unit)


def _raise_failed(rounds: AnyRounds, codes: Sequence[int]) -> None:
    texts: list[Any] = rounds.gather((rounds.rank, ""))
    causes = [f"  - rank {rank} raised {text}" for (rank, text), c in zip(texts, codes, strict=True) if c == FAILED]
    raise RankError("\n".join(["another rank failed in this step; the state passed in is unchanged.", *causes]))
