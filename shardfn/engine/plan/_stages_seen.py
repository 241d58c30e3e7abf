"""Facts that the steps of a pipeline learn of its stages, kept for later steps."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor


class ActivationShapes(NamedTuple):
    """The values sent between stages, as a tree of tensors without data.

    Attributes:
        treedef: the structure.
        leaves: the tensors.
        paths: names.
        axes: the axes besides the batch's along which ranks hold different values by leaf.
    """

    treedef: Any
    leaves: list[Tensor]
    paths: list[str]
    axes: list[tuple[str, ...]]


@dataclasses.dataclass
class StagesSeen:
    """The facts that a plan's steps have learnt, empty until one has run.

    Attributes:
        ends: the kinds of values that the last stage returns.
        between: by the shapes of a batch, the tensors that travel between stages.
    """

    ends: Any = None
    between: dict[Any, ActivationShapes] = dataclasses.field(default_factory=dict)

    def take_ends(self, ends: Any) -> Any:
        """Keeps the kinds of values that the last stage returns, equal on all stages, and returns them."""
        self.ends = ends
        return ends

    def shapes(self, key: Hashable, find: Callable[[], ActivationShapes]) -> ActivationShapes:
        """Returns the tensors that travel between stages for batches of a shape: found by `find` the first time."""
        if key not in self.between:
            self.between[key] = find()
        return self.between[key]
