"""Heads of each rank during attention to all tokens, and the key heads read by the rank's query heads."""

from shardfn.collectives import axis_index
from shardfn.core import Axes

from ._parallel import all_ranges


def evenly(read: list[int], keys: int) -> bool:
    """Returns whether query heads read `keys` key heads in runs of equal length, as in attention."""
    return not read or (len(read) % keys == 0 and read == [h // (len(read) // keys) for h in range(len(read))])


def keys_of(queries: tuple[int, int], ratio: int) -> tuple[int, int]:
    """Returns the key heads read by a range of query heads."""
    start, stop = queries
    return (start // ratio, -(-stop // ratio)) if start < stop else (0, 0)


def dealt_heads(H: int, G: int, axis: Axes) -> tuple[list[int] | None, list[int]]:
    """Returns the key heads of ranks, equally many each, and for each query head the index of the key head.

    The first result is None if `torch.chunk` of the key heads gives each rank the right heads.
    """
    queries, held = all_ranges(H, axis), all_ranges(G, axis)
    ratio = H // G if G else 1  # a rank may have no heads if heads are cut along another axis, too
    needed, own = [keys_of(q, ratio) for q in queries], queries[int(axis_index(axis))]
    read = [h // ratio - needed[int(axis_index(axis))][0] for h in range(*own)]
    if all(a == b or (a[0] == a[1] and b[0] == b[1]) for a, b in zip(needed, held, strict=True)):
        return None, read
    width = max(b - a for a, b in needed)
    return [min(a + i, G - 1) for a, _ in needed for i in range(width)], read
