"""Counts of the cache's use."""

from typing import NamedTuple


class CacheUse(NamedTuple):
    """Counts of an engine so far.

    Attributes:
        queries: tokens of sequences that began, whose keys and values were looked for in the cache.
        hits: those of them that were found.
        preemptions: preemptions of sequences that lost their blocks to others, to be computed anew.

    Example:
        >>> CacheUse().begun(40, 32)
        CacheUse(queries=40, hits=32, preemptions=0)
    """

    queries: int = 0
    hits: int = 0
    preemptions: int = 0

    def begun(self, tokens: int, found: int) -> "CacheUse":
        """Returns the counts after a sequence has begun."""
        return self._replace(queries=self.queries + tokens, hits=self.hits + found)

    def preempted(self) -> "CacheUse":
        """Returns the counts after a sequence has lost its blocks."""
        return self._replace(preemptions=self.preemptions + 1)
