"""Transfers of keys round a ring of ranks with attention to each other's keys."""

import dataclasses

from shardfn.collectives import axis_index, axis_size
from shardfn.core import Axes

from ._online import OnlineScores, Rows

Perm = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class RingRounds:
    """Positions of each rank's keys and queries. The transfers of each hop follow from the positions.

    Attributes:
        axis: mesh axes. None means a single rank.
        rows: positions of each rank's keys, by index. With several ranks, also the positions of the rank's queries.
        queries: positions of the rank's queries.
        index: index of the rank.
        how: the scores, without tensors.
        block: block of a tile of torch's products.
        kernel: size of a tile of the kernel, or None where the kernel does not compute the scores.
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
        """Returns the last hop at which another rank needs the keys of each rank, or 0 where no other rank does."""
        n = self.size
        return tuple(max((h for h in range(1, n) if self._needs_keys((j + h) % n, j)), default=0) for j in range(n))

    def onward(self, hop: int) -> Perm:
        """Returns the senders and receivers of keys that are still needed at `hop`."""
        n = self.size
        return [((j + hop - 1) % n, (j + hop) % n) for j, last in enumerate(self.last) if last >= hop]

    def homeward(self, hop: int) -> Perm:
        """Returns the senders and receivers of gradients of keys that go home after `hop`."""
        return [((j + hop) % self.size, j) for j, last in enumerate(self.last) if last == hop > 0]

    def _needs_keys(self, query: int, key: int) -> bool:
        pairs = ((q, k) for q in self.rows[query] for k in self.rows[key])
        return any(self.how.mask.cover(q, k) != "none" for q, k in pairs)


def make_rounds(
    axis: Axes, rows: tuple[Rows, ...], num_queries: int, how: OnlineScores, block: int, kernel: int | None = None
) -> RingRounds:
    """Returns the course of the rank's tensors. On a single rank the numbers of queries and keys may differ."""
    assert len(rows) == axis_size(axis)
    index = int(axis_index(axis))
    queries = rows[index] if axis_size(axis) > 1 else tuple(r for r in ((0, num_queries),) if num_queries)
    return RingRounds(axis, rows, queries, index, how, block, kernel)


def num_rows(rows: Rows) -> int:
    """Returns the number of tokens of some rows."""
    return sum(stop - start for start, stop in rows)


def part_of(rows: Rows, start: int, stop: int) -> Rows:
    """Returns rows start .. stop of some rows, as positions."""
    out, at = [], 0
    for a, b in rows:
        cut = (a + max(start - at, 0), a + min(stop - at, b - a))
        out += [cut] if cut[0] < cut[1] else []
        at += b - a
    return tuple(out)
