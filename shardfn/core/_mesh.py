"""The mesh: ranks in a grid with named axes, and the process groups along them.

House names: `dp` data, `tp` tensor, `sp` sequence, `ep` expert, `pp` pipeline. A missing axis, an axis of size 1 and a
program without torch.distributed are equal: the identity.
"""

import atexit
import datetime
import itertools
import math
import os
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardfn._torch import default_timeout, on_one_thread

from . import _groups as groups
from ._texts import as_html, did_you_mean

# The most ranks that a drawing of a mesh shows.
MOST_DRAWN = 1024
HOUSE_AXES = ("dp", "tp", "sp", "ep", "pp")
Axes = str | tuple[str, ...] | None


class Mesh:
    """Ranks in a grid with named axes, for example {"dp": 2, "tp": 4}. Build a mesh with `make_mesh`.

    A mesh has connections and threads once something was sent. Both end with `close`, at the end of a block `with
    make_mesh(...) as mesh:`, or, if nothing refers to the mesh any more, when the next mesh is made.

    Attributes:
        shape: axis name -> size, in order (row-major over ranks: the last axis varies fastest).
        ranks: the ranks of the program that are in the mesh, in the mesh's order.
        rank: index of this rank in the mesh, as errors print, or -1 on a rank that is not a member.
        device: the device this rank computes on.
        device_mesh: `torch.distributed.DeviceMesh`, or None for a single process, and for a mesh of some of the ranks.
        timeout: how long a collective waits for other ranks. Default: as long as in the default process group.
        agreement_timeout: how long a rank waits for other ranks to come to the same call. By default two minutes, or
            `timeout` if shorter.
        flight_recorder: number of the last collectives that a rank keeps, and prints when ranks wait in vain. 0 is off.
        name: name, the same on all ranks of the mesh, and different for each mesh of these ranks.
        abstract: whether the ranks do not exist: steps can be lowered for such a mesh, for one of its ranks, but not
            run.
        resources: objects of other rooms that live as long as the mesh, by `PerMesh`.
        made: the process groups that the mesh has made.
        closed: whether the mesh was closed. Nothing can be sent on a closed mesh.
    """

    def __init__(
        self,
        shape: Mapping[str, int],
        device: torch.device,
        device_mesh: DeviceMesh | None = None,
        timeout: datetime.timedelta | None = None,
        abstract: bool = False,
        ranks: Sequence[int] | None = None,
        view_mesh_from: Mapping[str, int] | None = None,
        agreement_timeout: datetime.timedelta | None = None,
        flight_recorder: int = 0,
    ) -> None:
        self.abstract, self.flight_recorder = abstract, flight_recorder
        self.shape = dict(shape)
        self._known_axes: dict[str | tuple[str, ...], tuple[str, ...]] = {}
        self.device = device
        self.device_mesh = device_mesh
        self.timeout = timeout or _default_timeout(device)
        self.agreement_timeout = agreement_timeout or min(_AGREEMENT, self.timeout or _AGREEMENT)
        here = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = (here,) if self.size == 1 and ranks is None else tuple(ranks or range(self.size))
        told = device_mesh is not None or ranks is not None  # else seen from the first rank, or a named rank
        # Not a tensor: groups are also made in captures, when tensors have no values.
        grid = np.arange(self.size).reshape(tuple(self.shape.values()) or (1,))
        named = int(grid[tuple((view_mesh_from or {}).get(axis, 0) for axis in self.shape) or (0,)])
        self.rank = named if not told else self.ranks.index(here) if here in self.ranks else -1
        where = np.argwhere(grid == self.rank).tolist()
        self._coords = dict(zip(self.shape, where[0], strict=False)) if where else None
        # Whether the mesh makes groups without other ranks: only the members are needed.
        apart = ranks is not None and self.is_member and self.size > 1 and dist.is_initialized()
        self._apart = groups.NamedGroups(self.ranks) if apart else None
        self.name = groups.name_of(self.ranks, "mesh") if device_mesh is not None or apart else ""
        self.resources: dict[object, Any] = {}
        self.made, self.closed = groups.MadeGroups(), False
        # The groups of a `device_mesh` that was made, and ends, with this mesh.
        self._made_by_grid: groups.MadeGroups | None = None
        self._at_close: dict[str, Callable[[str], None]] = {}
        self._grid = grid
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        if device_mesh is not None or self._apart is not None:
            groups.end_with(self, self.made)
            _ALIVE.add(self)

    def close(self) -> None:
        """Ends the connections and threads of the mesh, and the disks of its steps. Every rank must call `close`.

        Values on the mesh stay readable in place (`GlobalTensor.local`). Steps and collectives on the mesh are errors
        from then on. The program's process groups stay, also the groups of a `DeviceMesh` that was passed in. Waits
        until the other ranks have received this rank's messages. A second `close` does nothing.

        Example:
            >>> from shardfn.core import make_mesh
            >>> with make_mesh({"dp": 1}, device="cpu") as mesh:
            ...     mesh.size
            1
            >>> mesh.closed
            True
        """
        self._close_for_reason("closed its mesh")

    def _close_for_reason(self, why: str) -> None:
        if self.closed:
            return
        self.closed = True
        # First the users of the connections. The connections end last.
        for end in self._at_close.values():
            end(why)
        self._at_close.clear()
        self.resources.clear()
        self._groups.clear()
        self.made.end()
        if self._made_by_grid is not None:
            self._made_by_grid.end()
            self.device_mesh = None

    def at_close(self, name: str, end: Callable[[str], None]) -> None:
        """Makes the end of the mesh call a function, with the reason as text.

        A function of the same name is replaced.
        """
        self._at_close[name] = end

    def check_open(self) -> None:
        """Refuses to continue with a mesh that is closed, or without this rank.

        Raises:
            ValueError: the mesh is closed, or this rank is not a member.
        """
        self.check_member()
        if self.closed:
            raise ValueError(
                f"{self!r} is closed, so it cannot send anything. Make another mesh and build the step on it, or close"
                " this mesh later."
            )

    @property
    def is_member(self) -> bool:
        """Returns whether this rank is a member of the mesh."""
        return self.rank >= 0

    def is_like(self, other: "Mesh") -> bool:
        """Returns whether the same ranks have the same places on the same axes. Axes of a single rank do not count."""
        if other is self:
            return True
        mine, theirs = ([(a, n) for a, n in mesh.shape.items() if n > 1] for mesh in (self, other))
        return mine == theirs and self.ranks == other.ranks

    def check_member(self) -> None:
        """Refuses to continue with a mesh without this rank.

        Raises:
            ValueError: this rank is not a member.
        """
        if not self.is_member:
            raise ValueError(
                f"rank {dist.get_rank()} of the program is not of {self!r}, and takes no part in programs that run"
                " there. Ask mesh.is_member first."
            )

    @property
    def coords(self) -> dict[str, int]:
        """Returns this rank's index on each axis.

        Raises:
            ValueError: this rank is not in the mesh.
        """
        self.check_member()
        assert self._coords is not None
        return self._coords

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Returns the axis names, major to minor."""
        return tuple(self.shape)

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return math.prod(self.shape.values())

    def axes(self, axes: Axes) -> tuple[str, ...]:
        """Returns the named axes that exist in the mesh and are larger than 1, as a tuple.

        Raises:
            ValueError: a name is neither an axis of this mesh nor a house name.
        """
        # Asked for every leaf in every step, and always the same.
        known = self._known_axes.get(axes) if type(axes) is tuple or type(axes) is str else None
        if known is not None:
            return known
        names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        for name in names:
            if name not in self.shape and name not in HOUSE_AXES:
                hint = did_you_mean(name, (*self.shape, *HOUSE_AXES))
                raise ValueError(f"axis {name!r} is not in the mesh, which has {self.axis_names}.{hint}")
        there = tuple(n for n in names if self.shape.get(n, 1) > 1)
        if type(axes) is tuple or type(axes) is str:
            self._known_axes[axes] = there
        return there

    def axis_size(self, axes: Axes) -> int:
        """Returns the number of ranks along `axes`, or 1 for a missing axis."""
        names = self.axes(axes)
        return 1 if not names else self.shape[names[0]] if len(names) == 1 else math.prod(self.shape[n] for n in names)

    def axis_index(self, axes: Axes) -> int:
        """Returns this rank's index along `axes`, with the first name as the major axis."""
        index = 0
        for name in self.axes(axes):
            index = index * self.shape[name] + self.coords[name]
        return index

    def along(self, axes: Collection[str]) -> list[int]:
        """Returns the ranks whose places in the mesh differ from this rank's only along `axes`, with this rank."""
        places = enumerate(all_coords(self.shape))
        return [r for r, at in places if all(at[a] == self.coords[a] for a in at if a not in axes)]

    @property
    def backend(self) -> str:
        """Returns the backend that moves tensors between ranks: "nccl", "gloo", ..."""
        if self.makes_groups and dist.is_initialized():
            return dist.get_backend()
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def makes_groups(self) -> bool:
        """Returns whether the mesh has ranks that can form groups."""
        return self.device_mesh is not None or self._apart is not None

    def group(self, axes: Axes) -> dist.ProcessGroup | None:
        """Returns the process group along `axes` (None for a single rank). Group rank == `axis_index(axes)`.

        The first call for a tuple of several axes is collective over the whole mesh.

        Raises:
            ValueError: several axes are named in another order than the mesh's, or the mesh is abstract.
        """
        names = self.axes(axes)
        if not names:
            return None
        self._check_real()
        if names not in self._groups:
            # A single axis already has a group, so no collective is needed.
            if len(names) == 1 and self.device_mesh is not None:
                self._groups[names] = self.device_mesh.get_group(names[0])
            else:
                self._groups[names] = self._make_group(names)
        return self._groups[names]

    def _check_real(self) -> None:
        if self.abstract:
            raise ValueError(f"{self!r} is abstract: its ranks do not exist, so a step can be lowered for it, not run.")
        self.check_open()

    def new_group(self, axes: Axes, backend: str | None = None) -> dist.ProcessGroup | None:
        """Returns a fresh communicator along `axes`, with a separate order. Collective over the mesh.

        Raises:
            ValueError: the mesh is abstract.
        """
        self._check_real()
        names = self.axes(axes)
        return self._make_group(names, backend) if names else None

    def group_for_good(self) -> dist.ProcessGroup:
        """Returns a gloo group of all ranks that outlives the mesh. Collective over the mesh."""
        if self._apart is not None:
            return self._apart.new(self.ranks, "gloo", self.timeout)
        group = self._new_group(None, "gloo")
        assert group is not None
        return group

    def _new_group(self, row: list[int] | None, backend: str | None) -> dist.ProcessGroup | None:
        """Returns a group of some ranks of the program, or of all.

        None on the other ranks. Collective over the program.
        """
        with on_one_thread():
            group = dist.new_group(row, backend=backend, timeout=self.timeout)
        return group if isinstance(group, dist.ProcessGroup) else None

    def _make_group(self, names: tuple[str, ...], backend: str | None = None) -> dist.ProcessGroup:
        if list(names) != [n for n in self.axis_names if n in names]:
            ordered = tuple(n for n in self.axis_names if n in names)
            raise ValueError(f"axes {names} are not in the mesh's order. Use {ordered}.")
        dims = [self.axis_names.index(n) for n in names]
        rest = [d for d in range(len(self.shape)) if d not in dims]
        rows = self._grid.transpose(*rest, *dims).reshape(-1, math.prod(self._grid.shape[d] for d in dims))
        mine = None
        # Every rank makes every group, in this order: making a group is collective over all ranks.
        for row in rows.tolist():
            made = None
            if self._apart is None:
                made = self._new_group(row, backend)
            # A mesh of only some ranks cannot call `new_group`, which needs the whole program.
            elif self.rank in row:
                made = self._apart.new([self.ranks[i] for i in row], backend, self.timeout)
            if self.rank in row and made is not None:
                mine = made
        assert mine is not None
        if dist.get_backend(mine) == "gloo" and mine.size() > 1:
            # A rank has made connections before other ranks have accepted these: if the rank failed now, and closed the
            # connections, a slower rank would wait until the timeout. So the rank continues when all ranks have
            # connections.
            mine.barrier().wait()
        self.made.add(mine)
        return mine

    def __repr__(self) -> str:
        axes = ", ".join(f"{k}={v}" for k, v in self.shape.items())
        where = "abstract" if self.abstract else f"rank {self.rank}" if self.is_member else "not this rank"
        where += "" if self.ranks == tuple(range(self.size)) else f" of the program's {list(self.ranks)}"
        return f"Mesh({axes}; {where} on {self.device})"

    def drawing(self) -> str:
        """Returns a drawing of the ranks in the grid, the last axis across, this rank in brackets.

        Example:
            >>> from shardfn.core import make_mesh
            >>> print(make_mesh({"dp": 2, "tp": 2}, abstract=True).drawing())
            Mesh(dp=2, tp=2; abstract on cpu)
                  tp 0  tp 1
            dp 0   [0]     1
            dp 1     2     3
        """
        *outer, last = self.axis_names or ("",)
        rows = self._grid.reshape(-1, self._grid.shape[-1])
        where = list(np.ndindex(*self._grid.shape[:-1]))
        head = ("", *(f"{last} {i}".strip() for i in range(rows.shape[1])))
        lines = [head] + [
            (", ".join(f"{a} {i}" for a, i in zip(outer, at, strict=True)), *(self._format_cell(r) for r in row))
            for at, row in zip(where, rows.tolist(), strict=True)
        ]
        first, width = max(len(line[0]) for line in lines), max(len(c) for line in lines for c in line[1:])
        drawn = ["  ".join((line[0].ljust(first), *(c.rjust(width) for c in line[1:]))) for line in lines]
        return "\n".join([repr(self), *drawn])

    def _format_cell(self, rank: int) -> str:
        return f"[{rank}]" if rank == self.rank else str(rank)

    def _repr_html_(self) -> str:
        return as_html(self.drawing() if self.size <= MOST_DRAWN else repr(self))


_AGREEMENT = datetime.timedelta(minutes=2)
# Meshes with communicators that must end before the interpreter does.
_ALIVE: "weakref.WeakSet[Mesh]" = weakref.WeakSet()


def _default_timeout(device: torch.device) -> datetime.timedelta | None:
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    return default_timeout(device)


def close_at_exit() -> None:
    """Lets all meshes be closed before the interpreter ends."""
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # runs first: the last function registered is called first


def _close_all() -> None:
    """Closes all meshes at exit: threads of communicators would not survive the interpreter's end."""
    error = getattr(sys, "last_value", None)  # the exception that ends the program, if any
    how = "its script came to an end" if error is None else f"{type(error).__name__}: {error}"
    own = [mesh for mesh in _ALIVE if mesh.made.process == os.getpid()]  # a fork of a rank is not the rank
    for mesh in sorted(own, key=lambda mesh: mesh.made.number):
        mesh._close_for_reason(f"left the program ({how})")
    groups.end_lost()


def all_coords(shape: Mapping[str, int]) -> list[dict[str, int]]:
    """Returns the coordinates of every rank of a mesh of this shape, in rank order."""
    return [dict(zip(shape, c, strict=True)) for c in itertools.product(*(range(n) for n in shape.values()))]


T = TypeVar("T")


class PerMesh(Generic[T]):
    """Objects of a kind, an object for each mesh. A closed mesh drops the mesh's object.

    Example:
        >>> from shardfn.core import make_mesh
        >>> counts: PerMesh[list[int]] = PerMesh()
        >>> mesh = make_mesh({"dp": 1}, device="cpu")
        >>> counts.get(mesh), counts.of(mesh, list).append(3), counts.get(mesh)
        (None, None, [3])
    """

    def get(self, mesh: Mesh) -> T | None:
        """Returns the mesh's object, or None."""
        return mesh.resources.get(self)

    def of(self, mesh: Mesh, make: Callable[[], T]) -> T:
        """Returns the mesh's object, made by `make` at the first call."""
        if self not in mesh.resources:
            mesh.resources[self] = make()
        return mesh.resources[self]

    def put(self, mesh: Mesh, value: T) -> T:
        """Replaces the mesh's object, and returns the new object."""
        mesh.resources[self] = value
        return value
