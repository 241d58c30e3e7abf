"""`BoundedCache`: a limited number of values by key. The least recently used value leaves first."""

from collections.abc import Iterable
from typing import Generic, TypeVar

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
