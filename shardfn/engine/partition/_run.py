"""Runs a partitioned program on this rank's parts: ops on blocks, and the collectives of the table between them.

Along several axes, the capture for an axis runs the program along the earlier axes. The program along the first axis
runs on leaves that are whole along the second, while the second axis captures the run. Transfers of the first are then
operations of the second's graph, `convert_form`, with a separate rule: dims that the first axis does not cut are left
unchanged. So the second axis is independent of the first, and a step that the second runs sends along both.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, map_arg
from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_meta, track_tensor

from shardfn._torch import FakeTensor
from shardfn.capture import node_of, recorder
from shardfn.collectives import pmax, psum, pvary, set_call_site
from shardfn.engine.loss import without_data
from shardfn.graph import Form, Ranks, convert_form
from shardfn.leaves import opened
from shardfn.nn import moe, run_layers

from ._capture import Noting
from ._program import (
    Compute,
    Convert,
    Loop,
    PartitionProgram,
    Passage,
    converted,
)


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
            convert_form, x, (self.axis, tuple(step.before), tuple(step.after), step.shape), shape, self._notes
        )


def ranks_along(axis: str) -> Ranks:
    """Returns the ranks along an axis, as a program that runs sees them."""
    notes = recorder()
    return NotedRanks(axis, notes) if isinstance(notes, Noting) else Ranks(axis, moe.FUNCTIONS_OF_OPS)


def send_along(x: Any, axis: str, before: Any, after: Any, shape: Sequence[int]) -> Any:
    """Runs a node of `convert_form`."""
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


# Functions that take layers of a stacked leaf without opening the leaf.
_OF_STACKS = {torch.ops.aten.unbind.int: torch.unbind, torch.ops.aten.select.int: torch.select}
# The functions that run for targets that are only marks.
_MARKS = {convert_form: send_along}


def run_program(program: PartitionProgram, inputs: Sequence[Any]) -> list[Any]:
    """Returns the results, whole on all ranks.

    Args:
        program: program made for the bound mesh.
        inputs: this rank's block of each leaf, and the other arguments.
    """
    return _run_program(program, inputs, ranks_along(program.axis))


def _run_program(program: PartitionProgram, inputs: Sequence[Any], ranks: Ranks) -> list[Any]:
    slots: list[Any] = [None] * program.num_slots
    for slot, x in zip(program.inputs, inputs, strict=True):
        slots[slot] = x
    for slot, x in program.constants.items():
        slots[slot] = x
    for passage in program.passages:
        if passage.section is None:
            _run_passage(program, passage, ranks, slots)
        else:
            _run_section(program, passage, ranks, slots)
    return [opened(slots[x]) if is_slot else x for is_slot, x in program.outputs]


def _run_passage(program: PartitionProgram, passage: Passage, ranks: Ranks, slots: list[Any]) -> None:
    noted = isinstance(ranks, NotedRanks)
    for i in passage.steps:
        step = program.steps[i]
        with set_call_site(step.line):
            if isinstance(step, Convert):
                x = slots[step.src]
                slots[step.dst] = ranks.convert(opened(x), step) if noted else converted(x, step, program.axis)
            elif isinstance(step, Loop):
                _run_loop(step, ranks, slots)
            else:
                _run_compute(step, ranks, slots)
        for slot in program.last_use[i]:
            slots[slot] = None


def _run_section(program: PartitionProgram, passage: Passage, ranks: Ranks, slots: list[Any]) -> None:
    """Runs a section as a function of its inputs, inside the transform that drops or moves its activations."""

    def run_steps(*given: Any) -> tuple[Any, ...]:
        own: list[Any] = [None] * len(slots)
        for slot, x in zip(passage.ins, given, strict=True):
            own[slot] = x
        _run_passage(program, passage, ranks, own)
        return tuple(own[slot] for slot in passage.outs)

    given = [slots[slot] for slot in passage.ins]
    for i in passage.steps:
        for slot in program.last_use[i]:
            slots[slot] = None
    for slot, x in zip(passage.outs, passage.section.around(run_steps)(*given), strict=True):
        slots[slot] = x


def _run_loop(step: Loop, ranks: Ranks, slots: list[Any]) -> None:
    """Runs a loop as a scan of the body. A capture writes the scan layer by layer, as any other scan."""
    outside = [slots[slot] for slot in step.outside]
    num = len(step.carry)

    def run_layer(carry: list[Tensor], x: list[Any], first: Any) -> tuple[list[Tensor], list[Tensor]]:
        del first
        out = _run_program(step.body, [*carry, *x, *outside], ranks)
        return out[:num], out[num:]

    layers = [[slots[slot] for slot in x] for x in step.layers]
    carry, ys = run_layers(run_layer, [opened(slots[slot]) for slot in step.carry], layers)
    results = [*carry, *(y for layer in ys for y in layer)]
    for at, dst in step.dsts.items():
        slots[dst] = results[at]


def _run_compute(step: Compute, ranks: Ranks, slots: list[Any]) -> None:
    node, strategy = step.node, step.strategy
    given = iter(step.slots)
    target: Any = _OF_STACKS.get(node.target, node.target)  # pyright: ignore[reportArgumentType, reportCallIssue]
    stacked = target is not node.target
    target = _MARKS.get(target, ranks.functions.get(target, target))

    def take_value(n: Node) -> Any:
        x = slots[next(given)]
        return x if stacked else opened(x)

    args, kwargs = map_arg((node.args, dict(node.kwargs)), take_value)
    mode = torch.no_grad() if node.meta.get("no_grad") else contextlib.nullcontext()
    with mode:
        if strategy.run is None:
            out = target(*args, **kwargs)
        else:
            out = strategy.run(ranks, (*args, *(slots[slot] for slot in given)), kwargs)
    results = (out,) if step.single else out
    for at, dst in step.dsts.items():
        slots[dst] = results[at]
