"""This rank's shares of the summed gradients, from their arrival to the update."""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardfn.capture import capturing, traced_once
from shardfn.collectives import Packing, SumWire, dealt, is_sole_owner, psum
from shardfn.core import MemoryKind, Pending, Stored
from shardfn.engine.agreement import named_range
from shardfn.engine.plan import Plan
from shardfn.leaves import LeafLayout
from shardfn.memory import to_device
from shardfn.state import Ahead, Parts, StoredSlice, closed, loaded

from ._pools import pool_of


class GradientStore:
    """The gradients of a step by unit, and at last by leaf, each in the memory where it waits for the update.

    `receive` adds the part of a unit that arrives; after the last, `finish` sums along the axes that are left, and
    `pop_all` gives each leaf the part that the optimizer takes. Between the two, `parts` has this rank's shares, 1-D:
    those of all ranks are disjoint.

    Args:
        plan: the layout.
        wires: by unit, the wire on which its parts arrive.
        late_axes: axes along which the gradients of shared leaves are summed by `finish`.

    Attributes:
        parts: the shares, by unit.
    """

    def __init__(self, plan: Plan, wires: Sequence[SumWire], late_axes: tuple[str, ...]) -> None:
        self._plan, self._wires, self._late_axes = plan, wires, late_axes
        # Leaves are made whole during the backward, but not while parameters use the same channel.
        self._overlaps = all(leaf.used.dim is None for leaf in plan.layers)
        self._pool = pool_of(plan)
        # All ranks along these axes have the same ones.
        own = [plan.layers[unit.leaves[0]].own_axes for unit in plan.reduce_units]
        self._late = {u for u, axes in enumerate(own) if not {*late_axes}.issubset(axes)}
        self.parts = Parts(
            [self._home(u) for u in range(len(own))], [self._dtype(u) for u in range(len(own))], self._pool
        )
        # By unit that is wanted whole, its sum: here, or on its way.
        self._wholes: dict[int, Tensor | Pending[Tensor]] = {}

    def give_to(self, ahead: Ahead) -> None:
        """From now on complete gradients go to an update that runs already."""
        self.parts.give_to(ahead)

    def is_summed_in_one(self, unit: int) -> bool:
        """Whether one transfer makes a unit's sum whole: not if it is added to earlier parts, or to later ones.

        The same when it is sent and when it arrives, as the unit is not added to in between.
        """
        alone = unit not in self.parts and unit not in self._late and self._plan.chunks is None
        return alone and self._overlaps and self._wires[unit].sums_in_one

    @functools.cached_property
    def is_alone(self) -> list[bool]:
        """By unit, whether its sum is of this rank's gradients, unconverted and on the device: these are not sent."""
        if self._plan.captured or self._plan.chunks is not None:
            return [False] * len(self._wires)
        return [
            wire.is_alone
            and self._home(u) == "device"
            and all(x.dtypes.reduce == x.dtypes.accum for x in self._members(u))
            for u, wire in enumerate(self._wires)
        ]

    def receive(self, unit: int, pending: Pending[Tensor], *, last: bool) -> None:
        """Waits for a unit: its whole sum, or this rank's part, which is added to the earlier ones."""
        with named_range("reduce", self._plan.layers, self._plan.reduce_units[unit].leaves):
            x = pending.result()
        if last and self.is_summed_in_one(unit):
            self._keep_whole(unit, x)
        else:
            self._keep(unit, x, last=last)

    def _keep_whole(self, unit: int, whole: Tensor) -> None:
        self._wholes[unit] = whole
        # A half each, so that a norm counts every element once.
        halves = whole.split_with_sizes(dealt(whole.numel(), 2))
        self.parts.add(unit, halves[self._wires[unit].index], last=True)

    def _keep(self, unit: int, part: Tensor, *, last: bool) -> None:
        self.parts.add(unit, part, last=last)
        wire = self._wires[unit]
        if last and self._overlaps and unit not in self._late and not wire.scatters and wire.size > 1:
            with named_range("reduce", self._plan.layers, self._plan.reduce_units[unit].leaves):
                self._join(unit)

    def finish(self) -> None:
        """Sums along the remaining axes, once a step, when its microbatches have been added up."""
        for u in self.parts:
            if self._wires[u].scatters:
                leaf = self._members(u)[0]
                if self._plan.mesh.axis_size(leaf.extra_axes) > 1:
                    self.parts.add(u, psum(self._popped(u).to(leaf.dtypes.reduce), leaf.extra_axes), last=True)
                self.parts.finish(u)
        for u in sorted(self._late):
            self.parts.add(u, psum(self._popped(u), self._late_axes), last=True)
            self.parts.finish(u)

    def pop_all(self, order: Sequence[int], is_made_here: Callable[[int], bool]) -> dict[int, Tensor | Stored]:
        """By layer, the part of the sum that the optimizer takes: this rank's rows, or the whole block.

        Args:
            order: of units, the same on all ranks.
            is_made_here: whether the memory of a layer's sum was made on this rank, for it alone.
        """
        return {i: x for u in order if not self.parts.is_taken(u) for i, x in self._pop(u, is_made_here)}

    def _pop(self, unit: int, is_made_here: Callable[[int], bool]) -> Iterator[tuple[int, Tensor | Stored]]:
        leaves, members, wire = self._plan.reduce_units[unit].leaves, self._members(unit), self._wires[unit]
        arrives = wire.scatters or wire.size == 1
        with named_range("reduce", self._plan.layers, leaves):
            flat = self.parts.pop(unit) if arrives else self._whole(unit)
        home = self.parts.home(unit)
        if isinstance(flat, Tensor):
            flat = flat.to(self._dtype(unit))
            here = wire.size == 1 and home == "device"
            if here and not (all(map(is_made_here, leaves)) or is_sole_owner(flat)):
                flat = flat.clone()  # autograd may hand one tensor to two leaves, or one that is kept elsewhere
        pieces = _pieces(wire.packing, wire.index, flat)
        if not arrives:
            self.parts.drop(unit)
        if not wire.scatters:
            pieces = [self._landed(leaf, x, home) for leaf, x in zip(members, pieces, strict=True)]
        return zip(leaves, pieces, strict=True)

    def _landed(self, leaf: LeafLayout, x: Tensor | Stored, home: MemoryKind) -> Tensor | Stored:
        """The part of a whole sum that the optimizer takes, in the memory where it waits for the update."""
        summed = leaf.ways.summed
        if not isinstance(x, Tensor):
            return x
        if leaf.dim is not None and summed.spec == leaf.shard:
            x = leaf.rows(x, self._plan.zero_rank(leaf)).contiguous()
        return x if home == summed.memory_kind else closed(x, summed, self._pool)

    def _whole(self, unit: int) -> Tensor:
        if unit not in self._wholes:
            self._join(unit)
        whole = self._wholes.pop(unit)
        return whole.result() if isinstance(whole, Pending) else whole

    def _join(self, unit: int) -> None:
        part = self.parts[unit]
        assert isinstance(part, Tensor)
        self._wholes[unit] = self._wires[unit].join(part)

    def _popped(self, unit: int) -> Tensor:
        """The share of a unit, which is let go; on the device, wherever it has waited."""
        part = self.parts.pop(unit)
        if isinstance(part, Tensor) and self.parts.home(unit) == "device":
            return part
        return to_device(loaded(part), self._plan.mesh.device).result()

    def _members(self, unit: int) -> list[LeafLayout]:
        return [self._plan.layers[i] for i in self._plan.reduce_units[unit].leaves]

    def _dtype(self, unit: int) -> torch.dtype:
        """The dtype in which a unit is added up."""
        return self._members(unit)[0].dtypes.accum

    def _home(self, unit: int) -> MemoryKind:
        """The memory in which a unit is added up; the device, if its form must change after it arrives."""
        members, wire = self._members(unit), self._wires[unit]
        arrives = wire.scatters or (wire.size == 1 and all(m.dim is None for m in members))
        return members[0].ways.summed.memory_kind if arrives else "device"


def _pieces(packing: Packing, rank: int, flat: Tensor | Stored) -> list[Tensor | Stored]:
    """The pieces of single leaves in a rank's share."""
    if isinstance(flat, Tensor) and not capturing():
        return list(packing.split(flat, rank))
    shapes = packing.shapes(rank)
    if isinstance(flat, Tensor):
        return list(traced_once(("pieces", *shapes), functools.partial(_views, shapes), [flat]))
    sizes = [s.numel() for s in shapes]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [StoredSlice(flat, start, shape) for start, shape in zip(starts, shapes, strict=True)]


def _views(shapes: Sequence[torch.Size], flat: Tensor) -> list[Tensor]:
    pieces = flat.split_with_sizes([s.numel() for s in shapes]) if len(shapes) > 1 else [flat]
    return [p.view(s) for p, s in zip(pieces, shapes, strict=True)]
