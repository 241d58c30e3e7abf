"""Losses that `pipeline` and `pipeline_module` return: of functions with different leaves, and of a module."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from shardfn.collectives import axis_index, axis_size
from shardfn.core import PyTree, chunk_bounds, fold_in, tree_leaves, tree_map
from shardfn.engine.loss import FIRST, LAST, LAYERS, LeafUses, is_separating, leaves_for
from shardfn.modules import LayeredFunction, LayerSpan

from ._pipelined import (
    Change,
    Enclosed,
    Pipelined,
    Place,
    from_one,
)
from ._stacks import ElsewhereTensor
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


@runtime_checkable
class LeafAdapters(Protocol):
    """Adapters of a module's leaves, such as `lora.LoRA`. The step's parameters are `{"base": ..., "lora": ...}`."""

    @property
    def sites(self) -> Mapping[str, Any]:
        """Returns by path the leaves that have an adapter."""
        ...

    def apply(self, params: PyTree, adapters: PyTree) -> PyTree:
        """Returns the parameters as the module takes them."""
        ...


@dataclasses.dataclass(frozen=True)
class PipelinedModule(Pipelined):
    """Loss that calls a module once. Each stage runs the whole loss, around the stage's layers.

    Attributes:
        loss: `loss(params, batch[, key])`.
        function: module that the loss calls.
        adapters: adapters of the module's leaves, or None. Adapters of layers lie on the ranks of the layers.
    """

    ends: ClassVar[str] = "loss"

    loss: Callable[..., Any]
    function: LayeredFunction
    adapters: LeafAdapters | None = None

    def __call__(self, params: PyTree, batch: PyTree, *key: Tensor) -> Any:
        """Returns the loss."""
        if axis_size(self.axis) > 1:
            return super().__call__(params, batch, *key)
        if is_separating():
            return self.stage(params, batch, None, Place(0, 0, True, True), key)
        return self.loss(self._adapt_params(params), batch, *key)

    def tied(self, params: PyTree) -> PyTree:
        """Returns all leaves, since code outside of the layers may compute arguments of each layer from any leaf."""
        return params

    def with_state(self) -> Pipelined:
        """Refuses a model state.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "pipeline_module(...) with has_state=True: buffers of a module are not cut into stages. Leave"
            " has_state out, or write the model's layers as functions of their part of the model state,"
            " sf.pipeline(first, block, last)."
        )

    @property
    def begins(self) -> tuple[str, Callable[..., Any]]:
        """Returns the loss, up to the first layer."""
        return "loss", self.loss

    def enter(self, params: PyTree, batch: PyTree, *key: Tensor) -> PyTree:
        """Returns the arguments of the first layer."""
        return self._run_span(leaves_for(FIRST, params), batch, LayerSpan(0, 0, None, False), key)

    def kinds(self, stack: PyTree) -> Sequence[PyTree]:
        """Returns the stacks of each kind of layers, with the adapters."""
        if self.adapters is None:
            return self.function.kinds.stacks(stack)
        return [stack]

    def cut(self, rows: Sequence[Sequence[int]]) -> list[bool]:
        """Returns by kind of layers whether the kind's stack is cut."""
        return self.function.kinds.cut(rows)

    def shares(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """Returns the number of layers of each rank, of all kinds together."""
        return self.function.kinds.shares(rows)

    def stage(self, params: PyTree, batch: PyTree, given: PyTree, place: Place, key: tuple[Tensor, ...]) -> Any:
        """Returns the loss, up to the end of this stage."""
        if is_separating():
            return super().stage(params, batch, given, place, key)
        num = self._num_layers(params, place)
        if not num and not place.ends:
            return given
        start = place.row if num else self.function.num_layers
        return self._run_span(params, batch, LayerSpan(start, num, None if place.begins else given, place.ends), key)

    def between(self, params: PyTree, batch: PyTree, h: PyTree, place: Place, key: tuple[Tensor, ...]) -> PyTree:
        """Runs the loss from the stage's first layer to the end of the last."""
        num = self._num_layers(params, place)
        own = leaves_for(LAYERS, params)
        return h if not num else self._run_span(own, batch, LayerSpan(place.row, num, h, False), key)

    def leave(self, params: PyTree, h: PyTree, batch: PyTree, *key: Tensor) -> Any:
        """Returns the part of the loss after the layers."""
        own = leaves_for(LAST, params)
        return self._run_span(own, batch, LayerSpan(self.function.num_layers, 0, h, True), key)

    def uses_of(self, functions: tuple[int, ...]) -> LeafUses:
        """Returns the uses of a leaf. The layers must not use the leaf, as each rank runs other layers."""
        return super().uses_of(functions)._replace(refused=(LAYERS,))

    def _num_layers(self, params: PyTree, place: Place) -> int:
        kinds = self.function.kinds
        rows = [tree_leaves(stack)[0].shape[0] for stack in self.kinds(self.filled(self.blocks(params)))]
        if len(rows) == 1:
            return rows[0]
        last = int(axis_index(self.axis)) == axis_size(self.axis) - 1
        return kinds.end(place.row, rows, last=last) - place.row

    def _adapt_params(self, params: PyTree) -> PyTree:
        """Returns the module's parameters, with the adapters in place, and without unused rows."""
        path, stack = self.function.path, self.filled(self.blocks(params))
        if self.adapters is None:
            return {**params, path: stack}
        base, lora = {**params["base"], path: stack["base"]}, {**params["lora"], **stack["lora"]}
        return self.adapters.apply(base, lora)

    def _run_span(self, params: PyTree, batch: PyTree, span: LayerSpan, key: tuple[Tensor, ...]) -> Any:
        given = self._adapt_params(params)
        stack = given[self.function.path]
        hidden: Any = tree_map(ElsewhereTensor.of, stack, is_leaf=lambda x: isinstance(x, Tensor))
        span.stack, span.shown = stack, hidden
        return self.function.on_span(span, self.loss, {**given, self.function.path: hidden}, batch, *key)
