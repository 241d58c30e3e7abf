"""Counts of an engine so far: speculative decoding, prefix caching, preemption and padding."""

from collections.abc import Mapping
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


class SpeculationStats(NamedTuple):
    """Counts of an engine's drafts so far.

    Attributes:
        steps: steps of sequences that had drafts.
        drafted: tokens.
        accepted: drafted tokens that became tokens of a sequence.

    Example:
        >>> SpeculationStats().add(4, 3).add(2, 0)
        SpeculationStats(steps=2, drafted=6, accepted=3)
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> "SpeculationStats":
        """Returns the counts after another step of a sequence."""
        return SpeculationStats(self.steps + 1, self.drafted + drafted, self.accepted + accepted)


class EngineStats(NamedTuple):
    """Counts of an engine.

    Attributes:
        counts: numbers of sequences and blocks now: "running", "waiting", "free", "held" and "cached".
        padding: part of all rows so far that was padding.
        speculation: drafts so far.
        cache: prefix caching and preemptions so far.

    Example:
        >>> EngineStats({"running": 1}, 0.25).cache.hits
        0
    """

    counts: Mapping[str, int]
    padding: float = 0.0
    speculation: SpeculationStats = SpeculationStats()
    cache: CacheStats = CacheStats()
