"""The graphs that a captured function keeps, by signature.

A `BoundedCache` has a limited number of values. The least recently used value leaves first.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from shardfn.collectives import GlobalTensor
from shardfn.core import PyTree, first_of, named_leaves

_Kept = TypeVar("_Kept")


class BoundedCache(Generic[_Kept]):
    """Cache of at most `size` values, in the order of last use. `in` is not a use.

    Args:
        size: the number, at least 1.

    Example:
        >>> cache = BoundedCache(2)
        >>> cache.keep("a", 1), cache.keep("b", 2), cache.find("a"), cache.keep("c", 3)
        (None, None, 1, 2)
        >>> cache.find("b"), list(cache.values())
        (None, [1, 3])
    """

    def __init__(self, size: int) -> None:
        assert size > 0
        self.size = size
        # From the least recently used to the most recently used.
        self._kept: dict[object, _Kept] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: object) -> _Kept | None:
        """Returns the value of a key, and counts a use, or None if the value is not kept."""
        if key not in self._kept:
            return None
        self._kept[key] = made = self._kept.pop(key)
        return made

    def keep(self, key: object, made: _Kept) -> _Kept | None:
        """Keeps a value as the most recently used value.

        Returns:
            The evicted value, or None if there was room.
        """
        self._kept.pop(key, None)
        self._kept[key] = made
        return self._kept.pop(next(iter(self._kept))) if len(self._kept) > self.size else None

    def values(self) -> Iterable[_Kept]:
        """Yields the values, from the least recently used to the most recently used."""
        return self._kept.values()


log = logging.getLogger("shardfn.jit")

# The default: a limit for shapes that never repeat, above the number of padded lengths of usual programs.
MAX_GRAPHS = 64


@dataclasses.dataclass
class Counts:
    """Counts of a cache of graphs, from the beginning.

    Attributes:
        hits: calls that found a graph.
        misses: calls that captured a graph.
        evictions: graphs that were dropped to make room.
        capture_seconds: time spent capturing and scheduling.
        compile_seconds: time spent compiling.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    capture_seconds: float = 0.0
    compile_seconds: float = 0.0


class _Entry(NamedTuple, Generic[_Kept]):
    made: _Kept
    name: str
    shown: Mapping[str, str]


class GraphCache(Generic[_Kept]):
    """Cache of at most `max_graphs` graphs, in the order of last use.

    An evicted graph and the graph's function are freed: the cache has the only lasting reference, but for functions
    that are bound to a single graph. Kernels that inductor has loaded stay in the process, as torch keeps kernels, and
    are shared by graphs.

    Invariant: a graph is used only by a call. All ranks make the same calls in the same order, and compare `max_graphs`
    before the first call, so all ranks evict at the same calls. `in` is no use: ranks look before they agree on a call,
    and the call may be refused. Where signatures differ between ranks, for example with uneven rows, a rank may have
    evicted a graph that another rank still has. Ranks exchange this fact before each call, and all ranks capture.

    Args:
        max_graphs: the size, at least 1.

    Example:
        >>> cache = GraphCache(1)
        >>> for key in ("a", "b"):
        ...     cache.keep(key, f"graph {key}", "f", {})
        >>> cache.find("a"), cache.find("b"), cache.counts.evictions
        (None, 'graph b', 1)
    """

    def __init__(self, max_graphs: int) -> None:
        self.max_graphs, self.counts = max_graphs, Counts()
        self._entries = BoundedCache[_Entry[_Kept]](max_graphs)
        self._warned = False

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: object) -> _Kept | None:
        """Returns the graph of a signature, and counts a hit and a use, or None if the graph is not kept."""
        entry = self._entries.find(key)
        if entry is None:
            return None
        self.counts.hits += 1
        return entry.made

    def keep(self, key: object, made: _Kept, name: str, shown: Mapping[str, str]) -> None:
        """Keeps a graph as the most recently used, and evicts another graph if there are too many.

        Args:
            key: signature.
            made: the graph, with everything that belongs to the graph.
            name: the captured function, for the warning.
            shown: arguments by path, for the warning. See `argument_shapes`.
        """
        evicted = self._entries.keep(key, _Entry(made, name, shown))
        if evicted is not None:
            self.counts.evictions += 1
            self._warn_evictions(evicted)

    def _warn_evictions(self, evicted: _Entry[_Kept]) -> None:
        """Logs that graphs are evicted again and again, once."""
        if self._warned or self.counts.evictions <= self.max_graphs:
            return
        self._warned = True
        entries = [evicted, *self._entries.values()]
        # In the log: a warning that a program turns into an error could be raised on a single rank, in the middle of a
        # call.
        log.warning(
            "%d graphs were evicted, more than max_graphs=%d keeps; one that is needed again is captured again, which"
            " takes seconds. Graphs of %s; %s. Pass jit(max_graphs=) at least the number of shapes that take turns, or"
            " pad the arguments to fewer shapes, by sf.bucketed.",
            self.counts.evictions,
            self.max_graphs,
            " and ".join(dict.fromkeys(x.name for x in entries)),
            _changed_arguments(entries),
        )


def argument_shapes(tree: PyTree, root: str) -> dict[str, str]:
    """Returns the shape of each tensor of a tree, and the value of each other leaf, by path.

    Example:
        >>> import torch
        >>> argument_shapes({"x": torch.ones(2, 3), "n": 4}, "batch")
        {"batch['n']": '4', "batch['x']": '(2, 3)'}
    """
    return {
        path: str(tuple(x.shape)) if isinstance(x, Tensor | GlobalTensor) else f"{x!r:.40}"
        for path, x in named_leaves(tree, root)
    }


def _changed_arguments(entries: Iterable[_Entry[_Kept]]) -> str:
    """Returns the arguments that differ between graphs of one name, each with its first few values."""
    values: dict[tuple[str, str], dict[str, None]] = {}
    for entry in entries:
        for path, text in entry.shown.items():
            values.setdefault((entry.name, path), {})[text] = None
    changed = [f"{path} is {', '.join(first_of([*x], 4))}" for (_, path), x in values.items() if len(x) > 1]
    if not changed:
        return "all shapes are equal, so dtypes, strides, structures or layouts differ"
    return "these arguments change: " + "; ".join(first_of(changed, 4))
