"""The chunks of the global batch that a rank runs, and the tree by which they are added up. See `_canonical`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shardfn.core import Mesh

# First and last chunk, and their sum.
Node = tuple[int, int, Tensor]


class Chunks(NamedTuple):
    """Chunks of a batch, which are shared by several ranks.

    Attributes:
        total: number of chunks, a power of two.
        ranks: number of ranks that share the chunks.
        rank: index of this rank.
        parts: number of microbatches into which the loss cuts each chunk.
    """

    total: int
    ranks: int
    rank: int
    parts: int = 1

    @staticmethod
    def of(total: int, mesh: Mesh, axes: tuple[str, ...]) -> "Chunks":
        """Returns the chunks of this rank, on a mesh whose `axes` cut the batch."""
        return Chunks(total, mesh.axis_size(axes), mesh.axis_index(axes))

    @property
    def bounds(self) -> tuple[int, int]:
        """Returns the first chunk of this rank, and the chunk after the last."""
        return self._find_bounds(self.rank)

    @property
    def most(self) -> int:
        """Returns the largest number of chunks that a rank has. Every rank runs this number."""
        return max(stop - start for start, stop in map(self._find_bounds, range(self.ranks)))

    @property
    def num(self) -> int:
        """Returns the number of this rank's chunks."""
        start, stop = self.bounds
        return stop - start

    def nodes(self, rank: int) -> list[tuple[int, int]]:
        """Returns the nodes that a rank sends, in order: the largest nodes of the tree within its range.

        Example:
            >>> [Chunks(8, 3, 0).nodes(r) for r in range(3)]
            [[(0, 2)], [(2, 4), (4, 5)], [(5, 6), (6, 8)]]
        """
        stack: list[tuple[int, int]] = []
        for k in range(*self._find_bounds(rank)):
            stack.append((k, k + 1))
            while _are_siblings(stack):
                (start, _), (_, stop) = stack[-2:]
                stack[-2:] = [(start, stop)]
        return stack

    def _find_bounds(self, rank: int) -> tuple[int, int]:
        return rank * self.total // self.ranks, (rank + 1) * self.total // self.ranks


def tree_sum(nodes: Sequence[Node]) -> list[Node]:
    """Adds up neighbouring nodes as far as the tree allows."""
    stack: list[Node] = []
    for node in nodes:
        push(stack, node)
    return stack


def push(stack: list[Node], node: Node) -> None:
    """Adds the next node to those before it. The tensor of a node of several chunks may be written; of one, never."""
    stack.append(node)
    while _are_siblings(stack):
        (start, middle, left), (_, stop, right) = stack[-2:]
        own = middle - start > 1 and type(left) is Tensor  # a graph's memory is planned when it is compiled
        stack[-2:] = [(start, stop, left.add_(right) if own else left + right)]


def _are_siblings(stack: Sequence[tuple[Any, ...]]) -> bool:
    if len(stack) < 2:
        return False
    (start, middle, *_), (also, stop, *_) = stack[-2:]
    return middle == also and middle - start == stop - middle and start % (stop - start) == 0
