"""The transfers of keys round a ring of ranks that attend to each other's keys."""

import dataclasses

from shardfn.collectives import axis_index, axis_size
from shardfn.core import Axes

from ._online import OnlineScores, Rows

Perm = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class RingCourse:
    """The positions of each rank's keys and queries, from which the transfers of each hop follow.

    Attributes:
        axis: mesh axes. None is one rank.
        rows: the positions of each rank's keys, by index; with several ranks, of its queries too.
        queries: the positions of this rank's queries.
        index: index of this rank.
        how: the scores, without tensors.
        block: block of a tile of torch's products.
        kernel: kernel of a tile of the kernel, or None where it does not compute this.
    """

    axis: Axes
    rows: tuple[Rows, ...]
    queries: Rows
    index: int
    how: OnlineScores
    block: int
    kernel: int | None = None

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        """Rows of a message: all are as long as the longest."""
        return max(num_rows(r) for r in self.rows)

    @property
    def last(self) -> tuple[int, ...]:
        """Returns the last hop at which a rank needs the keys of each rank, or 0 where none does but itself."""
        n = self.size
        return tuple(max((h for h in range(1, n) if self._needs_keys((j + h) % n, j)), default=0) for j in range(n))

    def onward(self, hop: int) -> Perm:
        """Who sends to whom so that keys that are still needed arrive at `hop`."""
        n = self.size
        return [((j + hop - 1) % n, (j + hop) % n) for j, last in enumerate(self.last) if last >= hop]

    def homeward(self, hop: int) -> Perm:
        """Who sends gradients of keys home after `hop`."""
        return [((j + hop) % self.size, j) for j, last in enumerate(self.last) if last == hop > 0]

    def _needs_keys(self, query: int, key: int) -> bool:
        pairs = ((q, k) for q in self.rows[query] for k in self.rows[key])
        return any(self.how.mask.cover(q, k) != "none" for q, k in pairs)


def course(
    axis: Axes, rows: tuple[Rows, ...], num_queries: int, how: OnlineScores, block: int, kernel: int | None = None
) -> RingCourse:
    """Returns the course of this rank's tensors; on one rank the numbers of queries and keys may differ."""
    assert len(rows) == axis_size(axis)
    index = int(axis_index(axis))
    queries = rows[index] if axis_size(axis) > 1 else tuple(r for r in ((0, num_queries),) if num_queries)
    return RingCourse(axis, rows, queries, index, how, block, kernel)


def num_rows(rows: Rows) -> int:
    """Returns the number of their tokens."""
    return sum(stop - start for start, stop in rows)


def part_of(rows: Rows, start: int, stop: int) -> Rows:
    """Rows start .. stop of these, as positions."""
    out, at = [], 0
    for a, b in rows:
        cut = (a + max(start - at, 0), a + min(stop - at, b - a))
        out += [cut] if cut[0] < cut[1] else []
        at += b - a
    return tuple(out)
