"""The ranks along some mesh axes, as a collective counts the ranks.

A caller names axes from major to minor, in any order. A process group has the mesh's order. `AxisGroup` is the map
between the two. Sizes that the axes do not divide are cut axis by axis, from major to minor, each cut as in
`torch.chunk`, for example by `P(("dp", "tp"))`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from shardfn.core import Axes, Mesh, chunk_bounds

from ._env import current_mesh


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
        """Returns the line of only this rank. Rows are moved on this line, too."""
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


def axis_group_along(axis: Axes) -> AxisGroup | None:
    """Returns the line of the bound mesh along `axis`, or None for only this rank.

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
    bounds = [chunk_bounds(size, sizes[0], i) for i in range(sizes[0])]
    return tuple(rows for start, stop in bounds for rows in block_lengths(stop - start, sizes[1:]))


def _find_ranks(mesh: Mesh, named: tuple[str, ...], axes: tuple[str, ...]) -> Sequence[int]:
    if named == axes:
        return range(math.prod(mesh.shape[n] for n in axes))
    stride = {n: math.prod(mesh.shape[m] for m in axes[i + 1 :]) for i, n in enumerate(axes)}
    grid = itertools.product(*(range(0, mesh.shape[n] * stride[n], stride[n]) for n in named))
    return tuple(sum(offsets) for offsets in grid)
