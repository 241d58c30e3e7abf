"""Sums of gradients on this rank: of backwards that are not sent, and shares of the sums over ranks.

LocalSums        gradients that are added up before any of them is sent, by leaf
GradientStore    shares from arrival to the update, each in the memory of the wait
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.capture import traced_once
from shardfn.collectives import SumWire, dealt, is_sole_owner, may_be_added_to, psum
from shardfn.core import IN_FLIGHT_BYTES, MemoryKind, Pending, Placement, StoredValue, is_in_memory, load
from shardfn.engine.agreement import named_range
from shardfn.engine.plan import Plan
from shardfn.leaves import LeafLayout
from shardfn.memory import on_host, to_host
from shardfn.optim import large_square, leaf_squares, sum_squares
from shardfn.state import OverlappedUpdate, fetch, slices_of, stack_values, start_move, store

from ._canonical import ChunkSums, add_in_order
from ._pools import pool_of


def added(before: Tensor | None, part: Tensor, key: int, summed: set[int]) -> Tensor:
    """Returns `before + part`; adds in place where no other tensor shares the memory of `before`.

    A sum that was made here has its own memory. The first summand is autograd's, or came in a message: the caller holds
    an alias of it, and others may hold tensors that share its memory.

    Args:
        before: sum so far. None: `part` is the first summand.
        part: next summand, of the same dtype.
        key: key of the sum.
        summed: keys whose sum so far was made here; is changed.
    """
    if before is None:
        summed.discard(key)
        return part
    out = before.add_(part) if key in summed or may_be_added_to(before) else before + part
    if type(out) is Tensor:  # not in a capture: a graph's memory is planned when it is compiled
        summed.add(key)
    return out


class LocalSums:
    """One step's sums of backwards that did not send. Gradients must be aliases that only the caller has.

    The first gradient of a leaf is kept without a copy, since others may hold its memory. The second is added to it in
    place if no other does, and all others in place. Sums of the layers of one stack that are not sent lie side by side
    in memory of their own, so that they need not be joined: the second gradient's sum is written there.

    Args:
        plan: the layout.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._leaves = plan, plan.layers
        self._at: dict[int, Tensor] = {}
        # The leaves whose sum has been made here, so that its memory is this step's alone. See `added`.
        self._made: set[int] = set()
        self._stacks: dict[int, Tensor] = {}

    def __bool__(self) -> bool:
        """Returns whether anything has been added up."""
        return bool(self._at or self._made)

    def add(self, leaf: int, grad: Tensor, *, stays: bool) -> None:
        """Adds a gradient.

        Args:
            leaf: the leaf's number.
            grad: the gradient.
            stays: whether the sum is not sent.
        """
        before = self._at.get(leaf)
        if before is not None and leaf in self._made:  # as nearly always, of many microbatches
            before.add_(grad.to(before.dtype))
            return
        self._at[leaf] = self._add_gradient(before, leaf, grad, stays)

    def total(self, leaf: int, grad: Tensor, *, stays: bool) -> Tensor:
        """Returns the sum with a last gradient, which is let go. A gradient that is alone is as it came."""
        before = self._at.pop(leaf, None)
        if before is None:
            self._made.discard(leaf)
            return grad
        return self._add_gradient(before, leaf, grad, stays)

    def pop(self, leaf: int) -> Tensor | None:
        """Returns the sum so far, which is let go, or None if nothing was added."""
        return self._at.pop(leaf, None)

    def has_made(self, leaf: int) -> bool:
        """Returns whether the last sum of a leaf was made here."""
        return leaf in self._made

    def _add_gradient(self, before: Tensor | None, leaf: int, grad: Tensor, stays: bool) -> Tensor:
        # Gradients are added up in the dtype of sums.
        grad = grad.to(self._leaves[leaf].dtypes.accum)
        first = stays and leaf not in self._made and type(before) is Tensor and type(grad) is Tensor
        row = self._find_row(leaf, grad) if first else None
        if before is None or row is None:
            return added(before, grad, leaf, self._made)
        self._made.add(leaf)
        return torch.add(before, grad, out=row)

    def _find_row(self, leaf: int, like: Tensor) -> Tensor | None:
        """Returns the place of the sum of a stack's layer, or None for other leaves."""
        place = self._find_places.get(leaf)
        if place is None:
            return None
        first, num = place
        if first not in self._stacks:
            self._stacks[first] = like.new_empty((num, *like.shape))
        return self._stacks[first][leaf - first]

    @functools.cached_property
    def _find_places(self) -> dict[int, tuple[int, int]]:
        """Returns the first layer and the number of layers of the stack, by layer."""
        stacks = [(first, len(x.layers)) for first, x in zip(self._plan.first_layers, self._plan.leaves, strict=True)]
        return {first + k: (first, num) for first, num in stacks for k in range(num)}


# Bytes of shares that may be on their way: the device holds them until they are on the host, which holds those that
# continue to the disk until they are there.
LEAVING_BYTES = IN_FLIGHT_BYTES
_ON_DEVICE = Placement()


class GradientStore:
    """The gradients of a step by unit, and at last by leaf, each in memory until the update.

    `receive` adds the part of a unit that arrives. After the last part, `finish` sums along the axes that are left, and
    `split` cuts the sums into the parts of leaves that the optimizer takes. The update calls `take` for each leaf.
    Between `finish` and `split`, `share` returns the share of a unit on this rank, 1-D: the shares of all ranks are
    disjoint.

    Args:
        plan: the layout.
        wires: the wire on which parts arrive, by unit.
        late_axes: axes along which the gradients of shared leaves are summed by `finish`.
        chunks: sums by chunk, or None. With chunks a late unit has a row for each use, and rows are added up last.
    """

    def __init__(
        self, plan: Plan, wires: Sequence[SumWire], late_axes: tuple[str, ...], chunks: ChunkSums | None = None
    ) -> None:
        self._plan, self._wires, self._late_axes, self._chunks = plan, wires, late_axes, chunks
        # Leaves are made whole during the backward, but not while parameters use the same channel.
        self._overlaps = all(leaf.used.dim is None for leaf in plan.layers)
        self._pool = pool_of(plan)
        # All ranks along these axes have the same units.
        members = [[plan.layers[i] for i in unit.leaves] for unit in plan.reduce_units]
        self._late = {u for u, own in enumerate(members) if not {*late_axes}.issubset(own[0].distinct_axes)}
        homes = [_choose_home(own, wire) for own, wire in zip(members, wires, strict=True)]
        self._homes: list[MemoryKind] = [x.memory_kind for x in homes]
        self._stay = [x.is_plain for x in homes]
        self._members, self._dtypes = members, [own[0].dtypes.accum for own in members]
        # A unit that is kept elsewhere than on the device is in `_coming` (with the sum so far in `_at`, if there is
        # a sum), then in `_writing` if it continues to disk, then in `_at`. A unit that the update has taken early is
        # in
        # `_taken` only. `_leaving` are the bytes that the way of each still holds, the oldest first. The thread of an
        # update touches none of them: it gets its gradients by `OverlappedUpdate.take`.
        self._at: dict[int, StoredValue] = {}
        self._coming: dict[int, Pending[Tensor]] = {}
        self._writing: dict[int, Pending[StoredValue]] = {}
        self._leaving: dict[int, int] = {}
        # The units whose tensor in `_at` is a sum. See `added`.
        self._summed: set[int] = set()
        self._ahead: OverlappedUpdate | None = None
        self._taken: dict[int, Pending[Any]] = {}
        # By unit that is wanted whole, its sum: here, or on its way. By layer, the parts for the optimizer.
        self._wholes: dict[int, Tensor | Pending[Tensor]] = {}
        self._parts: dict[int, StoredValue] = {}

    def __contains__(self, unit: int) -> bool:
        return unit in self._at or unit in self._coming or unit in self._writing

    @property
    def units(self) -> list[int]:
        """Returns the units that have a share here, or have gone into an update that runs already; sorted."""
        return sorted({*self._at, *self._coming, *self._writing, *self._taken})

    def give_to(self, ahead: OverlappedUpdate) -> None:
        """From now on gives complete gradients to an update that runs already, if it takes them."""
        self._ahead = ahead

    def share(self, unit: int) -> StoredValue:
        """Returns this rank's share of a unit, in the memory where it waits."""
        self._wait_for_share(unit)
        return self._at[unit]

    def squares(self, units: Sequence[int]) -> Tensor:
        """Returns the sum of squares of each share; shares on disk are loaded in sequence."""
        parts = [x for u in units if u not in self._taken and isinstance(x := self.share(u), Tensor)]
        if len(parts) < len(units):
            return torch.cat([self._wait_for_square(u) for u in units])
        return leaf_squares(parts, None, large=_square_large)

    def _wait_for_square(self, unit: int) -> Tensor:
        """Returns the sum of squares, [1], of a unit, and waits for it, also if it has gone into an update."""
        if self._ahead is not None and unit in self._taken:
            return self._ahead.square(unit)
        return sum_squares([load(self.share(unit))])

    def is_late(self, unit: int) -> bool:
        """Returns whether a unit is summed along other axes after the last backward."""
        return unit in self._late

    def is_summed_in_one(self, unit: int) -> bool:
        """Returns whether one transfer makes a unit's sum whole: not if it is added to earlier or to later parts.

        The same when it is sent and when it arrives, as the unit is not added to in between.
        """
        alone = unit not in self and unit not in self._late and self._plan.chunks is None
        return alone and self._overlaps and self._wires[unit].sums_in_one

    @functools.cached_property
    def is_alone(self) -> list[bool]:
        """By unit, whether its sum is of this rank's gradients, unconverted and on the device: these are not sent."""
        if self._plan.chunks is not None:
            return [False] * len(self._wires)
        return [
            wire.is_alone and self._stay[u] and all(x.dtypes.reduce == x.dtypes.accum for x in self._members[u])
            for u, wire in enumerate(self._wires)
        ]

    def receive(self, unit: int, pending: Pending[Tensor], *, last: bool) -> None:
        """Waits for a unit: its whole sum, or this rank's part, added to the earlier parts."""
        with named_range("reduce", self._plan.layers, self._plan.reduce_units[unit].leaves):
            x = pending.result()
        if last and self.is_summed_in_one(unit):
            self._wholes[unit] = x
            # A half each, so that a norm counts every element once.
            halves = x.split_with_sizes(dealt(x.numel(), 2))
            self._add_share(unit, halves[self._wires[unit].index], last=True)
            return
        self._add_share(unit, x, last=last)
        wire = self._wires[unit]
        if last and self._overlaps and unit not in self._late and not wire.scatters and wire.size > 1:
            with named_range("reduce", self._plan.layers, self._plan.reduce_units[unit].leaves):
                self._join_unit(unit)

    def finish(self) -> None:
        """Sums along the remaining axes, once a step, when its microbatches have been added up."""
        for u in self.units:
            if self._wires[u].scatters:
                leaf = self._members[u][0]
                if self._plan.mesh.axis_size(leaf.extra_axes) > 1:
                    self._add_share(u, psum(self._pop_on_device(u).to(leaf.dtypes.reduce), leaf.extra_axes), last=True)
                self._end_sum(u)
        for u in sorted(self._late):
            total = psum(self._pop_on_device(u), self._late_axes)
            if self._chunks is not None:  # at most one rank has had a row of numbers, so that this sum has no order
                total = add_in_order(total.chunk(self._chunks.num_uses(self._plan.reduce_units[u].leaves)))
            self._add_share(u, total, last=True)
            self._end_sum(u)

    def split(self, order: Sequence[int], is_made_here: Callable[[int], bool]) -> None:
        """Cuts the sums into the parts of leaves that the optimizer takes: this rank's rows, or the whole block.

        Args:
            order: order of the units, the same on all ranks.
            is_made_here: whether the memory of a layer's sum was made on this rank, for the layer alone.
        """
        for u in order:
            if u not in self._taken:
                self._parts.update(self._split_unit(u, is_made_here))

    def take(self, leaf: int) -> StoredValue:
        """Returns and lets go of the part of a leaf's sum that the optimizer takes. Each leaf is taken once."""
        first, layers = self._plan.first_layers[leaf], self._plan.leaves[leaf].layers
        if not layers:
            return self._parts.pop(first)
        return stack_values([self._parts.pop(first + k) for k in range(len(layers))])

    def take_all(self) -> dict[int, StoredValue]:
        """Returns and lets go of the parts that the optimizer takes, by leaf."""
        return {i: self.take(i) for i, leaf in enumerate(self._plan.leaves) if leaf.trainable}

    def _split_unit(self, unit: int, is_made_here: Callable[[int], bool]) -> Iterator[tuple[int, StoredValue]]:
        leaves, members, wire = self._plan.reduce_units[unit].leaves, self._members[unit], self._wires[unit]
        arrives, home = wire.scatters or wire.size == 1, self._homes[unit]
        with named_range("reduce", self._plan.layers, leaves):
            flat = self._pop_share(unit) if arrives else self._wait_for_whole(unit)
        if isinstance(flat, Tensor):
            flat = flat.to(self._dtypes[unit])
            here = wire.size == 1 and self._stay[unit]
            if here and not (all(map(is_made_here, leaves)) or is_sole_owner(flat)):
                flat = flat.clone()  # autograd may hand one tensor to two leaves, or one that is kept elsewhere
        pieces = wire.split(flat) if isinstance(flat, Tensor) else slices_of(flat, wire.packing.shapes(wire.index))
        if not arrives:
            for place in (self._coming, self._writing, self._at):
                place.pop(unit, None)
        if not wire.scatters:
            pieces = [self._land_part(leaf, x, home) for leaf, x in zip(members, pieces, strict=True)]
        return zip(leaves, pieces, strict=True)

    def _land_part(self, leaf: LeafLayout, x: StoredValue, home: MemoryKind) -> StoredValue:
        """Returns the part of a whole sum that the optimizer takes, in the memory where it waits for the update."""
        summed = leaf.ways.summed
        if leaf.dim is not None and summed.spec == leaf.shard:
            x = leaf.rows(load(x), self._plan.zero_rank(leaf)).contiguous()
        return x if is_in_memory(home, summed.memory_kind) else store(load(x), summed, self._pool)

    def _wait_for_whole(self, unit: int) -> Tensor:
        if unit not in self._wholes:
            self._join_unit(unit)
        whole = self._wholes.pop(unit)
        return whole.result() if isinstance(whole, Pending) else whole

    def _join_unit(self, unit: int) -> None:
        part = self.share(unit)
        assert isinstance(part, Tensor)
        self._wholes[unit] = self._wires[unit].join(part)

    def _pop_share(self, unit: int) -> StoredValue:
        self._wait_for_share(unit)
        return self._at.pop(unit)

    def _pop_on_device(self, unit: int) -> Tensor:
        """Returns the share of a unit, which is let go. On the device, wherever it has waited."""
        return fetch(self._pop_share(unit), self._homes[unit], self._plan.mesh.device)

    def _add_share(self, unit: int, part: Tensor, *, last: bool) -> None:
        """Adds a share that lies on the device. A share that is kept elsewhere begins its way, and is added there.

        Args:
            unit: number of the unit.
            part: the share, in the dtype in which it travelled. Without other shares it stays on the device in this
                dtype, and a whole gradient travels on in it.
            last: whether the share is the last.
        """
        if not self._stay[unit]:
            self._wait_for_share(unit)
            if last and self._ahead is not None and unit in self._ahead.units:
                taken = self._ahead.take(unit, to_host(part), self._at.pop(unit, None), self._dtypes[unit])
                self._taken[unit] = taken
            else:
                self._coming[unit] = to_host(part)
            self._leaving[unit] = part.nbytes
            self._hold_back()
            return
        before = self._at.get(unit)
        assert before is None or isinstance(before, Tensor)
        part = added(before, part if before is None else part.to(self._dtypes[unit]), unit, self._summed)
        self._at[unit] = part if last else part.to(self._dtypes[unit])

    def _end_sum(self, unit: int) -> None:
        """Brings a sum to which nothing will be added any more to its dtype."""
        x = self._at.get(unit)
        if isinstance(x, Tensor):
            self._at[unit] = x.to(self._dtypes[unit])

    def _hold_back(self) -> None:
        """Sends on the shares that have arrived, and waits for the oldest ones while too many are on their way."""
        for unit in [u for u in self._leaving if self._has_left(u)]:
            del self._leaving[unit]
        while sum(self._leaving.values()) > LEAVING_BYTES and len(self._leaving) > 1:
            oldest = next(iter(self._leaving))
            self._wait_for_share(oldest)
            self._leaving.pop(oldest, None)

    def _has_left(self, unit: int) -> bool:
        coming = self._coming.get(unit)
        if coming is not None and coming.done():
            self._send_on(unit)
        coming = self._coming.get(unit) or self._writing.get(unit) or self._taken.get(unit)
        return coming is None or coming.done()

    def _wait_for_share(self, unit: int) -> None:
        """Waits until a unit is at home, or has gone into the update."""
        if unit in self._taken:
            self._taken[unit].result()
        self._send_on(unit)
        writing = self._writing.pop(unit, None)
        if writing is not None:
            self._at[unit] = writing.result()

    def _send_on(self, unit: int) -> None:
        """Adds the share that comes to the host to the sum there, and sends the sum on to the disk."""
        coming = self._coming.pop(unit, None)
        if coming is None:
            return
        with on_host():
            part, before = coming.result().to(self._dtypes[unit]), self._at.pop(unit, None)
            if before is not None:
                part = load(before).add_(part)
        self._writing[unit] = start_move(part, "host", self._homes[unit], part.device, self._pool)


def _choose_home(members: Sequence[LeafLayout], wire: SumWire) -> Placement:
    """Returns where a unit is added up: on the device, if its form must change after it arrives."""
    arrives = wire.scatters or (wire.size == 1 and all(m.dim is None for m in members))
    return members[0].ways.summed if arrives else _ON_DEVICE


def _square_large(part: Tensor) -> Tensor:
    """Returns the sum of squares of a large part: in a capture traced once, for the layers of a stack are many."""
    return traced_once("squares", lambda x: [large_square(x)], [part])[0]
