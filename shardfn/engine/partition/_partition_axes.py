"""Partitioning along several axes: the capture for an axis runs the program along the earlier axes.

The program along the first axis runs on leaves that are whole along the second, while the second axis captures the run.
Transfers of the first are then operations of the second's graph, `sent_along`, with a separate rule: dims that the
first axis does not cut are left unchanged. So the second axis is independent of the first, and a step that the second
runs sends along both.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_meta, track_tensor

from shardfn._torch import FakeTensor
from shardfn.capture import node_of, recorder
from shardfn.collectives import pmax, psum, pvary
from shardfn.engine.loss import without_data
from shardfn.graph import Form, Ranks, sent_along
from shardfn.nn import moe

from ._partition_capture import Noting
from ._partition_convert import converted
from ._partition_program import Convert


class NotedRanks(Ranks):
    """Ranks along an axis, while another axis captures: transfers along the ranks are noted."""

    def __init__(self, axis: str, notes: Noting) -> None:
        super().__init__(axis, moe.FUNCTIONS_OF_OPS)
        self._notes = notes

    def psum(self, x: Tensor) -> Tensor:
        """Notes a sum. See `Ranks`."""
        return _note_call(psum, x, (self.axis,), list(x.shape), self._notes)

    def pmax(self, x: Tensor) -> Tensor:
        """Notes a maximum. See `Ranks`."""
        return _note_call(pmax, x, (self.axis,), list(x.shape), self._notes)

    def pvary(self, x: Tensor) -> Tensor:
        """Notes a `pvary`. See `Ranks`."""
        return _note_call(pvary, x, (self.axis,), list(x.shape), self._notes)

    def convert(self, x: Any, step: Convert) -> Any:
        """Notes a conversion, and returns the result. Converts values that the capture does not follow."""
        if not _is_followed(x, self._notes):
            return self.block(x, step.after) if step.after.kind == "cut" else x
        shape = self.local(step.shape, step.after)
        return _note_call(
            sent_along, x, (self.axis, tuple(step.before), tuple(step.after), step.shape), shape, self._notes
        )


def ranks_along(axis: str) -> Ranks:
    """Returns the ranks along an axis, as a program that runs sees them."""
    notes = recorder()
    return NotedRanks(axis, notes) if isinstance(notes, Noting) else Ranks(axis, moe.FUNCTIONS_OF_OPS)


def send_along(x: Any, axis: str, before: Any, after: Any, shape: Sequence[int]) -> Any:
    """Runs a node of `sent_along`."""
    return converted(x, Convert(0, 0, Form(*before), Form(*after), tuple(shape), True, ""), axis)


def _is_followed(x: Any, notes: Noting) -> bool:
    return isinstance(x, FakeTensor) and get_proxy_slot(x, notes.tracer, None) is not None


def _note_call(target: Callable[..., Any], x: Any, args: tuple[Any, ...], shape: list[int], notes: Noting) -> Tensor:
    """Notes a call of a primitive. The result is a tensor without data."""
    tracer = notes.tracer
    proxy = tracer.create_proxy("call_function", target, (tracer.proxy(node_of(x, notes)), *args), {})
    made = without_data(x.fake_mode, x.dtype, shape, x.device)
    track_tensor(made, proxy, constant=None, tracer=tracer)
    set_meta(proxy, made)
    return made.requires_grad_(x.requires_grad and not proxy.node.meta.get("no_grad"))
