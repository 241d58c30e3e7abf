"""What `pipeline` makes of a list of functions: a loss of stages whose leaves differ."""

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor

from shardfn.collectives import axis_size
from shardfn.core import PyTree, chunk_bounds, fold_in

from ._pipelined import Enclosed, Place


@dataclasses.dataclass(frozen=True)
class PipelinedFunctions(Enclosed):
    """A loss of unlike layers, each a function of leaves of its own; stages are runs of them, cut evenly.

    There is no stack that could be cut along the axis: each rank has all leaves, as ZeRO keeps them along other axes,
    and uses those of its own functions. So they are leaves like those of `first`, summed once along the axis.

    Attributes:
        functions: `f(p, h[, key]) -> h`, one a layer.
    """

    functions: tuple[Callable[..., PyTree], ...]

    def stacks(self, params: PyTree) -> Sequence[PyTree]:
        """None."""
        self._owned(params)
        return []

    def tied(self, params: PyTree) -> PyTree:
        """All leaves of the layers."""
        return self._owned(params)

    def firsts(self, rows: Sequence[Sequence[int]], rank: int) -> list[int]:
        """By chunk, the stage."""
        del rows
        return list(self.stages(axis_size(self.axis))[rank])

    def between(self, params: PyTree, batch: PyTree, h: PyTree, place: Place, key: tuple[Tensor, ...]) -> PyTree:
        """The functions of a stage, whose number is `place.row`."""
        del batch
        owned, num = self._owned(params), axis_size(self.axis) * self.num_chunks
        for i in range(*chunk_bounds(len(self.functions), num, place.row)):
            h = self.functions[i](owned[i], h, *(fold_in(k, i) for k in key))
        return h

    def _owned(self, params: PyTree) -> Sequence[PyTree]:
        """By function, its leaves.

        Raises:
            ValueError: there are not as many; or fewer functions than stages.
        """
        found, num = self.blocks(params), axis_size(self.axis) * self.num_chunks
        if not isinstance(found, list | tuple) or len(found) != len(self.functions):
            told = f"{len(found)}" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
            raise ValueError(
                f"a pipeline of {len(self.functions)} functions wants a list with the leaves of each, got {told}."
            )
        if len(found) < num:
            raise ValueError(
                f"a pipeline of {num} stages along {self.axis!r} needs a function for each, and has {len(found)}."
            )
        return found
