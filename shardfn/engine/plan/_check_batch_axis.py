"""Refuses a leaf that the batch's axis cuts in blocks, where the loss exchanges nothing along that axis.

Each rank would apply its own block to its own rows alone: experts that no other rank's tokens reach.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from shardfn.collectives import AxisTypeError, AxisTypeMode, track_axis_types
from shardfn.core import raise_all
from shardfn.leaves import LeafLayout


def blocks_of_batch_axes(leaves: Sequence[LeafLayout], axes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """By path, the batch's axes with several ranks that cut a leaf in blocks, which a loss has to exchange along."""
    named = {leaf.path: tuple(a for a in leaf.distinct_axes if a in axes) for leaf in leaves}
    return {path: own for path, own in named.items() if own}


@contextlib.contextmanager
def exchanging(mode: AxisTypeMode, blocks: Mapping[str, tuple[str, ...]], *, at_once: bool) -> Iterator[AxisTypeMode]:
    """Follows values as `track_axis_types` does, and demands an exchange along the axes of all blocks.

    Raises:
        AxisTypeError: no collective ran along any axis of a block; lists these leaves.
    """
    mode.crossed.clear()
    with track_axis_types(mode, at_once=at_once):
        yield mode
    raise_all(
        AxisTypeError,
        "the loss applies each rank's block of a leaf to its own rows of the batch alone, as no collective runs along"
        " the block's axis:",
        [
            f"{path} is cut along {', '.join(map(repr, axes))}; send rows to the blocks, as nn.moe.apply(...,"
            f" exchange=nn.moe.AllToAll({axes[0]!r})) does, gather the leaf with sf.all_gather, or remove {axes[0]!r}"
            " of its spec. A loss that sends by itself, without shardfn, declares it by a call of"
            f" sf.axis_index({axes[0]!r})"
            for path, axes in blocks.items()
            if mode.crossed.isdisjoint(axes)
        ],
    )
