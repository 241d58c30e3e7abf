"""What the collectives that a loss calls go by: memory where ranks share some, and else the process group itself.

They are torch's functional collectives, which a captured graph holds by the name of a group (`_native.py`). So the way
through memory is a process group, too, registered under a name of its own beside the one that it stands for: eager
steps, graphs and compiled graphs call it, and a program's own collectives on the same group do not.
"""

import contextlib
import datetime
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from shardfn.core import AbstractGroup, Mesh, PerMesh, shared_name

from ._memory import IN, OUT, SUMMED, LaneOp, Lanes
from ._packing import dealt
from ._sharing import shared_lanes, wished
from ._transfers import ordered_sum


class SharedGroup(dist.ProcessGroup):
    """A gloo group whose ranks share memory. The methods are torch's, which calls them by name.

    Whether they do is found out at the first transfer, by all ranks, as all of them take part in it. Sums are in rank
    order, and 16-bit floats are summed in 32 bits, whatever the number of ranks.

    It has the operations that primitives use, and no others.

    Args:
        group: the group that this one stands for.
        timeout: that a wait may take; None is for ever.
        name: by which it is registered.

    Attributes:
        stands_for: that group.
        group_name: its own name.

    Raises:
        TransportError: a transfer broke, also after `close`.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: datetime.timedelta | None, name: GroupName) -> None:
        super().__init__(group.rank(), group.size())  # pyright: ignore[reportCallIssue]
        self.stands_for = group
        self._timeout, self._index, self._name = timeout, group.rank(), name
        # Before the first transfer nobody knows.
        self._lanes: Lanes | None = None
        self._asked = False

    @property
    def group_name(self) -> GroupName:  # torch's asks a backend, which this group has not
        return self._name

    @property
    def shared_bytes(self) -> int:
        """Bytes of memory that this rank has set aside for others to read."""
        return 0 if self._lanes is None else self._lanes.nbytes

    def close(self) -> None:
        """Ends the way through memory; what is under way fails, here and on the other ranks."""
        if self._lanes is not None:
            self._lanes.close()

    # Names of parameters are ours: torch passes all of them, by position.
    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Sums, or takes the maximum, in place."""
        (x,), op = tensors, opts.reduceOp.op
        lanes = self._lanes_of(x)
        if lanes is None or not (op == dist.ReduceOp.MAX or (op == dist.ReduceOp.SUM and x.dtype in SUMMED)):
            return self.stands_for.allreduce(tensors, opts)
        flat = x.view(-1)
        if op == dist.ReduceOp.SUM:
            return _SharedWork(lanes, lanes.all_reduce(flat.split_with_sizes(dealt(flat.numel(), lanes.size))))
        rows = flat.new_empty(lanes.size, flat.numel())
        rows[self._index] = flat
        entry = lanes.all_gather(rows[self._index], rows.unbind())
        return _SharedWork(lanes, entry, then=lambda: flat.copy_(rows.amax(0)))

    def all_gather_single_coalesced(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, outs: list[Tensor], owns: list[Tensor], opts: Any
    ) -> dist.Work:
        """The blocks of all ranks, one after another, of each tensor."""
        lanes = self._lanes_of(*outs, *owns)
        if lanes is None:
            return self.stands_for.allgather_into_tensor_coalesced(outs, owns, opts)
        entries: list[LaneOp] = []
        for out, own in zip(outs, owns, strict=True):
            blocks = out.view(-1).split(own.numel())
            blocks[self._index].copy_(own.view(-1))
            entries.append(lanes.all_gather(blocks[self._index], blocks))
        return _SharedWork(lanes, *entries)

    def reduce_scatter_single_coalesced(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, outs: list[Tensor], xs: list[Tensor], opts: Any
    ) -> dist.Work:
        """Of each tensor this rank's block of the sum."""
        if opts.reduceOp.op != dist.ReduceOp.SUM:
            raise NotImplementedError(f"{self._name} scatters sums, and no {opts.reduceOp.op}.")
        lanes = self._lanes_of(*outs, *xs)
        entries: list[LaneOp] = []
        for out, x in zip(outs, xs, strict=True):
            if lanes is None or x.dtype not in SUMMED:
                # Not the group's own, whose order is another.
                parts = x.view(self.size(), -1)
                rows = torch.empty_like(parts)
                self.stands_for.alltoall_base(rows, parts, [], [], dist.AllToAllOptions()).wait()
                ordered_sum([*rows.unbind()], out.view(-1))
            else:
                entries.append(lanes.reduce_scatter(x.view(lanes.size, -1).unbind(), out.view(-1)))
        return _SharedWork(lanes, *entries)

    def all_to_all_single(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], opts: Any
    ) -> dist.Work:
        """Sends each rank its rows, and takes theirs."""
        lanes = self._lanes_of(out, x)
        if lanes is None:
            return self.stands_for.alltoall_base(out, x, [*out_sizes], [*sizes], opts)
        entry = lanes.all_to_all(_blocks(x, sizes, lanes.size), _blocks(out, out_sizes, lanes.size))
        return _SharedWork(lanes, entry)

    def _lanes_of(self, *tensors: Tensor) -> Lanes | None:
        """The way through memory of tensors, which all ranks have on devices of one kind."""
        if not all(x.device.type == "cpu" for x in tensors):
            return None
        if not self._asked:
            self._lanes, self._asked = shared_lanes(self.stands_for, self._timeout), True
        return self._lanes


class _SharedWork(dist.Work):
    """Transfers under way: torch waits for one before anybody looks at their results."""

    def __init__(self, lanes: Lanes | None, *entries: LaneOp, then: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._lanes, self._entries, self._then = lanes, entries, then

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        del timeout  # the lanes' own
        for entry in self._entries:
            assert self._lanes is not None
            self._lanes.wait(entry, IN | OUT)
        self._then()
        return True


class _Entry(NamedTuple):
    """What dynamo may look at, unlike a group's own attributes."""

    stands_for: Any
    name: GroupName
    group: SharedGroup


_ENTRIES: PerMesh[dict[str, _Entry]] = PerMesh()


def shared_group(mesh: Mesh, group: "dist.ProcessGroup | AbstractGroup") -> str:
    """The name by which a loss's collectives call a group of a mesh; registers what they then go by.

    Nothing is sent. It is the group's own name where memory cannot be shared, or is not wished for. The name is the
    mesh's alone, as several meshes may have one group, and stays when the mesh makes a group anew.
    """
    made = _entries(mesh)
    there = made.get(group.group_name)
    if there is not None and there.stands_for is group:
        return there.name
    if isinstance(group, AbstractGroup) or mesh.device.type != "cpu":
        return group.group_name
    if dist.get_backend(group) != "gloo" or wished() == "gloo":
        return group.group_name
    end_shared_group(mesh, group)  # what stood for another one of that name
    mesh.at_close("shared groups", lambda why: _end_all(made))
    name = GroupName(shared_name(group.group_name, mesh.made.number))
    # torch's registry does not keep it alive: the mesh does.
    made[group.group_name] = _Entry(group, name, SharedGroup(group, mesh.timeout, name))
    dist.distributed_c10d._register_process_group(name, made[group.group_name].group)
    return name


def shared_groups(mesh: Mesh) -> dict[str, SharedGroup]:
    """By name of the group that they stand for, those of a mesh."""
    return {name: entry.group for name, entry in _entries(mesh).items()}


def end_shared_group(mesh: Mesh, group: dist.ProcessGroup) -> None:
    """Ends what stands for a group that is about to end, and wakes who waits there; nothing then holds the group."""
    if (entry := _entries(mesh).pop(group.group_name, None)) is not None:
        _end(entry)


def _entries(mesh: Mesh) -> dict[str, _Entry]:
    return _ENTRIES.of(mesh, dict)


def _end_all(made: dict[str, _Entry]) -> None:
    while made:
        _end(made.popitem()[1])


def _end(entry: _Entry) -> None:
    entry.group.close()
    with contextlib.suppress(RuntimeError, ValueError):  # torch has forgotten all groups
        dist.distributed_c10d._unregister_process_group(entry.name)


def _blocks(x: Tensor, sizes: Sequence[int], num: int) -> Sequence[Tensor]:
    """Rows for each rank; without sizes equally many."""
    return torch.split(x, list(sizes) if sizes else x.shape[0] // num)
