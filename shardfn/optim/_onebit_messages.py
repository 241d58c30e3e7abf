"""Messages of `onebit_lamb`'s momenta. Leaves with the same cut share a message and a scale."""

from typing import NamedTuple

from torch import Tensor

from ._apart import Apart
from ._compressed import Share


class LeafGroup(NamedTuple):
    """Leaves of one message: indices among the compressed leaves, and the averaged part."""

    leaves: list[int]
    share: Share


def messages_of(leaves: Apart) -> list[LeafGroup]:
    """Returns a message for each group of leaves that are cut along the same axes.

    Leaves with other axes would not agree on the scale.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    shares = leaves.pick(leaves.shares)
    for i, share in enumerate(shares):
        groups.setdefault(share.own, []).append(i)
    return [
        LeafGroup(
            index,
            Share(sum(shares[i].n for i in index), own, tuple(dict.fromkeys(a for i in index for a in shares[i].cut))),
        )
        for own, index in groups.items()
    ]


def split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Returns the parts of a message for the leaves `like`, as views. A message may end in padding."""
    parts = flat[: sum(x.numel() for x in like)].split([x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]
