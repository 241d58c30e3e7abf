"""Counts of prefix caching and preemption."""

from typing import NamedTuple


class CacheStats(NamedTuple):
    """Counts of an engine so far.

    Attributes:
        queries: tokens of new sequences, looked up in the KV cache.
        hits: looked up tokens with keys and values in the cache.
        preemptions: number of preemptions, after which a sequence is recomputed.

    Example:
        >>> CacheStats().begun(40, 32)
        CacheStats(queries=40, hits=32, preemptions=0)
    """

    queries: int = 0
    hits: int = 0
    preemptions: int = 0

    def begun(self, tokens: int, found: int) -> "CacheStats":
        """Returns the counts after a sequence has begun."""
        return self._replace(queries=self.queries + tokens, hits=self.hits + found)

    def preempted(self) -> "CacheStats":
        """Returns the counts after a sequence has lost its blocks."""
        return self._replace(preemptions=self.preemptions + 1)
