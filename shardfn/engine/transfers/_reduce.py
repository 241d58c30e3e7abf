"""The transpose of storage -> compute: sums gradients over the batch's axes, into the optimizer's layout.

Each leaf's handle has a hook that takes its gradient as soon as autograd has summed all uses, so transfers overlap with
the rest of the backward and the whole gradient is freed at once. Transfers are issued in an agreed order. A leaf that
this rank's loss did not use contributes zeros, so ranks may take different branches.

    LocalSums, ChunkSums   gradients that are added up on this rank before they are sent, by leaf
    SendQueue              units on their way, in the agreed order
    GradientStore          this rank's shares of the sums, until the update takes them
    BackwardResult         the sums over the microbatches of a step, before the update
"""

import dataclasses
import enum
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.capture import mark
from shardfn.collectives import AnyChannels, SumWire
from shardfn.core import IN_FLIGHT_BYTES, Pending, PyTree
from shardfn.engine.agreement import Comms, named_range
from shardfn.engine.loss import LeafUses, Value, WeightedMean, totals
from shardfn.engine.plan import Chunks, Plan

from ._canonical import ChunkSums, Use
from ._gradient_store import GradientStore, LocalSums

# Seconds that a step may spend waiting for gradients in flight, so that they are at most `IN_FLIGHT_BYTES`.
PATIENCE = 2.0

Start = Callable[[int], tuple[Pending[Tensor], int]]
Keep = Callable[[int, Pending[Tensor]], None]


class SentUnit(NamedTuple):
    """A transfer of a single unit.

    Attributes:
        unit: number.
        pending: the transfer.
        nbytes: the bytes that are let go when it has left.
    """

    unit: int
    pending: Pending[Tensor]
    nbytes: int


class SendQueue:
    """The units of a single step's backwards, from complete to arrived.

    Ranks issue the same transfers in the same order: that of `order`, whatever their losses do. A backward begins with
    `begin`. A unit that is `complete` leaves with the next `send`, once all before it in the order have left.

    Args:
        order: the agreed order, empty: as units are complete, which a captured program does alike on all ranks.

    Attributes:
        seen: the order in which units became complete in the last backward.
        in_flight: bytes in flight, whose memory is released on arrival.
        patience: the seconds that are left of `PATIENCE`.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.expect(order)
        self.seen: list[int] = []
        # In this backward: units that are complete, units that do not leave, and the position in the order.
        self._complete, self._stays = set[int](), set[int]()
        self._next = 0
        # The oldest first, and collected in that order: sums of microbatches are added in one order always.
        self._sent: list[SentUnit] = []
        self.in_flight, self.patience = 0, PATIENCE

    def expect(self, order: Sequence[int]) -> None:
        """Sets the order, before any unit has left."""
        self.order, self._learns = list(order), not order

    def begin(self, stays: set[int]) -> None:
        """Starts a backward, after which the gradients of the units `stays` are kept on this rank."""
        self._next, self.seen, self._complete, self._stays = 0, [], set(), stays

    def complete(self, unit: int) -> None:
        """Notes that a unit has all of its gradients."""
        self.seen.append(unit)
        self._complete.add(unit)
        if self._learns and unit not in self.order:
            self.order.append(unit)

    # `start` and `keep` are arguments, and no attributes: a queue that knew its owner's methods would be a cycle, and
    # keep a step's gradients until the garbage collector comes.

    def send(self, start: Start) -> None:
        """Sends the units whose turn it is.

        Args:
            start: sends a unit, and returns the transfer and the bytes that it lets go.
        """
        while self._next < len(self.order):
            unit = self.order[self._next]
            if unit not in self._stays:
                if unit not in self._complete:
                    return
                pending, nbytes = start(unit)
                self._sent.append(SentUnit(unit, pending, nbytes))
                self.in_flight += nbytes
            self._next += 1

    def collect(self, keep: Keep, *, block: bool) -> None:
        """Hands the units that have arrived to `keep`. With `block`, waits for all."""
        while self._sent and (block or self._sent[0].pending.done()):
            unit, pending, nbytes = self._sent.pop(0)
            keep(unit, pending)
            self.in_flight -= nbytes

    def hold_back(self, keep: Keep) -> None:
        """Waits while too many bytes are in flight, so that whole gradients do not pile up on a slow network.

        The time of a backward's waits is bounded, because a rank in another branch of the loss may need this rank's
        next gather before it can send its part of a sum.
        """
        while self.in_flight > IN_FLIGHT_BYTES and self.patience > 0 and self._sent:
            start = time.monotonic()
            time.sleep(1e-4)
            self.collect(keep, block=False)
            self.patience -= time.monotonic() - start


class Stage(enum.Enum):
    """The stage of a reducer: `begin` leads from IDLE to a backward, `end` back to IDLE, and after LAST to DONE."""

    IDLE = enum.auto()
    # A backward whose gradients stay on this rank.
    ADDS = enum.auto()
    # A backward whose gradients leave; later ones are added to them.
    SENDS = enum.auto()
    # The last backward: its gradients leave, and complete the sums.
    LAST = enum.auto()
    DONE = enum.auto()


class Reducer:
    """Collects one step's gradients. Made anew each step.

    Backwards run one at a time, of any microbatch: `begin`, any number of `take`s, `end`; after the last, `gradients`.
    All ranks begin backwards in the same order and with the same `send` and `last`.

    Args:
        plan: the layout.
        channels: the step's communicators.
        order: the agreed order in which units are sent, empty: as they become ready, which a captured program does
            alike on all ranks. See `expect`.
        late_axes: axes whose ranks run backwards of their own, so that the gradients of shared leaves are summed along
            them when each has run its last one.
        chunks: this rank's chunks, if each backward is of one and they are summed by their tree, else None.
        uses: uses of layers that several functions use, with chunks.

    Attributes:
        stage: stage.
        queue: the units on their way.
        store: the sums.
        chunks: chunks of this rank, or None.
        uses: uses of layers that several functions use.
        received: whether any leaf has got a gradient on this rank, in any backward so far.
    """

    def __init__(
        self,
        plan: Plan,
        channels: AnyChannels,
        order: Sequence[int],
        late_axes: tuple[str, ...] = (),
        chunks: Chunks | None = None,
        uses: Mapping[int, LeafUses] | None = None,
    ) -> None:
        self._plan, self._channels = plan, channels
        ways = [plan.layers[unit.leaves[0]].ways.reduce for unit in plan.reduce_units]
        self._wires = [SumWire(channels, way, x.packing) for way, x in zip(ways, plan.reduce_units, strict=True)]
        self._local = LocalSums(plan)
        self.chunks, self.uses = chunks, uses or {}
        self._chunks = None if chunks is None else ChunkSums(plan, chunks, self.uses)
        self.store = GradientStore(plan, self._wires, late_axes, self._chunks)
        self.queue = SendQueue(order)
        self.stage, self.received = Stage.IDLE, False
        # By leaf: gradients of this backward that have not been sent. By unit: how many are still to come.
        self._grads: dict[int, Tensor] = {}
        self._missing: list[int] = []

    @property
    def collects(self) -> bool:
        """Returns whether a backward has begun and not ended.

        A gradient at another time comes from a backward of the user, and is not collected.
        """
        return self.stage in (Stage.ADDS, Stage.SENDS, Stage.LAST)

    def begin(self, *, send: bool, last: bool, microbatch: int = 0) -> None:
        """Starts a backward. With `send=False` gradients are added up on this rank and sent with a later backward's.

        Args:
            send: whether gradients are sent in this backward.
            last: whether the backward is this rank's last one.
            microbatch: number of the microbatch, for sums by chunk.
        """
        assert self.stage is Stage.IDLE
        self.stage = Stage.LAST if last else Stage.SENDS if send else Stage.ADDS
        stays = self._find_staying_units()
        self._missing = [0 if u in stays else len(unit.leaves) for u, unit in enumerate(self._plan.reduce_units)]
        for leaf, uses in self.uses.items():
            unit = self._plan.reduce_unit_of.get(leaf)
            if unit is not None and unit not in stays:
                self._missing[unit] += max(sum(uses.here), 1) - 1
        self.queue.begin(stays)
        if self._chunks is not None:
            self._chunks.begin(microbatch)

    def take(self, use: Use, grad: Tensor) -> None:
        """Takes the gradient of a leaf, summed over its uses in this backward, or in one function of a pipeline.

        `grad` is an alias that only the caller has. `grad` is written to only if no other tensor shares its memory.
        """
        mark(grad, "gradient_to", self._plan.layers[use[0]].entry)
        if self._put_gradient(use, grad):
            self.queue.send(self._start_unit)
        if self.stage is not Stage.ADDS:
            # At each chance, so that messages go as they come.
            keep = self._take_arrivals()
            self.queue.collect(keep, block=False)
            self.queue.hold_back(keep)

    def take_all(self, grads: list[tuple[Use, Tensor]]) -> None:
        """Takes the gradients of several leaves, in an eager step. The list is emptied."""
        while grads:
            self._put_gradient(*grads.pop())
        self.queue.send(self._start_unit)

    def end(self) -> None:
        """Sends the units that are left, with zeros for leaves without a gradient, and waits for everything."""
        assert self.collects
        if self.stage is Stage.ADDS:
            self.stage = Stage.IDLE
            return
        for u, unit in enumerate(self._plan.reduce_units):
            if self._missing[u]:
                if self._chunks is None:
                    self._grads.update({i: self._zero_gradient(i) for i in unit.leaves if i not in self._grads})
                self._missing[u] = 0
                self.queue.complete(u)
        self.queue.send(self._start_unit)
        self.queue.collect(self._take_arrivals(), block=True)
        if self.stage is Stage.LAST:
            self.store.finish()
        self.stage = Stage.DONE if self.stage is Stage.LAST else Stage.IDLE

    def gradients(self) -> GradientStore:
        """Returns the sums, cut into the parts of leaves that the optimizer takes."""
        assert self.stage is Stage.DONE
        self.store.split(self.queue.order, self._local.has_made)
        self._channels.flush()  # the optimizer may write to tensors that were sent
        return self.store

    def _take_arrivals(self) -> Keep:
        """Returns the function that takes units as they arrive in this backward."""
        return functools.partial(self.store.receive, last=self.stage is Stage.LAST)

    def _find_staying_units(self) -> set[int]:
        """Returns the units that do not leave in this backward."""
        units = range(len(self._wires))
        if self.stage is Stage.ADDS:
            return set(units)
        # One that no other rank gets is added up here until the last backward.
        return set() if self.stage is Stage.LAST else {u for u in units if self.store.is_alone[u]}

    def _put_gradient(self, use: Use, grad: Tensor) -> bool:
        """Adds a gradient to the sum of its leaf. Returns whether its unit is now complete and to be sent."""
        # Also in a backward that does not send: whether anything is trained is asked of the whole step.
        self.received = True
        leaf = use[0]
        unit = self._plan.reduce_unit_of[leaf]
        goes = self._missing[unit] > 0
        if self._chunks is not None:
            self._chunks.add(use, grad.to(self._plan.layers[leaf].dtypes.accum))
        elif not goes:
            self._local.add(leaf, grad, stays=self.store.is_alone[unit])
        else:
            stays = self.store.is_alone[unit]
            self._grads[leaf] = self._local.total(leaf, grad, stays=stays) if self._local else grad
        if not goes:
            return False
        self._missing[unit] -= 1
        if self._missing[unit]:
            return False
        self.queue.complete(unit)
        return True

    def _start_unit(self, unit: int) -> tuple[Pending[Tensor], int]:
        """Sends a unit's gradients. Also the bytes that it lets go: none of one that is made whole in its message."""
        last, wire, x = self.stage is Stage.LAST, self._wires[unit], self._plan.reduce_units[unit]
        nbytes = x.nbytes if wire.scatters or not last else 0
        with named_range("reduce", self._plan.layers, x.leaves):
            if self._chunks is not None:
                separate = self.store.is_late(unit)
                send = functools.partial(wire.exchange, joins=last)
                return self._chunks.send(x.leaves, send, separate=separate), nbytes
            # Each gradient goes when the message has it, and not after the transfer.
            grads = [self._grads.pop(i).to(self._plan.layers[i].dtypes.reduce) for i in x.leaves]
            if last and self.store.is_summed_in_one(unit):
                return wire.sum_whole(grads), nbytes
            return wire.start(grads, joins=last), nbytes

    def _zero_gradient(self, leaf: int) -> Tensor:
        """Returns the gradient of a leaf that has got none in this backward."""
        local = self._local.pop(leaf)
        if local is not None:
            return local
        layout = self._plan.layers[leaf]
        return torch.zeros(layout.block, dtype=layout.dtypes.reduce, device=self._plan.mesh.device)


# How the outcome of a plan begins where gradients must be divided by the weight of the whole batch.
WEIGHTED = "a WeightedMean"


@dataclasses.dataclass
class BackwardResult:
    """The sums over this rank's microbatches, the gradients summed over ranks, and the last model state."""

    total: Tensor
    weight: Tensor | None
    aux: dict[str, WeightedMean]
    num_microbatches: int
    reducer: Reducer
    model_state: PyTree
    values: list[Value]


def outcome_of(values: list[Value], num: int, reducer: Reducer, model_state: PyTree) -> BackwardResult:
    """Returns the outcome of the values of `num` microbatches, whose gradients `reducer` has summed."""
    total, weight = totals(values)
    aux: dict[str, WeightedMean] = {}
    for name in sorted(values[0].aux):
        pairs = [v.aux[name] for v in values]
        aux[name] = WeightedMean(sum(p.total for p in pairs), sum(p.weight for p in pairs))  # pyright: ignore[reportArgumentType]
    return BackwardResult(total, weight, aux, num, reducer, model_state, values)


def agree_on_outcome(plan: Plan, comms: Comms, out: BackwardResult) -> None:
    """Compares the kinds of values that the losses of the ranks return, in the first step of a plan."""
    if plan.learnt.outcome is None:
        outcome = f"{'a mean' if out.weight is None else WEIGHTED} and aux {sorted(out.aux)}"
        plan.learnt.take_outcome(outcome)
        comms.control.agree("the result of the loss", outcome)
