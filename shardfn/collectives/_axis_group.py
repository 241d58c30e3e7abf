"""The ranks along mesh axes: the bound mesh, and the group of some axes.

The axis environment: the mesh that `shard_map` and `sharded_step` bind while their function runs.

The axis environment is how `psum(x, "dp")` knows the axis. Autograd's threads see the same mesh. Other programs'
threads do not.

The ranks along some mesh axes, as a collective counts the ranks.

A caller names axes from major to minor, in any order. A process group has the mesh's order. `AxisGroup` is the map
between the two. Sizes that the axes do not divide are cut axis by axis, from major to minor, each cut as in
`torch.chunk`, for example by `P(("dp", "tp"))`.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from shardfn import core
from shardfn.core import Mesh

from ._axis_index import AxisNumber
from ._function_modes import WAITING, NotingMode, began, function_modes, note_crossed

_MESH = core.Ambient[Mesh]("mesh")
_SEEN = core.Ambient[list[Mesh]]("notes of meshes that are bound")
_ONE_RANK = Mesh({}, torch.device("cpu"))


@contextlib.contextmanager
def bind_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Binds `mesh`, to which the axis names of collectives refer."""
    with bind_mesh_of_graph(mesh), core.rebind_in_checkpoints():
        yield mesh


def bind_mesh_of_graph(mesh: Mesh) -> AbstractContextManager[Mesh]:
    """Binds `mesh` around a captured graph, which recomputes nothing by `torch.utils.checkpoint`."""
    if _SEEN:
        for seen in _SEEN.all:
            seen.append(mesh)
    return _MESH.bound(mesh)


def this_mesh(mesh: Mesh) -> AbstractContextManager[Mesh]:
    """Binds the mesh of a collective while the collective begins."""
    return _MESH.bound(mesh)


@core.rebind_ambient
def _restore_mesh() -> list[core.Again]:
    return [functools.partial(_MESH.bound, mesh) for mesh in _MESH.all[-1:]]


def mesh_as_now() -> core.Again:
    """Returns a way to bind the current mesh again, for a backward that runs when the mesh is no longer bound.

    Example:
        >>> with bind_mesh(Mesh({"dp": 1}, torch.device("cpu"))) as mesh:
        ...     again = mesh_as_now()
        >>> with again():
        ...     current_mesh() is mesh
        True
    """
    return next(iter(_restore_mesh()), contextlib.nullcontext)


@contextlib.contextmanager
def view_mesh_from(coords: Mapping[str, int]) -> Iterator[Mesh]:
    """Binds the bound mesh as another rank sees the mesh, for programs that are recorded and not run.

    Args:
        coords: the coordinates of the other rank that differ from this rank's, for example `{"pp": 1}`.
    """
    mesh = current_mesh()
    with _MESH.bound(Mesh(mesh.shape, mesh.device, abstract=True, view_mesh_from={**mesh.coords, **coords})) as there:
        yield there


def noting_meshes() -> AbstractContextManager[list[Mesh]]:
    """Collects the meshes that are bound while the context is open."""
    return _SEEN.bound([])


def current_mesh() -> Mesh:
    """Returns the bound mesh, or the mesh of a single rank, on which every collective is the identity."""
    mesh = _MESH.innermost()
    return _ONE_RANK if mesh is None else mesh


def axis_size(axis: core.Axes) -> int:
    """Returns the number of ranks along `axis` in the bound mesh, or 1 for None and a missing axis.

    Example:
        >>> axis_size("dp")
        1
    """
    return current_mesh().axis_size(axis)


def axis_index(axis: core.Axes) -> Any:
    """Returns this rank's index along `axis` in the bound mesh, or 0 for None and a missing axis.

    Where values are followed along axes, in `shard_map` and in losses, the index is a number that remembers its axes.
    So are numbers computed from the index by Python's operators, `abs`, `round`, `divmod` and comparisons (0 or 1),
    with the index on either side. A tensor made of the index varies along the axes. The truth of an index is refused,
    as ranks would take different branches: `max(0, i - 1)` is `(i - 1) * (i > 0)`, and `x if i == 0 else y` is
    `torch.where(torch.tensor(i == 0), x, y)`. Refused are also elements of lists (`xs[i]`; use `torch.tensor(xs)[i]`,
    or a slice of `x` in place of `x.chunk(n)[i]`), `range(i)`, `float(i)` and functions of `math`. `int(i)` is a plain
    number without axes.

    Args:
        axis: mesh axes, major to minor.

    Returns: An integer at least 0 and less than `axis_size(axis)`; an `int` where values are not followed.

    Raises:
        ValueError: an axis is neither in the mesh nor a house name, or is named twice.
        AxisTypeError: (of the number, later) the number is used as a truth, an index of a list, or a float.

    Example:
        >>> axis_index(None)
        0
    """
    mesh = current_mesh()
    index = mesh.axis_index(axis)
    if WAITING or function_modes():
        began()
        named = mesh.axes(axis)
        note_crossed(named)
        if named and any(isinstance(mode, NotingMode) for mode in function_modes()):
            return AxisNumber(index, named)
    return index


@dataclasses.dataclass(frozen=True, eq=False)
class AxisGroup:
    """Ranks along `axes`, seen from a single rank. "Index" counts ranks in the caller's order of axes.

    Attributes:
        axes: the axes in the mesh's order.
        sizes: the sizes of the axes as the caller named them, major to minor.
        index: this rank's index.
        ranks: index -> rank in the mesh's order.
        mesh: the mesh. The groups end with the mesh, so a graph for a backward keeps the mesh.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    index: int
    ranks: Sequence[int]
    mesh: Mesh

    @staticmethod
    def alone() -> "AxisGroup":
        """Returns a group with only this rank. Rows are also moved in such a group."""
        return AxisGroup((), (), 0, range(1), current_mesh())

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return len(self.ranks)

    @property
    def in_order(self) -> bool:
        """Returns whether index and rank are the same number."""
        return isinstance(self.ranks, range)

    @property
    def indices(self) -> list[int]:
        """Returns the index of each rank."""
        return sorted(range(self.size), key=lambda i: self.ranks[i])

    def lengths(self, size: int) -> tuple[int, ...]:
        """Returns how many of `size` rows each index holds."""
        return block_lengths(size, self.sizes)


def axis_group_along(axis: core.Axes) -> AxisGroup | None:
    """Returns the group of ranks along `axis` of the bound mesh, or None if the group has only this rank.

    Raises:
        ValueError: an axis is unknown or named twice.
    """
    mesh = current_mesh()
    named = mesh.axes(axis)
    if len(set(named)) != len(named):
        raise ValueError(f"axis={axis!r} must name each axis once.")
    if not named:
        return None
    axes = tuple(n for n in mesh.axis_names if n in named)
    if not mesh.abstract:
        mesh.check_open()
    sizes = tuple(mesh.shape[n] for n in named)
    return AxisGroup(axes, sizes, mesh.axis_index(named), _find_ranks(mesh, named, axes), mesh)


def count_ranks(line: AxisGroup | None) -> int:
    """Returns the number of ranks of a group. None is a group of only this rank."""
    return 1 if line is None else line.size


@functools.lru_cache(maxsize=1024)
def block_lengths(size: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the rows of each block when `size` rows are cut along axes of `sizes`, major to minor.

    Example:
        >>> block_lengths(7, (4,))
        (2, 2, 2, 1)
        >>> block_lengths(5, (2, 2))
        (2, 1, 1, 1)
    """
    n = math.prod(sizes)
    if size % n == 0:
        return (size // n,) * n
    bounds = [core.chunk_bounds(size, sizes[0], i) for i in range(sizes[0])]
    return tuple(rows for start, stop in bounds for rows in block_lengths(stop - start, sizes[1:]))


def _find_ranks(mesh: Mesh, named: tuple[str, ...], axes: tuple[str, ...]) -> Sequence[int]:
    if named == axes:
        return range(math.prod(mesh.shape[n] for n in axes))
    stride = {n: math.prod(mesh.shape[m] for m in axes[i + 1 :]) for i, n in enumerate(axes)}
    grid = itertools.product(*(range(0, mesh.shape[n] * stride[n], stride[n]) for n in named))
    return tuple(sum(offsets) for offsets in grid)
