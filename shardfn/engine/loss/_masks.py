"""The trainable leaves of a step over several losses."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardfn.core import PyTree, broadcast_prefix, raise_all


class Masks(NamedTuple):
    """Trainable leaves of a step over several losses: the leaves that any loss trains.

    Attributes:
        step: the step's mask, a prefix tree of bools. None allows all.
        losses: the mask of each loss, by name. None means all leaves that the step trains.
    """

    step: PyTree
    losses: Mapping[str, PyTree]

    def of(self, tree: PyTree, frozen: Sequence[bool], paths: Sequence[str]) -> list[bool]:
        """Returns whether each leaf is trained.

        Args:
            tree: tree of the leaves.
            frozen: whether a leaf is frozen where no mask names it.
            paths: paths of the leaves.

        Raises:
            ValueError: a loss trains a leaf that the step freezes, or no leaf at all, or the step trains a leaf that no
                loss trains. All are listed.
        """
        allowed = _broadcast_mask("trainable", self.step, tree, frozen)
        by = {
            name: _broadcast_mask(f"the trainable of {name!r}", m, tree, frozen, allowed)
            for name, m in self.losses.items()
        }
        if self.step is not None:
            raise_all(
                ValueError,
                "losses train leaves that the step freezes. Drop them from one of the two:",
                [
                    f"{path} is trained by {name!r}, and trainable= of the step is False there"
                    for name, mask in by.items()
                    for path, wanted, may in zip(paths, mask, allowed, strict=True)
                    if wanted and not may
                ],
            )
        out = [any(mask[i] for mask in by.values()) for i in range(len(paths))]
        raise_all(
            ValueError,
            "losses of a step train some leaf each. Leave these losses out, or let them train one:",
            [f"{name!r} trains none" for name, mask in by.items() if not any(mask)],
        )
        raise_all(
            ValueError,
            "the step trains leaves that no loss trains. Set them to False in trainable= of the step:",
            [
                path
                for path, may, wanted in zip(paths, allowed, out, strict=True)
                if self.step is not None and may and not wanted
            ],
        )
        return out


def _broadcast_mask(
    name: str, mask: PyTree, tree: PyTree, frozen: Sequence[bool], default: Sequence[bool] | None = None
) -> list[bool]:
    if mask is None:
        return [not f for f in frozen] if default is None else list(default)
    return broadcast_prefix(mask, tree, lambda x: isinstance(x, bool), names=(name, "params"))
