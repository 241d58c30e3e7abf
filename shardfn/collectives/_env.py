"""The axis environment: the mesh that `shard_map` and `sharded_step` bind while their function runs.

The axis environment is how `psum(x, "dp")` knows the axis. Autograd's threads see the same mesh. Other programs'
threads do not.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from shardfn.core import Again, Ambient, Axes, Mesh, rebind_ambient, rebind_in_checkpoints

from ._axis_index import AxisNumber
from ._function_modes import WAITING, NotingMode, began, function_modes, note_crossed

_MESH = Ambient[Mesh]("mesh")
_SEEN = Ambient[list[Mesh]]("notes of meshes that are bound")
_ONE_RANK = Mesh({}, torch.device("cpu"))


@contextlib.contextmanager
def bind_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Binds `mesh`, to which the axis names of collectives refer."""
    for seen in _SEEN.all:
        seen.append(mesh)
    with _MESH.bound(mesh), rebind_in_checkpoints():
        yield mesh


def this_mesh(mesh: Mesh) -> AbstractContextManager[Mesh]:
    """Binds the mesh of a collective while the collective begins."""
    return _MESH.bound(mesh)


@rebind_ambient
def _restore_mesh() -> list[Again]:
    return [functools.partial(_MESH.bound, mesh) for mesh in _MESH.all[-1:]]


def mesh_as_now() -> Again:
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
def seen_from(coords: Mapping[str, int]) -> Iterator[Mesh]:
    """Binds the bound mesh as another rank sees the mesh, for programs that are recorded and not run.

    Args:
        coords: the coordinates of the other rank that differ from this rank's, for example `{"pp": 1}`.
    """
    mesh = current_mesh()
    with _MESH.bound(Mesh(mesh.shape, mesh.device, abstract=True, seen_from={**mesh.coords, **coords})) as there:
        yield there


def noting_meshes() -> AbstractContextManager[list[Mesh]]:
    """Collects the meshes that are bound while the context is open."""
    return _SEEN.bound([])


def current_mesh() -> Mesh:
    """Returns the bound mesh, or the mesh of a single rank, on which every collective is the identity."""
    mesh = _MESH.innermost()
    return _ONE_RANK if mesh is None else mesh


def axis_size(axis: Axes) -> int:
    """Returns the number of ranks along `axis` in the bound mesh, or 1 for None and a missing axis.

    Example:
        >>> axis_size("dp")
        1
    """
    return current_mesh().axis_size(axis)


def axis_index(axis: Axes) -> Any:
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

    Returns:
        An integer at least 0 and less than `axis_size(axis)`; an `int` where values are not followed.

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
