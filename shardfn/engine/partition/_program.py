"""Programs partitioned along a mesh axis, as data: steps over slots. A slot holds a value in a form.

The planner (`_graph.py`) writes a program, once a signature. A program runs step by step. `converted` brings a value
from one form to another, by the primitives.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from shardfn.collectives import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    psum,
    psum_scatter,
    pvary,
    take_own_block,
)
from shardfn.graph import Form, Ranks, Strategy
from shardfn.leaves import LazyLeaf, opened


class Conversion(NamedTuple):
    """Conversion of a value by a collective.

    Attributes:
        name: name of the primitive, for example "psum".
        shape: shape of the whole value.
        forward: bytes that a rank sends in the forward.
        backward: bytes that a rank sends in the backward, for the transpose.
        line: user's line of the op that asks for the conversion.
        because: name of the op, if the op has no rule for operands in such forms, else "".
        times: number of times the value is sent: once for each layer of a loop.
    """

    name: str
    shape: tuple[int, ...]
    forward: float
    backward: float
    line: str
    because: str = ""
    times: int = 1


class Convert(NamedTuple):
    """Step: slot `src` in form `before` -> slot `dst` in form `after`, of a value of this shape."""

    src: int
    dst: int
    before: Form
    after: Form
    shape: tuple[int, ...]
    differentiable: bool
    line: str


class Compute(NamedTuple):
    """Step: an op on slots.

    Attributes:
        node: op with nodes as arguments.
        slots: slots of the operands, in order, and of the further values that the strategy names.
        dsts: slots of the results, by position. Unused results are missing.
        strategy: strategy that computes the op.
        single: whether the op returns a single tensor.
        line: user's line.
    """

    node: Node
    slots: tuple[int, ...]
    dsts: dict[int, int]
    strategy: Strategy
    single: bool
    line: str


class Loop(NamedTuple):
    """Step: a program that runs once for each layer, on a carry and the layer's values.

    Attributes:
        body: program from the slots of the carry, of x, and of outside values, to the next carry and y.
        carry: slots of the first carry.
        layers: slots of x for each layer.
        outside: slots of the values that all layers read.
        dsts: slots of the last carry, and of the y of each layer, by position.
        line: user's line.
    """

    body: "PartitionProgram"
    carry: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]
    outside: tuple[int, ...]
    dsts: dict[int, int]
    line: str


Step = Convert | Compute | Loop


class Passage(NamedTuple):
    """Steps that run together.

    Attributes:
        section: section that the capture has noted for the steps. Mostly None.
        steps: numbers of the steps.
        ins: slots that the steps need and other steps fill.
        outs: slots that the steps fill and other steps need.
    """

    section: Any
    steps: range
    ins: tuple[int, ...]
    outs: tuple[int, ...]


@dataclasses.dataclass
class PartitionProgram:
    """Partitioned program, as steps over slots.

    Attributes:
        axis: mesh axis.
        num: number of ranks.
        inputs: slot of each input.
        constants: slot -> tensor, for tensors that the program closes over.
        steps: steps in order.
        outputs: slots, or values that are not tensors.
        num_slots: number of slots.
        sections: section noted by the capture for the op of each step.
        passages: steps by section, in order.
        last_use: slots that no later step needs, by step.
        sent: collectives, in order.
    """

    axis: str
    num: int
    inputs: list[int] = dataclasses.field(default_factory=list)
    constants: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    steps: list[Step] = dataclasses.field(default_factory=list)
    outputs: list[tuple[bool, Any]] = dataclasses.field(default_factory=list)
    num_slots: int = 0
    sections: list[Any] = dataclasses.field(default_factory=list)
    passages: list[Passage] = dataclasses.field(default_factory=list)
    last_use: list[list[int]] = dataclasses.field(default_factory=list)
    sent: list[Conversion] = dataclasses.field(default_factory=list)


def _read_slots(step: Step) -> tuple[int, ...]:
    if isinstance(step, Loop):
        return (*step.carry, *(slot for x in step.layers for slot in x), *step.outside)
    return (step.src,) if isinstance(step, Convert) else step.slots


def _output_slots(step: Step) -> tuple[int, ...]:
    return (step.dst,) if isinstance(step, Convert) else tuple(step.dsts.values())


def passages(program: PartitionProgram) -> list[Passage]:
    """Returns the steps by section, with the slots that each needs and supplies."""
    steps, sections = program.steps, program.sections
    starts = [i for i in range(len(steps)) if i == 0 or sections[i] is not sections[i - 1]]
    kept = [x for is_slot, x in program.outputs if is_slot]
    read_last = {slot: i for i, step in enumerate(steps) for slot in _read_slots(step)} | dict.fromkeys(
        kept, len(steps)
    )
    out: list[Passage] = []
    for start, stop in zip(starts, [*starts[1:], len(steps)], strict=True):
        own = dict.fromkeys(slot for step in steps[start:stop] for slot in _output_slots(step))
        needed = dict.fromkeys(slot for step in steps[start:stop] for slot in _read_slots(step) if slot not in own)
        later = tuple(slot for slot in own if read_last.get(slot, -1) >= stop)
        out.append(Passage(sections[start], range(start, stop), tuple(needed), later))
    return out


def last_uses(program: PartitionProgram) -> list[list[int]]:
    """Returns by step the slots that no later step reads, and that are no output."""
    kept = {x for is_slot, x in program.outputs if is_slot}
    out: list[list[int]] = [[] for _ in program.steps]
    seen = set(kept)
    for i, step in reversed(list(enumerate(program.steps))):
        for slot in _read_slots(step):
            if slot not in seen:
                seen.add(slot)
                out[i].append(slot)
        out[i] += [slot for slot in _output_slots(step) if slot not in seen]
    return out


# From a part of a value, the part's dim, the size of the whole dim and the multiple, to the part in another form.
OfPart = Callable[[Tensor, int, int, int], Tensor]


def converted(x: Any, step: Convert, axis: str) -> Any:
    """Returns the value in the form that the step names."""
    before, after = step.before, step.after
    if (before.kind, after.kind) == ("whole", "varying") and type(x) is LazyLeaf and not x._layers:
        return x.with_handle(pvary(x.handle, axis))  # still not opened, so that the sum of gradients is taken once
    x = opened(x)
    if after.kind == "cut":
        return _cut_value(x, step, axis)
    if before.kind == "cut":
        gather = all_gather_invariant if after.kind == "whole" else all_gather
        held = Ranks(axis).own(step.shape[before.dim], before)

        def gather_part(part: Tensor, dim: int, size: int, multiple: int) -> Tensor:
            return _join_blocks(
                gather(_split_blocks(part, dim, multiple), axis, dim=dim, size=size // multiple), dim, multiple
            )

        return _convert_parts(x, before, step.shape, held, gather_part)
    if before.kind == "partial":
        return psum(x.contiguous(), axis)
    return pvary(x, axis)


def _cut_value(x: Tensor, step: Convert, axis: str) -> Tensor:
    before, after = step.before, step.after
    if before.kind == "varying":
        return Ranks(axis).block(x, after)
    if before.kind == "cut":
        return all_to_all(x, axis, split_dim=after.dim, concat_dim=before.dim, size=step.shape[before.dim])
    take = take_own_block if before.kind == "whole" else psum_scatter

    def take_own(part: Tensor, dim: int, size: int, multiple: int) -> Tensor:
        del size
        return _join_blocks(take(_split_blocks(part, dim, multiple), axis, dim=dim), dim, multiple)

    return _convert_parts(x, after, step.shape, [size for size, _ in after.parts], take_own)


def _convert_parts(x: Tensor, form: Form, shape: Sequence[int], held: Sequence[int], convert: OfPart) -> Tensor:
    """Converts each part of a cut dim. Equal parts are converted at once.

    Args:
        x: this rank's value.
        form: form in which the value is cut, before or afterwards.
        shape: shape of the whole.
        held: lengths of the parts in `x`.
        convert: function that converts a part.
    """
    dim, parts = form.dim, form.parts
    if not parts:
        return convert(x, dim, shape[dim], form.multiple)
    if len(set(parts)) == 1:
        apart = x.unflatten(dim, (len(parts), held[0]))
        return convert(apart, dim + 1, *parts[0]).flatten(dim, dim + 1)
    pieces = x.split(list(held), dim)
    return torch.cat([convert(one, dim, *part) for one, part in zip(pieces, parts, strict=True)], dim)


def _split_blocks(x: Tensor, dim: int, multiple: int) -> Tensor:
    """Returns the cut dim as [blocks, multiple], so that blocks are cut as the table cuts them."""
    return x if multiple == 1 else x.unflatten(dim, (x.shape[dim] // multiple, multiple))


def _join_blocks(x: Tensor, dim: int, multiple: int) -> Tensor:
    return x if multiple == 1 else x.flatten(dim, dim + 1)
