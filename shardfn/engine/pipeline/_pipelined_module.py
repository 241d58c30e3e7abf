"""The loss that `pipeline_module` returns: of a module whose layers may lie on several ranks."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardfn.collectives import axis_index, axis_size
from shardfn.core import PyTree, tree_leaves, tree_map
from shardfn.modules import LayeredFunction, LayerSpan

from ._pipelined import Pipelined, Place
from ._remote_stack import ElsewhereTensor


@dataclasses.dataclass(frozen=True)
class PipelinedModule(Pipelined):
    """A loss that calls a module once. Each stage runs the whole of it, around its own layers.

    Attributes:
        loss: `loss(params, batch[, key])`.
        function: the module that it calls.
    """

    loss: Callable[..., Any]
    function: LayeredFunction

    def __call__(self, params: PyTree, batch: PyTree, *key: Tensor) -> Any:
        """The loss."""
        if axis_size(self.axis) == 1:
            return self.loss(self._filled(params), batch, *key)
        return super().__call__(params, batch, *key)

    def tied(self, params: PyTree) -> PyTree:
        """All leaves: code outside of the layers may compute arguments of each layer from any of them."""
        return params

    def with_state(self) -> Pipelined:
        """Refused.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "pipeline_module(...) with has_state=True: buffers of a module are not cut into stages. Leave it out; or"
            " write the model's layers as functions of their part of the model state, sf.pipeline(first, block, last)."
        )

    @property
    def begins(self) -> tuple[str, Callable[..., Any]]:
        """The loss, up to the first layer."""
        return "loss", self.loss

    def enter(self, params: PyTree, batch: PyTree, *key: Tensor) -> PyTree:
        """The arguments of the first layer."""
        return self._run(params, batch, LayerSpan(0, 0, None, False), key)

    def kinds(self, stack: PyTree) -> Sequence[PyTree]:
        """The stacks of each kind of layers."""
        return self.function.kinds.stacks(stack)

    def cut(self, rows: Sequence[Sequence[int]]) -> list[bool]:
        """Which kinds of layers have a stack that is cut."""
        return self.function.kinds.cut(rows)

    def shares(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """How many layers each rank has, of all kinds."""
        return self.function.kinds.shares(rows)

    def stage(self, params: PyTree, batch: PyTree, given: PyTree, place: Place, key: tuple[Tensor, ...]) -> Any:
        """The loss, up to the end of this stage."""
        num = self._num_layers(params, place)
        if not num and not place.ends:
            return given
        start = place.row if num else self.function.num_layers
        return self._run(params, batch, LayerSpan(start, num, None if place.begins else given, place.ends), key)

    def between(self, params: PyTree, batch: PyTree, h: PyTree, place: Place, key: tuple[Tensor, ...]) -> PyTree:
        """The loss from its first own layer to the end of the last."""
        num = self._num_layers(params, place)
        return h if not num else self._run(params, batch, LayerSpan(place.row, num, h, False), key)

    def leave(self, params: PyTree, h: PyTree, batch: PyTree, *key: Tensor) -> Any:
        """The part of the loss after the layers."""
        return self._run(params, batch, LayerSpan(self.function.num_layers, 0, h, True), key)

    def _num_layers(self, params: PyTree, place: Place) -> int:
        kinds = self.function.kinds
        rows = [tree_leaves(stack)[0].shape[0] for stack in kinds.stacks(self.filled(self.blocks(params)))]
        if len(rows) == 1:
            return rows[0]
        last = int(axis_index(self.axis)) == axis_size(self.axis) - 1
        return kinds.end(place.row, rows, last=last) - place.row

    def _filled(self, params: PyTree) -> PyTree:
        return {**params, self.function.path: self.filled(params[self.function.path])}

    def _run(self, params: PyTree, batch: PyTree, span: LayerSpan, key: tuple[Tensor, ...]) -> Any:
        filled = self._filled(params)
        stack = filled[self.function.path]
        hidden: Any = tree_map(ElsewhereTensor.of, stack)
        span.stack, span.shown = stack, hidden
        return self.function.on_span(span, self.loss, {**filled, self.function.path: hidden}, batch, *key)
