"""A program partitioned along a mesh axis, as data: steps over slots. A slot holds one value in one form.

The planner (`_partition.py`) writes it, once a signature. It runs step by step.
"""

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node

from shardfn.graph import Form, Strategy


class Conversion(NamedTuple):
    """One conversion of a value by a collective.

    Attributes:
        name: name of the primitive.
        shape: shape of the whole value.
        forward: bytes that a rank sends in the forward.
        backward: and in the backward, for its transpose.
        line: the user's line of the op that asks for it.
        because: the op, if it has no rule for operands in their forms, else "".
        times: how often it is sent: once for each layer of a loop.
    """

    name: str
    shape: tuple[int, ...]
    forward: float
    backward: float
    line: str
    because: str = ""
    times: int = 1


class Convert(NamedTuple):
    """A step: slot `src` in form `before` -> slot `dst` in form `after`, of a value of this shape."""

    src: int
    dst: int
    before: Form
    after: Form
    shape: tuple[int, ...]
    differentiable: bool
    line: str


class Compute(NamedTuple):
    """A step: an op on slots.

    Attributes:
        node: the op, whose arguments name nodes.
        slots: slots of its operands, in order, and of the values beside them that the strategy names.
        dsts: destinations of its results, by position; unused ones are missing.
        strategy: how.
        single: whether it returns one tensor.
        line: the user's.
    """

    node: Node
    slots: tuple[int, ...]
    dsts: dict[int, int]
    strategy: Strategy
    single: bool
    line: str


class Loop(NamedTuple):
    """A step: a program that runs once for each layer, on a carry and the layer's values.

    Attributes:
        body: function from the slots of the carry, of x, and of outside values, to the next carry and y.
        carry: the slots of the first carry.
        layers: for each layer the slots of its x.
        outside: slots of the values that all layers read.
        dsts: destinations of the last carry, and of the y of each layer, by position.
        line: the user's.
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
        section: the section that the capture has noted for them; mostly None.
        steps: numbers.
        ins: slots that they need, and that others fill.
        outs: slots that they fill, and that others need.
    """

    section: Any
    steps: range
    ins: tuple[int, ...]
    outs: tuple[int, ...]


@dataclasses.dataclass
class PartitionProgram:
    """A partitioned program, as steps over slots.

    Attributes:
        axis: the mesh axis.
        num: ranks.
        inputs: the slot of each input.
        constants: slot -> tensor, for tensors that the program closes over.
        steps: steps in order.
        outputs: a slot, or a value that is no tensor.
        num_slots: the number of slots.
        sections: the "section" that the capture has noted beside its op for each step.
        passages: the steps by section, in order.
        last_use: the slots that no later step needs by step.
        sent: the collectives, in order.
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


def _made_slots(step: Step) -> tuple[int, ...]:
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
        own = dict.fromkeys(slot for step in steps[start:stop] for slot in _made_slots(step))
        needed = dict.fromkeys(slot for step in steps[start:stop] for slot in _read_slots(step) if slot not in own)
        later = tuple(slot for slot in own if read_last.get(slot, -1) >= stop)
        out.append(Passage(sections[start], range(start, stop), tuple(needed), later))
    return out


def last_uses(program: PartitionProgram) -> list[list[int]]:
    """By step, the slots that no later one reads, and that are no output."""
    kept = {x for is_slot, x in program.outputs if is_slot}
    out: list[list[int]] = [[] for _ in program.steps]
    seen = set(kept)
    for i, step in reversed(list(enumerate(program.steps))):
        for slot in _read_slots(step):
            if slot not in seen:
                seen.add(slot)
                out[i].append(slot)
        out[i] += [slot for slot in _made_slots(step) if slot not in seen]
    return out
