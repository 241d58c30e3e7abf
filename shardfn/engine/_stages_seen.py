"""What steps of a pipeline have found of its stages, once for all of them."""

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor


class ActivationShapes(NamedTuple):
    """What travels between stages: a tree of tensors without data."""

    treedef: Any
    leaves: list[Tensor]
    paths: list[str]


@dataclasses.dataclass
class StagesSeen:
    """What a plan's steps have found; empty until one has run.

    Attributes:
        ends: what kinds of values the last stage returns.
        between: by the shapes of a batch, what travels between stages.
    """

    ends: Any = None
    between: dict[Any, ActivationShapes] = dataclasses.field(default_factory=dict)
