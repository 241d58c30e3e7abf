"""Choice of a replica for a request: a pure function of cached prefixes, loads and the number of the arrival.

Equal requests have equal answers on all replicas, so that the choice changes only times. A request goes to the replica
with the longest cached prefix, unless that replica has much more work than another.
"""

from collections import OrderedDict
from collections.abc import Sequence

SLACK = 2048  # tokens of work that a replica may have beyond the least, for the sake of a cached prefix


class PrefixTable:
    """Blocks that a replica has in its cache, as far as the front knows: the blocks of the prompts sent lately.

    Args:
        blocks: number of blocks of the replica's cache.

    Example:
        >>> table = PrefixTable(2)
        >>> table.record([b"a", b"b"])
        >>> table.count_hits([b"a", b"b", b"c"]), table.count_hits([b"b"])
        (2, 1)
        >>> table.record([b"c"])  # forgets b, as prefixes are forgotten after their ends
        >>> table.count_hits([b"a", b"b"])
        1
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def count_hits(self, keys: Sequence[bytes]) -> int:
        """Returns the number of blocks of the longest known prefix."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def record(self, keys: Sequence[bytes]) -> None:
        """Makes blocks the most recently used, the first of a prompt last."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._blocks:
            self._keys.popitem(last=False)


def choose_replica(hits: Sequence[int | None], loads: Sequence[int], arrival: int, *, slack: int = SLACK) -> int | None:
    """Returns the replica for a request, or None if no replica is up.

    Args:
        hits: blocks of the prompt in the cache of each replica, or None for a replica that is down.
        loads: tokens to compute of each replica's requests in progress.
        arrival: number of the request. Equal replicas have turns.
        slack: tokens by which the chosen replica's load may exceed the least load.

    Example:
        >>> choose_replica([0, 4], [0, 100], 0), choose_replica([0, 4], [0, 5000], 0)
        (1, 0)
        >>> [choose_replica([0, 0], [0, 0], i) for i in range(3)], choose_replica([None, None], [0, 0], 0)
        ([0, 1, 0], None)
    """
    up = [i for i, found in enumerate(hits) if found is not None]
    if not up:
        return None
    least = min(loads[i] for i in up)
    near = [i for i in up if loads[i] <= least + slack]
    return min(near, key=lambda i: (-(hits[i] or 0), loads[i], (i - arrival) % len(hits)))
