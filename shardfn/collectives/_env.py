"""The axis environment: the mesh that `shard_map` and `sharded_step` bind while their function runs.

It is the package's one ambient value, so that `psum(x, "dp")` knows its axis. A plain stack and no context variable,
because autograd runs backward functions on threads of its own.
"""

import contextlib
from collections.abc import Iterator

import torch

from shardfn.core import Axes, Mesh

_STACK: list[Mesh] = []
_SEEN: list[list[Mesh]] = []
_ONE_RANK = Mesh({}, torch.device("cpu"))


@contextlib.contextmanager
def bind_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Binds `mesh` as the one that collectives mean by an axis name."""
    _STACK.append(mesh)
    for seen in _SEEN:
        seen.append(mesh)
    try:
        yield mesh
    finally:
        _STACK.pop()


@contextlib.contextmanager
def noting_meshes() -> Iterator[list[Mesh]]:
    """Collects the meshes that are bound while it is open."""
    seen: list[Mesh] = []
    _SEEN.append(seen)
    try:
        yield seen
    finally:
        _SEEN[:] = [s for s in _SEEN if s is not seen]


def current_mesh() -> Mesh:
    """The bound mesh; outside of any, the mesh of one rank, on which every collective is the identity."""
    return _STACK[-1] if _STACK else _ONE_RANK


def axis_size(axis: Axes) -> int:
    """Ranks along `axis` in the bound mesh; 1 where the axis is None or missing.

    Example:
        >>> axis_size("dp")
        1
    """
    return current_mesh().axis_size(axis)


def axis_index(axis: Axes) -> int:
    """This rank's index along `axis` in the bound mesh; 0 where the axis is None or missing.

    Example:
        >>> axis_index(None)
        0
    """
    return current_mesh().axis_index(axis)
