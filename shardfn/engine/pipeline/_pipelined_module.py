"""Loss that `pipeline_module` returns: of a module whose layers may lie on several ranks."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from shardfn.collectives import axis_index, axis_size
from shardfn.core import PyTree, tree_leaves, tree_map
from shardfn.engine.loss import FIRST, LAST, LAYERS, LeafUses, is_separating, leaves_for
from shardfn.modules import LayeredFunction, LayerSpan

from ._pipelined import Pipelined, Place
from ._remote_stack import ElsewhereTensor


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
