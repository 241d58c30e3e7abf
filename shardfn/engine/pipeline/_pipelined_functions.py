"""Loss that `pipeline` returns for a list of functions: stages with different leaves."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from shardfn.collectives import axis_index, axis_size
from shardfn.core import PyTree, chunk_bounds, fold_in, tree_leaves, tree_map
from shardfn.engine.loss import FIRST, LAST, LeafUses, leaves_for

from ._pipelined import (
    Change,
    Enclosed,
    Pipelined,
    Place,
    from_one,
)
from ._stage_state import (
    PipelineState,
    apart,
    current_state,
    put_part,
)


class LeavesOf(NamedTuple):
    """Picks the leaves that a function of the list is called with.

    Attributes:
        of: loss.
        i: index of the function.
    """

    of: "PipelinedFunctions"
    i: int

    def __call__(self, params: PyTree) -> list[PyTree]:
        """Returns only the leaves of this function."""
        return [self.of.blocks(params)[self.i]]


@dataclasses.dataclass(frozen=True)
class PipelinedFunctions(Enclosed):
    """Loss of layers that differ, each a function of separate leaves. Stages are even parts of the list.

    There is no stack that could be cut along the axis. Each rank has all leaves, as ZeRO keeps leaves along other axes,
    and uses the leaves of the rank's functions. So these leaves are treated as the leaves of `first`, with gradients
    summed once along the axis.

    Attributes:
        functions: list of `f(p, h[, key]) -> h`, a function per layer.
    """

    functions: tuple[Callable[..., PyTree], ...]

    def stacks(self, params: PyTree) -> Sequence[PyTree]:
        """Returns no stacks."""
        self._leaves_by_function(params)
        return []

    def tied(self, params: PyTree) -> PyTree:
        """Returns all leaves of the layers."""
        return self._leaves_by_function(params)

    def firsts(self, rows: Sequence[Sequence[int]], rank: int) -> list[int]:
        """Returns the stage, by chunk."""
        del rows
        return list(self.stages(axis_size(self.axis))[rank])

    def between(self, params: PyTree, batch: PyTree, h: PyTree, place: Place, key: tuple[Tensor, ...]) -> PyTree:
        """Runs the functions of a stage, with number `place.row`."""
        del batch
        owned, states = self._leaves_by_function(params), self._state_by_function()
        for i in self._functions_of(place.row):
            own, leaves = [fold_in(k, i) for k in self.keys(key)], leaves_for(i + 1, owned[i])
            if self.has_state:
                h, states[i] = apart(self.functions[i](leaves, states[i], h, *own), f"function {i}", "h")
            else:
                h = self.functions[i](leaves, h, *own)
        if self.has_state:
            put_part(blocks=states)
        return h

    def shared_layers(self, state: PipelineState, stage: int, here: bool) -> PipelineState:
        """Returns the model state with the states of a stage's functions from the rank that runs the functions."""
        own = self._functions_of(stage)
        share = functools.partial(from_one, here=here, axis=self.axis)
        return state._replace(blocks=[tree_map(share, x) if i in own else x for i, x in enumerate(state.blocks)])

    def with_functions(self, change: Change) -> Pipelined:
        """Returns the loss with other functions for `first`, `last` and the layers."""
        functions = tuple(change(f, LeavesOf(self, i)) for i, f in enumerate(self.functions))
        return dataclasses.replace(super().with_functions(change), functions=functions)

    def leaf_uses(self, leaves: PyTree) -> dict[int, LeafUses]:
        """Returns the functions that may use a leaf: `first`, functions of the list called with it, `last`."""
        owned = [set(tree_leaves(x)) for x in self._leaves_by_function(leaves)]
        by_leaf = {i: [f + 1 for f, own in enumerate(owned) if i in own] for i in tree_leaves(leaves)}
        return {i: self.uses_of((FIRST, *functions, LAST)) for i, functions in by_leaf.items()}

    def runs_here(self, function: int) -> bool:
        """Returns whether this rank runs a function, by number. The mesh must be bound."""
        if function in (FIRST, LAST):
            return super().runs_here(function)
        own = self.stages(axis_size(self.axis))[int(axis_index(self.axis))]
        return any(function - 1 in self._functions_of(stage) for stage in own)

    def _functions_of(self, stage: int) -> range:
        return range(*chunk_bounds(len(self.functions), axis_size(self.axis) * self.num_chunks, stage))

    def _state_by_function(self) -> list[PyTree]:
        """Returns by function the model state, empty for a function without a state.

        Raises:
            ValueError: the number of states is not the number of functions.
        """
        found = current_state().blocks if self.has_state else []
        if self.has_state and (not isinstance(found, list) or len(found) != len(self.functions)):
            kind = f"{len(found)}" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
            raise ValueError(
                f"a pipeline of {len(self.functions)} functions expected model_state.blocks as a list with"
                f" the state of each, got {kind}. Use () for a function without values."
            )
        return list(found)

    def _leaves_by_function(self, params: PyTree) -> Sequence[PyTree]:
        """Returns by function the leaves.

        Raises:
            ValueError: the number of trees is not the number of functions, or there are fewer functions than stages.
        """
        found, num = self.blocks(params), axis_size(self.axis) * self.num_chunks
        if not isinstance(found, list | tuple) or len(found) != len(self.functions):
            told = f"{len(found)}" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
            raise ValueError(
                f"a pipeline of {len(self.functions)} functions expected a list with the leaves of each, got {told}."
            )
        if len(found) < num:
            raise ValueError(
                f"a pipeline of {num} stages along {self.axis!r} must have a function for each, got {len(found)}."
            )
        return found
