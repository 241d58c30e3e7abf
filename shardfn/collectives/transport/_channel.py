"""A channel: a communicator along mesh axes for the step's asynchronous traffic, in a separate order.

`all_gather` fills the blocks of a destination in place. `reduce_scatter` sums in rank order, so the bits depend neither
on bucketing nor on timing. Ranks of a single host talk through memory if memory is chosen (`_memory.py`). On gloo
`all_gather` is a broadcast for each block, and `reduce_scatter` an all_to_all with a local sum: gloo's all_gather costs
three times as much and gloo's reduce_scatter is an all_reduce. Sends from the calling thread block on the connection
while another transfer runs. Elsewhere the backend's native operations run.

A mesh has a channel of each kind for each set of axes. A loss's collectives have the channels of the mesh's steps, or
channels on the mesh's groups.
"""

import collections
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn._torch import reduce_scatter_single
from shardfn.core import Mesh, Pending, PerMesh

from ._calls import FlightEntry, flight_recorder_of
from ._failure import EndedGroup, TransportError, close
from ._memory import IN, OUT, SUMMED, LaneOp, Lanes
from ._packing import dealt
from ._sharing import MemoryWork, shared_lanes
from ._transfers import as_raw, broadcast_from, is_sole_owner, native_all_gather, ordered_sum, record

_Made = TypeVar("_Made")
# The dtypes that every backend sends. Other dtypes travel as bytes.
_KNOWN = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_KNOWN += (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
_ASYNC_ALL_TO_ALL = dist.AllToAllOptions()
_ASYNC_ALL_TO_ALL.asyncOp = True


class _Transport:
    """Context that marks errors inside as the wire's.

    Not a generator: steps enter the context several times for each leaf.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise TransportError(str(error)) from error


_transport = _Transport()


def _finish_when_done(
    works: Sequence[dist.Work | MemoryWork], finish: Callable[[], _Made], entry: FlightEntry | None
) -> Pending[_Made]:
    """Returns the result of `finish` when all of `works` have ended. `done` is False if the backend does not know."""

    def wait_result() -> _Made:
        with _transport:
            for work in works:
                work.wait()
        if entry is not None:
            entry.waited = time.time()
        return finish()

    return Pending(wait_result, lambda: all(w.is_completed() for w in works))


# All ranks of a channel start the same transfers on the channel, in the same order: gloo pairs transfers only by order.
# Waiting is local, and in any order.
class Channel:
    """Separate communicator along `axes` of `mesh`. The constructor is collective over the mesh.

    A loss's channel over an existing `group`, which outlives the channel, is made without the other ranks. The ranks
    find out at the first transfer whether they share memory, as there may never be a transfer.

    Attributes:
        shape: axis -> size.
        size: number of ranks along the axes.
        index: index of this rank among these ranks.
        device: device of the mesh.
        ranks: ranks of the mesh along the axes, or empty without a flight recorder.
    """

    def __init__(
        self, mesh: Mesh, axes: tuple[str, ...], backend: str | None = None, *, group: Any = None, of_loss: bool = False
    ) -> None:
        self.axes = mesh.axes(axes)
        self.shape = {a: mesh.shape[a] for a in self.axes}
        self.size = mesh.axis_size(self.axes)
        self.index = mesh.axis_index(self.axes)
        self._owns_group = group is None
        group = mesh.new_group(self.axes, backend) if group is None else group
        self.group: Any = group
        self.device = mesh.device
        # Transfers of a relay that wait for their turn to use this channel.
        self.line: collections.deque[Any] = collections.deque()
        # Blocks of this rank that may not have left, the oldest first, each kept alive by an entry. Empty after `flush`
        # and `close`.
        self._sends: collections.deque[tuple[dist.Work | MemoryWork, Tensor]] = collections.deque()
        self._made = mesh.made
        self._made.watch(self._sends)
        # The tag of the last `_exchange_blocks`. The tag counts calls, so the tag is the same on all ranks as long as
        # `idle` is.
        self._tag = 0
        self._roots = [broadcast_from(rank) for rank in range(self.size)]
        self._direct = group is not None and dist.get_backend(group) in ("gloo", "fake")
        # The way through memory: of all ranks of the group, or of none.
        self._on_host = (
            group is not None and dist.get_backend(group) == "gloo" and (backend == "gloo" or mesh.device.type == "cpu")
        )
        self._timeout = mesh.timeout
        self._flight = flight_recorder_of(mesh)
        self._begun: FlightEntry | None = None  # the last transfer, where a recorder is on
        self.ranks = () if self._flight is None else tuple(mesh.along(self.axes))
        if not of_loss:
            _ = self._lanes

    def _begin(self, op: str, x: Tensor, num: int, divisor: int = 1) -> None:
        """Reports a transfer that begins to the counters of traffic, and to the flight recorder.

        Args:
            op: name of the transfer.
            x: this rank's tensor.
            num: number of elements that this rank sends, times the divisor.
            divisor: divisor of the bytes.
        """
        record(op, self.axes, num * x.element_size() // divisor, dtype=x.dtype)
        if self._flight is not None:
            self._begun = self._flight.add(op, self.axes, self.ranks, x)

    def _finish_when_done(self, works: Sequence[dist.Work | MemoryWork], finish: Callable[[], _Made]) -> Pending[_Made]:
        return _finish_when_done(works, finish, self._begun)

    @functools.cached_property
    def _lanes(self) -> Lanes | None:
        return shared_lanes(self.group, self._timeout) if self._on_host else None

    @property
    def shared_bytes(self) -> int:
        """Returns the bytes of memory that this rank has set aside for other ranks, or 0 without shared memory."""
        lanes: Lanes | None = vars(self).get("_lanes")
        return 0 if lanes is None else lanes.nbytes

    def all_gather(
        self,
        own: Tensor,
        sizes: Sequence[int],
        into: Tensor | None = None,
        *,
        settled: bool = False,
        idle: bool = False,
    ) -> Pending[Tensor]:
        """Gathers every rank's block, in sequence: `[A] [B] => [A, B]`.

        Args:
            own: this rank's block, contiguous, perhaps already in place in `into`. The block is sent without a copy and
                must not be written before `flush()`. Pass a tensor outside of `into` if the destination is to be freed
                with its user.
            sizes: number of elements of each rank's block; the same on all ranks.
            into: the destination, 1-D and contiguous. Default: a new tensor.
            settled: whether the result also waits until `own` has left, so that `own` may be written.
            idle: whether this thread only waits for the result: on gloo the thread then feeds the connections itself,
                which is faster, but stalls while the connections are busy. The same on all ranks.

        Returns:
            Pending of the destination.
        """
        out = own.new_empty(sum(sizes)) if into is None else into
        blocks: Sequence[Tensor] = out.split_with_sizes(list(sizes))
        mine = blocks[self.index]
        if own.data_ptr() != mine.data_ptr():
            mine.copy_(own.view(-1))
        self._begin("all_gather", mine, mine.numel() * (self.size - 1))
        if self.group is None:
            return Pending.of(out)
        if self._lanes is not None:
            return self._through_memory(own, blocks, out, settled)
        if own.dtype not in _KNOWN:
            own, mine, blocks = as_raw(own), as_raw(mine), [as_raw(block) for block in blocks]
        if self._direct:
            with _transport:
                works = self._exchange_blocks(own, blocks) if idle else self._broadcast_blocks(own, blocks, settled)
            return self._finish_when_done(works, lambda: out)
        return self._finish_when_done([native_all_gather(blocks, mine, self.group)], lambda: out)

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], *, reuse: bool = False) -> Pending[Tensor]:
        """Sums each rank's block over all ranks, in rank order, and keeps this rank's block.

        Args:
            flat: 1-D, contiguous; the blocks of all ranks in sequence. Not to be written until the result is taken.
            sizes: number of elements of each rank's block; the same on all ranks.
            reuse: whether the result may take the place of this rank's block in `flat`, if no other tensor shares the
                memory.

        Returns:
            Pending of this rank's block of the sum.
        """
        own, start = sizes[self.index], sum(sizes[: self.index])
        self._begin("psum_scatter", flat, flat.numel() - own)
        group = self.group
        if group is None:
            return Pending.of(flat)
        if self._lanes is not None and flat.dtype in SUMMED:
            out = flat[start : start + own] if reuse and is_sole_owner(flat) else flat.new_empty(own)
            return self._run_in_lanes(self._lanes.reduce_scatter(flat.split_with_sizes(list(sizes)), out), lambda: out)
        if flat.dtype.is_floating_point and flat.dtype.itemsize == 1:  # torch has no sums of these dtypes
            raise TypeError(f"sums of {flat.dtype} are not known. Cast it to {torch.float16} or a wider dtype first.")
        if not self._direct and len(set(sizes)) == 1:
            out = flat.new_empty(own)
            work = reduce_scatter_single(out, flat, group=group, async_op=True)
            assert work is not None
            return self._finish_when_done([work], lambda: out)
        # This rank's block need not travel through the exchange if it is the first or last block of `flat`.
        aside = self.index in (0, self.size - 1)
        send, there, back = flat, list(sizes), [own] * self.size
        if aside:
            send = flat[own:] if self.index == 0 else flat[:start]
            there[self.index] = back[self.index] = 0
        parts = flat.new_empty((self.size - aside, own))
        with _transport:
            work = group.alltoall_base(parts.view(-1), send, back, there, _ASYNC_ALL_TO_ALL)

        def take_block() -> Tensor:
            mine = flat[start : start + own]
            rows = list(parts.unbind())
            if aside:
                rows.insert(self.index, mine)
            if reuse and is_sole_owner(flat):
                return ordered_sum(rows, mine)
            # With two ranks the exchange's buffer is as large as the result, and becomes it.
            return ordered_sum(rows, parts[0] if len(parts) == 1 else None)

        return self._finish_when_done([work], take_block)

    def all_to_all(self, flat: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Sends rank r the r-th block, and returns the blocks for this rank from all ranks, in rank order.

        Args:
            flat: 1-D, contiguous; the blocks for all ranks. Not to be written until the result is taken.
            sizes: number of elements of each rank's block, from any sender.
        """
        own = sizes[self.index]
        self._begin("all_to_all", flat, flat.numel() - own)
        group = self.group
        if group is None:
            return Pending.of(flat)
        out = flat.new_empty(own * self.size)
        back = [own] * self.size
        if self._lanes is not None:
            return self._run_in_lanes(
                self._lanes.all_to_all(flat.split_with_sizes(list(sizes)), out.split_with_sizes(back)), lambda: out
            )
        with _transport:
            if self._direct:
                work = group.alltoall_base(out, flat, back, list(sizes), _ASYNC_ALL_TO_ALL)
            else:
                work = dist.all_to_all_single(out, flat, back, list(sizes), group=group, async_op=True)
        assert work is not None
        return self._finish_when_done([work], functools.partial(_last_value, flat, out))

    def exchange(self, parts: Sequence[Tensor], into: Sequence[Tensor], *, name: str) -> Pending[None]:
        """Sends rank r the r-th part, and fills the r-th destination with rank r's part for this rank.

        Args:
            parts: contiguous, of the same dtype. Not to be written until the result is taken.
            into: contiguous, each of the size of its sender's part.
            name: the operation's name for the traffic counter.
        """
        leaving = sum(part.numel() for r, part in enumerate(parts) if r != self.index)
        self._begin(name, parts[self.index], leaving)
        if self._lanes is not None:
            entry = self._lanes.all_to_all([x.view(-1) for x in parts], [x.view(-1) for x in into])
            return self._finish_when_done([MemoryWork(self._lanes, entry, IN | OUT)], lambda: None)
        # As bytes: values only travel, and backends do not know all dtypes.
        flat = torch.cat([as_raw(x) for x in parts])
        there, back = [x.numel() * x.element_size() for x in parts], [x.numel() * x.element_size() for x in into]
        out = flat.new_empty(sum(back))
        with _transport:
            if self._direct:
                work = self.group.alltoall_base(out, flat, back, there, _ASYNC_ALL_TO_ALL)
            else:
                work = dist.all_to_all_single(out, flat, back, there, group=self.group, async_op=True)
        assert work is not None

        def take_parts() -> None:
            _last_value(flat, out)
            for x, block in zip(into, out.split_with_sizes(back), strict=True):
                as_raw(x).copy_(block)

        return self._finish_when_done([work], take_parts)

    @property
    def sums_in_one(self) -> bool:
        """Returns whether `all_reduce` may replace `reduce_scatter` and `all_gather`.

        A sum of two has only a single order.
        """
        return self._direct and self.size == 2

    def all_reduce(self, flat: Tensor, *, name: str = "all_reduce") -> Pending[Tensor]:
        """Sums a flat tensor over all ranks, in place. Bit-identical to the sum in rank order if `sums_in_one`."""
        # Only for several ranks: without a group, torch would take the group of the whole job.
        self._begin(name, flat, 2 * flat.numel() * (self.size - 1), self.size)
        if self._lanes is not None and flat.dtype in SUMMED:
            parts = flat.view(-1).split_with_sizes(dealt(flat.numel(), self.size))
            return self._run_in_lanes(self._lanes.all_reduce(parts), lambda: flat)
        self._check_known(flat.dtype)
        with _transport:
            work = dist.all_reduce(flat, group=self.group, async_op=True)
        assert work is not None
        return self._finish_when_done([work], lambda: flat)

    def maximum(self, flat: Tensor, *, name: str) -> Pending[Tensor]:
        """Takes the elementwise maximum of a flat tensor over all ranks, in place."""
        self._begin(name, flat, 2 * flat.numel() * (self.size - 1), self.size)
        if self._lanes is not None:
            rows = flat.new_empty(self.size, flat.numel())
            rows[self.index] = flat
            entry = self._lanes.all_gather(rows[self.index], rows.unbind())
            return self._run_in_lanes(entry, lambda: flat.copy_(rows.amax(0)))
        self._check_known(flat.dtype)
        with _transport:
            work = dist.all_reduce(flat, dist.ReduceOp.MAX, group=self.group, async_op=True)
        assert work is not None
        return self._finish_when_done([work], lambda: flat)

    def send(self, x: Tensor, to: int, tag: int) -> Pending[Tensor]:
        """Sends a tensor to a rank, on gloo, through the host. Do not write to it until the result is taken."""
        x = x.cpu().contiguous()
        self._begin("send", x, x.numel())
        if self._lanes is not None:
            return self._run_in_lanes(self._lanes.message(x, to, tag, sends=True), lambda: x)
        with _transport:
            return self._finish_when_done([self.group.send([as_raw(x)], to, tag)], lambda: x)

    def receive(self, into: Tensor, source: int, tag: int) -> Pending[Tensor]:
        """Receives a rank's message of the same tag, different from all other tags in flight between the two."""
        if self._flight is not None:  # a message counts where it is sent
            self._begun = self._flight.add("receive", self.axes, self.ranks, into)
        if self._lanes is not None:
            return self._run_in_lanes(self._lanes.message(into, source, tag, sends=False), lambda: into)
        with _transport:
            return self._finish_when_done([self.group.recv([as_raw(into)], source, tag)], lambda: into)

    def arrival(self, like: Tensor, source: int, tag: int) -> Pending[Tensor]:
        """Receives into a new tensor like `like`, on the mesh's device."""
        into = torch.empty(like.shape, dtype=like.dtype)
        return self.receive(into, source, tag).then(lambda x: x.to(self.device))

    def flush(self) -> None:
        """Waits until every block sent by this rank has left, so that the buffers may be written again."""
        with _transport:
            for work, _ in self._sends:
                work.wait()
        self._sends.clear()

    def close(self) -> None:
        """Ends the channel. Transfers in flight fail, here and on the other ranks."""
        self.end_memory()
        if self.group is not None and not isinstance(self.group, EndedGroup):
            if self._owns_group:
                close(self.group)
            self.group = EndedGroup()
        self._sends.clear()
        self._made.unwatch(self._sends)

    def end_memory(self) -> None:
        """Ends the way through memory. Transfers in flight there fail, here and on the other ranks."""
        lanes: Lanes | None = vars(self).get("_lanes")
        if lanes is not None:
            lanes.close()

    def _through_memory(self, own: Tensor, blocks: Sequence[Tensor], out: Tensor, settled: bool) -> Pending[Tensor]:
        assert self._lanes is not None
        self._forget_sent()
        entry = self._lanes.all_gather(own, blocks)
        if settled:
            return self._run_in_lanes(entry, lambda: out)
        self._sends.append((MemoryWork(self._lanes, entry, OUT), own))
        return self._finish_when_done([MemoryWork(self._lanes, entry, IN)], lambda: out)

    def _run_in_lanes(self, entry: LaneOp, finish: Callable[[], Tensor]) -> Pending[Tensor]:
        assert self._lanes is not None
        return self._finish_when_done([MemoryWork(self._lanes, entry, IN | OUT)], finish)

    def _check_known(self, dtype: torch.dtype) -> None:
        """Refuses a sum that gloo would refuse only in the wait, as a failure of the transport."""
        if self._direct and dtype not in _KNOWN and not dtype.is_complex:
            raise TypeError(f"gloo sums no {dtype}. Cast it to a dtype that it knows: {', '.join(map(str, _KNOWN))}.")

    def _forget_sent(self) -> None:
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()

    def _exchange_blocks(self, own: Tensor, blocks: Sequence[Tensor]) -> list[dist.Work]:
        assert self.group is not None
        self._tag = (self._tag + 1) % (1 << 30)
        works: list[dist.Work] = []
        for step in range(1, self.size):
            dst, src = (self.index + step) % self.size, (self.index - step) % self.size
            if blocks[src].numel():
                works.append(self.group.recv([blocks[src]], src, self._tag))
            if own.numel():
                self._sends.append((self.group.send([own.view(-1)], dst, self._tag), own))
        return works

    def _broadcast_blocks(self, own: Tensor, blocks: Sequence[Tensor], settled: bool) -> list[dist.Work]:
        assert self.group is not None
        self._forget_sent()
        works: list[dist.Work] = []
        for rank, block in enumerate(blocks):
            if not block.numel():
                continue
            options = self._roots[rank]
            if rank == self.index:
                work = self.group.broadcast([own], options)
                if settled:
                    works.append(work)
                else:
                    self._sends.append((work, own))
            else:
                works.append(self.group.broadcast([block], options))
        return works


def _last_value(kept: Tensor, value: Tensor) -> Tensor:
    """Returns the value of a transfer. The argument keeps the sent tensor alive."""
    del kept
    return value


class Channels:
    """Channels of each kind for each set of axes, so that gathers and reductions have separate queues.

    Channels are made on first request. The request is collective: all ranks must ask in the same order.

    Args:
        mesh: the mesh.
        meet: function that waits for all ranks before groups are made, as groups need all ranks.
        apart: whether the loss's channels, too, have separate groups, which may end with the channels after a failure.
            With another backend than gloo the channels have the mesh's groups in any case: each group would cost memory
            on the device.

    Attributes:
        once: None. In a capture, a function that traces equal ops once.
    """

    once: ClassVar[None] = None

    def __init__(self, mesh: Mesh, meet: Callable[[], None] = lambda: None, *, apart: bool = True) -> None:
        self._mesh, self._meet = mesh, meet
        self._apart = apart and mesh.backend == "gloo" and mesh.makes_groups
        # In the order of the first requests, the same on all ranks: `anew` makes channels in the same order.
        self._made: dict[tuple[str, tuple[str, ...]], Channel] = {}

    def gather(self, axes: tuple[str, ...]) -> Channel:
        """Returns the channel that gathers along `axes`."""
        return self._get_channel("gather", axes)

    def reduce(self, axes: tuple[str, ...]) -> Channel:
        """Returns the channel that reduces along `axes`."""
        return self._get_channel("reduce", axes)

    def relay(self, axes: tuple[str, ...]) -> Channel:
        """Returns the channel of reductions' second hops along `axes`. These start when the first hops have arrived."""
        return self._get_channel("relay", axes)

    def between(self, axes: tuple[str, ...]) -> Channel:
        """Returns the channel from rank to rank, through the host on any device."""
        return self._get_channel("between", axes)

    def loss(self, axes: tuple[str, ...]) -> Channel:
        """Returns the channel of the collectives that a loss calls along `axes`."""
        return self._get_channel("loss", axes)

    def loss_along_each(self) -> None:
        """Makes the loss's channel along each axis, if groups are separate: later not all ranks may ask."""
        for axis in self._mesh.axes(self._mesh.axis_names) if self._apart else ():
            self.loss((axis,))

    def shared(self) -> list[tuple[Channel, int]]:
        """Returns the channels that go through memory, and the bytes that this rank has set aside for each."""
        return [(x, x.shared_bytes) for x in self._made.values() if x.shared_bytes]

    def flush(self) -> None:
        """Waits until every block sent by this rank has left."""
        for channel in self._made.values():
            channel.flush()

    def close(self) -> None:
        """Ends all channels for good. Transfers in flight fail, here and on the other ranks."""
        for channel in self._made.values():
            channel.close()

    def end_memory_of_loss(self) -> None:
        """Ends the way through memory of the loss's channels, after all transfers have been waited for."""
        for (kind, _), channel in self._made.items():
            if kind == "loss":
                channel.end_memory()

    @property
    def num_made(self) -> int:
        """Returns how many channels have been made. After a failure a rank may have more channels than another."""
        return len(self._made)

    def anew(self, num: int, meet: Callable[[], None] = lambda: None) -> "Channels":
        """Returns the first `num` channels, made again. Collective.

        Args:
            num: the number of channels, the same on all ranks.
            meet: function as above.
        """
        fresh = Channels(self._mesh, meet)
        for kind, axes in list(self._made)[:num]:
            fresh._get_channel(kind, axes)
        return fresh

    def _get_channel(self, kind: str, axes: tuple[str, ...]) -> Channel:
        key = (kind, axes)
        if key not in self._made:
            if self._mesh.axis_size(axes) > 1:
                self._meet()
            if kind == "loss":
                group = None if self._apart else self._mesh.group(axes)
                self._made[key] = Channel(self._mesh, axes, group=group, of_loss=True)
            else:
                self._made[key] = Channel(self._mesh, axes, "gloo" if kind == "between" else None)
        return self._made[key]


LOSS_CHANNELS: PerMesh[Channels] = PerMesh()


def loss_channel(mesh: Mesh, axes: tuple[str, ...]) -> Channel:
    """Returns the channel of the collectives that a loss calls, from the mesh's steps, if there is a channel.

    Else a channel on the mesh's group along `axes`: the first transfer is collective over the ranks along these axes.
    """
    channels = LOSS_CHANNELS.get(mesh)
    if channels is None:
        channels = LOSS_CHANNELS.put(mesh, Channels(mesh, apart=False))
        mesh.at_close("channels of the loss", lambda why: channels.end_memory_of_loss())
    return channels.loss(axes)


def set_loss_channels(mesh: Mesh, channels: Channels) -> None:
    """Lets the collectives of a loss use a step's channels, in place of channels on the mesh's groups."""
    before = LOSS_CHANNELS.get(mesh)
    if before is not None and before is not channels:
        before.close()
    LOSS_CHANNELS.put(mesh, channels)
    mesh.at_close("channels of the loss", lambda why: channels.end_memory_of_loss())


def forget_loss_channels(mesh: Mesh, channels: Channels) -> None:
    """Lets the collectives of a loss use the mesh's groups again, as these channels have ended."""
    if LOSS_CHANNELS.get(mesh) is channels:
        del mesh.resources[LOSS_CHANNELS]
