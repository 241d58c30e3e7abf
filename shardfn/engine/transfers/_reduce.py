"""The transpose of storage -> compute: sums gradients over the batch's axes, into the optimizer's layout.

Each leaf's handle has a hook that takes its gradient as soon as autograd has summed all uses, so transfers overlap with
the rest of the backward and the whole gradient is freed at once. Transfers are issued in an agreed order; a leaf that
this rank's loss did not use contributes zeros, so ranks may take different branches.
"""

import functools
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from shardfn.capture import capturing, mark, traced_once
from shardfn.collectives import AnyChannels, CodedReduce, dealt, is_sole_owner, psum, reduce_channel
from shardfn.core import IN_FLIGHT_BYTES, MemoryKind, Pending, Stored
from shardfn.engine.agreement import named_range
from shardfn.engine.plan import Chunks, Plan
from shardfn.leaves import LeafLayout
from shardfn.state import Ahead, Parts, closed

from ._canonical import ChunkSums
from ._local_sums import LocalSums
from ._pools import pool_of
from ._unpack_gradients import brought, pieces_of

# Seconds that a step may spend waiting for gradients under way, so that they are at most `IN_FLIGHT_BYTES`.
PATIENCE = 2.0


class Reducer:
    """Collects one step's gradients. Made anew each step.

    Backwards run one at a time, of any microbatch: `begin`, any number of `take`s, `end`. Per-backward state (missing
    leaves, the next unit, pending sends) is cleared in `end`; sums persist until `gradients`. All ranks begin backwards
    in the same order and with the same `send` and `last`.

    Args:
        plan: the layout; a `cut` leaf is reduced to this rank's rows, the others are reduced whole.
        channels: the step's communicators.
        order: the agreed order in which units are sent; empty: as they become ready, which a captured program does
            alike on all ranks. See `expect`.
        late_axes: axes whose ranks run backwards of their own, so that the gradients of shared leaves are summed along
            them when each has run its last one.
        chunks: this rank's chunks, if each backward is of one and they are summed by their tree; else None.

    Attributes:
        seen: the order in which this rank's units became ready in the last backward.
        collects: whether a backward has begun and not ended; a gradient that comes at another time is not the step's.
        received: whether any leaf has got a gradient on this rank, in any backward so far.
    """

    def __init__(
        self,
        plan: Plan,
        channels: AnyChannels,
        order: Sequence[int],
        late_axes: tuple[str, ...] = (),
        chunks: Chunks | None = None,
    ) -> None:
        self._plan, self._leaves, self._units, self._device = plan, plan.layers, plan.reduce_units, plan.mesh.device
        leaves, units = self._leaves, self._units
        axes = [leaves[unit.leaves[0]].reduce_axes for unit in units]
        self._scatter = [reduce_channel(channels, leaves[unit.leaves[0]].ways.reduce) for unit in units]
        self._cut = [leaves[unit.leaves[0]].cut for unit in units]
        self._gather = {u: channels.gather(a) for u, a in enumerate(axes) if not self._cut[u]}
        # Leaves are made whole during the backward, but not while parameters use the same channel.
        self._overlap_gather = not any(leaf.gathered for leaf in leaves)
        self._order, self._channels, self._learns = list(order), channels, not order
        self._captured = capturing()
        self._late_axes = late_axes
        self._late = {u for u, x in enumerate(units) if not {*late_axes}.issubset(leaves[x.leaves[0]].own_axes)}
        self._unit_of = {i: u for u, unit in enumerate(units) for i in unit.leaves}
        self._local = LocalSums(plan)
        # By leaf: gradients of this backward that have not been sent.
        self._grads: dict[int, Tensor] = {}
        self._sums = None if chunks is None else ChunkSums(chunks, self._zeros)
        # By unit: whether it is sent with the backward that runs.
        self._goes: list[bool] = []
        self._missing: list[int] = []
        # In the order in which they were sent, and collected in it: sums of microbatches are added in one order always.
        self._pending: list[tuple[int, Pending[Tensor]]] = []
        self._pool = pool = pool_of(plan)
        self._parts = Parts(
            [self._home(u) for u in range(len(units))], [leaves[x.leaves[0]].dtypes.accum for x in units], pool
        )
        self._flats: dict[int, Tensor] = {}
        self._whole: dict[int, tuple[Tensor | None, Pending[Tensor] | None]] = {}
        self._next = self._in_flight = 0
        self._patience = PATIENCE
        self._send = self._last = True
        self.seen: list[int] = []
        self.collects = self.received = False

    def begin(self, *, send: bool, last: bool) -> None:
        """Starts a backward. With `send=False` gradients are added up on this rank and sent with a later backward's."""
        self._send, self._last, self._next, self.seen, self.collects = send, last, 0, [], True
        self._goes = [send] * len(self._units) if last or not send else [not stays for stays in self._stays]
        self._missing = [len(unit.leaves) if goes else 0 for unit, goes in zip(self._units, self._goes, strict=True)]
        if self._sums is not None:
            self._sums.begin()

    def expect(self, order: Sequence[int]) -> None:
        """Sets the order in which units are sent, before any is sent."""
        self._order, self._learns = list(order), not order

    def give_to(self, ahead: Ahead) -> None:
        """From now on complete gradients go to an update that runs already."""
        self._parts.give_to(ahead)

    def take(self, leaf: int, grad: Tensor) -> None:
        """Takes the gradient of a leaf: the sum over its uses in this backward.

        `grad` is an alias that only the caller has. It is written to only if no other tensor shares its memory, either.
        """
        mark(grad, "gradient_to", self._leaves[leaf].entry)
        if self._put(leaf, grad):
            self._send_ready()
        if self._goes[self._unit_of[leaf]]:
            # At each chance, so that messages go as they come.
            self._collect(block=False)
            self._hold_back()

    def take_all(self, grads: list[tuple[int, Tensor]]) -> None:
        """Takes the gradients of several leaves, in an eager step; the list is emptied."""
        while grads:
            self._put(*grads.pop())
        self._send_ready()

    def _put(self, leaf: int, grad: Tensor) -> bool:
        """Adds a gradient to the sum of its leaf. Returns whether its unit is now complete and to be sent."""
        # Also in a backward that does not send: whether anything is trained is asked of the whole step.
        self.received = True
        unit = self._unit_of[leaf]
        goes = self._goes[unit]
        if self._sums is not None:
            self._sums.add(leaf, grad.to(self._leaves[leaf].dtypes.accum))
            if not self._send:
                return False
        elif not goes:
            self._local.add(leaf, grad, stays=self._stays[unit])
            return False
        elif self._local:
            grad = self._local.total(leaf, grad, stays=self._stays[unit])
        self._grads[leaf] = grad
        self._missing[unit] -= 1
        if self._missing[unit]:
            return False
        self._see(unit)
        return True

    def end(self) -> None:
        """Sends the units that are left, with zeros for leaves without a gradient, and waits for everything."""
        self.collects = False
        if not self._send:
            return
        for u, unit in enumerate(self._units):
            if self._missing[u]:
                self._grads.update({i: self._absent(i) for i in unit.leaves if i not in self._grads})
                self._missing[u] = 0
                self._see(u)
        self._send_ready()
        self._collect(block=True)
        # Along the remaining axes once a step, when its microbatches have been added up.
        if self._last:
            for u in self._parts:
                if not self._cut[u]:
                    continue
                leaf = self._leaves[self._units[u].leaves[0]]
                if self._channels.reduce(leaf.extra_axes).size > 1:
                    part = self._parts.pop(u)
                    if self._parts.home(u) != "device":
                        part = brought(part, self._device)
                    assert isinstance(part, Tensor)
                    part = part.to(leaf.dtypes.reduce)
                    self._parts.add(u, psum(part, leaf.extra_axes), last=True)
                self._parts.finish(u)
            for u in sorted(self._late):  # all ranks along these axes have the same ones
                part = self._parts.pop(u)
                part = part if isinstance(part, Tensor) and self._home(u) == "device" else brought(part, self._device)
                self._parts.add(u, psum(part, self._late_axes), last=True)
                self._parts.finish(u)

    def parts(self) -> Parts:
        """Per unit, this rank's share of the summed gradients, 1-D; the shares of all ranks are disjoint."""
        return self._parts

    def gradients(self) -> dict[int, Tensor | Stored]:
        """Per leaf, the part of the summed gradient that the optimizer takes: this rank's rows, or the whole block."""
        out: dict[int, Tensor | Stored] = {}
        for u in self._order:
            if self._parts.is_taken(u):
                continue
            leaves = self._units[u].leaves
            members = [self._leaves[i] for i in leaves]
            packing, index = self._units[u].packing, self._scatter[u].index
            alone = self._cut[u] or self._scatter[u].size == 1
            with named_range("reduce", self._leaves, leaves):
                flat = self._parts.pop(u) if alone else self._whole_part(u)
            if isinstance(flat, Tensor):
                flat = flat.to(members[0].dtypes.accum)
                here = self._scatter[u].size == 1 and self._parts.home(u) == "device"
                if here and not (all(map(self._local.has_made, leaves)) or is_sole_owner(flat)):
                    flat = flat.clone()  # autograd may hand one tensor to two leaves, or one that is kept elsewhere
            out.update(zip(leaves, pieces_of(packing, index, flat), strict=True))
            if not alone:
                self._parts.drop(u)
            if not self._cut[u]:
                home = self._parts.home(u)
                wanted = [i for i, m in zip(leaves, members, strict=True) if m.takes_rows or m.grad_home != home]
                out.update({i: self._landed(i, out[i], home) for i in wanted})
        self._channels.flush()  # the optimizer may write to tensors that were sent
        return out

    @functools.cached_property
    def _stays(self) -> list[bool]:
        """By unit, whether it is summed here until the last backward, as no other rank gets it."""
        return [self._sums is None and not self._plan.captured and self._is_alone(u) for u in range(len(self._units))]

    def _is_alone(self, unit: int) -> bool:
        """Whether a unit's sum is of this rank's gradients alone, unconverted and on the device."""
        channel, members = self._scatter[unit], [self._leaves[i] for i in self._units[unit].leaves]
        same = all(leaf.dtypes.reduce == leaf.dtypes.accum for leaf in members)
        return same and channel.size == 1 and not isinstance(channel, CodedReduce) and self._home(unit) == "device"

    def _home(self, unit: int) -> MemoryKind:
        """The memory in which a unit is added up; the device, if its form must change after it arrives."""
        members = [self._leaves[i] for i in self._units[unit].leaves]
        alone = self._cut[unit] or (self._scatter[unit].size == 1 and all(m.dim is None for m in members))
        return members[0].grad_home if alone else "device"

    def _landed(self, i: int, x: Tensor | Stored, where: MemoryKind) -> Tensor | Stored:
        """The part of a whole sum that the optimizer takes, in the memory where it waits for the update."""
        if not isinstance(x, Tensor):
            return x
        leaf = self._leaves[i]
        own = leaf.rows(x, self._plan.zero_rank(leaf)).contiguous() if leaf.takes_rows else x
        return own if where == leaf.grad_home else closed(own, leaf.ways.summed, self._pool)

    def _see(self, unit: int) -> None:
        self.seen.append(unit)
        if self._learns and unit not in self._order:
            self._order.append(unit)

    def _absent(self, leaf: int) -> Tensor:
        local = self._local.pop(leaf)
        if local is not None:
            return local
        return self._zeros(leaf, self._leaves[leaf].dtypes.reduce)

    def _zeros(self, leaf: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = self._leaves[leaf].dtypes.accum if dtype is None else dtype
        return torch.zeros(self._leaves[leaf].block, dtype=dtype, device=self._device)

    def _send_ready(self) -> None:
        while self._next < len(self._order) and self._missing[self._order[self._next]] == 0:
            unit = self._order[self._next]
            self._next += 1
            if not self._goes[unit]:
                continue
            mine = [(self._leaves[i], i) for i in self._units[unit].leaves]
            self._in_flight += self._passing(unit)
            if self._sums is not None:
                with named_range("reduce", self._leaves, self._units[unit].leaves):
                    self._pending.append((unit, self._start_nodes(unit, self._sums, [i for _, i in mine])))
                continue
            members = [(leaf, self._grads.pop(i).to(leaf.dtypes.reduce)) for leaf, i in mine]
            with named_range("reduce", self._leaves, self._units[unit].leaves):
                start = self._write_down if self._captured and self._cut[unit] else self._start
                pending = start(unit, members)
            self._pending.append((unit, pending))

    def _start(self, unit: int, members: list[tuple[LeafLayout, Tensor]]) -> Pending[Tensor]:
        channel, packing = self._scatter[unit], self._units[unit].packing
        lay = packing.lay if self._captured else packing.laid
        flat = lay([grad for _, grad in members])
        # The message has them: each gradient goes now, and not after the transfer.
        members.clear()
        if self._in_one(unit):
            # It is summed in place; memory that another tensor shares is copied first.
            return channel.all_reduce(flat if is_sole_owner(flat) else flat.clone())
        if not self._cut[unit] and self._last and channel.size > 1:
            # The sum is made whole in it: by then its own summands have been sent.
            self._flats[unit] = flat
        sizes = packing.sizes if self._cut[unit] else dealt(flat.numel(), channel.size)
        return channel.reduce_scatter(flat, sizes, reuse=not self._cut[unit])

    def _start_nodes(self, unit: int, sums: ChunkSums, leaves: list[int]) -> Pending[Tensor]:
        """Sends the nodes of this rank's chunks."""
        channel, packing, cut = self._scatter[unit], self._units[unit].packing, self._cut[unit]
        assert not isinstance(channel, CodedReduce)
        for i in leaves:
            del self._grads[i]

        def send(wholes: list[Tensor]) -> Pending[Tensor]:
            flat = packing.lay(wholes)
            if not cut and channel.size > 1:
                self._flats[unit] = flat
            return channel.all_to_all(flat, packing.sizes if cut else dealt(flat.numel(), channel.size))

        return sums.send(leaves, send)

    def _write_down(self, unit: int, members: list[tuple[LeafLayout, Tensor]]) -> Pending[Tensor]:
        """`_start` in a capture, which sends nothing and traces the layers of a stack once."""
        leaves, grads = [leaf for leaf, _ in members], [grad for _, grad in members]
        looks = *(leaf.looks for leaf in leaves), self._scatter[unit].axes

        def start(*grads: Tensor) -> list[Tensor]:
            return [self._start(unit, list(zip(leaves, grads, strict=True))).result()]

        (part,) = traced_once(("reduce", looks), start, grads)
        return Pending.of(part)

    def _in_one(self, unit: int) -> bool:
        """Whether a gradient that is wanted whole is summed by one all_reduce: not if it is added to earlier parts."""
        # The same when it is sent and when it is collected, as the unit is not added to in between.
        alone = self._last and unit not in self._parts and unit not in self._late and self._sums is None
        return alone and self._overlap_gather and not self._cut[unit] and self._scatter[unit].sums_in_one

    def _collect(self, *, block: bool) -> None:
        while self._pending and (block or self._pending[0][1].done()):
            unit, pending = self._pending.pop(0)
            with named_range("reduce", self._leaves, self._units[unit].leaves):
                part = pending.result()
            self._in_flight -= self._passing(unit)
            if self._in_one(unit):
                self._whole[unit] = (part, None)
                # A half each, so that a norm counts every element once.
                own = dealt(part.numel(), 2)
                self._parts.add(unit, part.split_with_sizes(own)[self._scatter[unit].index], last=True)
                continue
            self._finish(unit, part)

    def _passing(self, unit: int) -> int:
        """Bytes of a unit that are let go when it has been sent: none of one that is wanted whole, summed in place.

        The same when it is sent and when it is collected.
        """
        return self._units[unit].nbytes if self._cut[unit] or not self._last else 0

    def _hold_back(self) -> None:
        """Waits while too many bytes are under way, so that whole gradients do not pile up where the network is slow.

        For a bounded time only: a rank in another branch may need this one's next gather before it can send its part.
        """
        while self._in_flight > IN_FLIGHT_BYTES and self._patience > 0 and self._pending:
            start = time.monotonic()
            time.sleep(1e-4)
            self._collect(block=False)
            self._patience -= time.monotonic() - start

    def _finish(self, unit: int, part: Tensor) -> None:
        self._parts.add(unit, part, last=self._last)
        early = self._overlap_gather and unit not in self._late
        if self._last and early and not self._cut[unit] and self._scatter[unit].size > 1:
            with named_range("reduce", self._leaves, self._units[unit].leaves):
                self._start_whole(unit)

    def _start_whole(self, unit: int) -> None:
        part = self._parts[unit]
        assert isinstance(part, Tensor)
        out: Tensor | None = self._flats.pop(unit)
        sizes = dealt(out.numel(), self._scatter[unit].size)
        in_place = out.untyped_storage()._cdata == part.untyped_storage()._cdata
        if out.dtype != part.dtype or not (in_place or is_sole_owner(out)):
            out = None
        self._whole[unit] = (None, self._gather[unit].all_gather(part, sizes, out))

    def _whole_part(self, unit: int) -> Tensor:
        if unit not in self._whole:
            self._start_whole(unit)
        out, pending = self._whole.pop(unit)
        if pending is not None:
            return pending.result()
        assert out is not None
        return out
