"""`partition_graph`: a program of one device, along a mesh axis: which form each value has, and what is sent between.

The rules of the op table offer strategies for each op; the planner chooses the cheapest, op by op, where the price is
what is sent, forward and backward, for all that has not been made before. Three things make that a whole. A value is
converted once to each form, and kept for its other uses. Views cost nothing, so that a view of a value that is to be
sent is made again, of what was sent. And a sum that is not needed yet is not taken: partial values stay so through what
is linear.

A leaf that its spec cuts is joined only where nothing else is possible: that it stays cut is what the spec is for.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ._forms import VARYING, WHOLE, Form, Operand, OpUse, Strategy, whole
from ._ops import known_op
from ._partition_program import Compute, Conversion, Convert, PartitionProgram, last_uses, passages

_ATEN = torch.ops.aten
# Other looks at the same elements: worth making twice, rather than sending twice.
LOOKS = {
    getattr(_ATEN, name)
    for name in "view _unsafe_view reshape t transpose permute unsqueeze squeeze alias clone expand".split()
}
_PARTS_OF_LEAVES = {getattr(_ATEN, name) for name in "_to_copy unbind select slice split split_with_sizes".split()}
# What a byte of a leaf costs that its spec has cut.
_KEPT_CUT = 1e6
# So little that it decides only between strategies that send the same.
_PER_ELEMENT = 1e-9


@dataclasses.dataclass(eq=False)
class PlannedValue:
    """One tensor of the program: where it comes from, its form, and the slots in which it is held.

    Attributes:
        node: what makes it.
        at: which of its results it is.
        seen: the whole.
        form: as it is made.
        differentiable: whether a gradient may arrive.
        leaf: whether it is a parameter that is cut, or a look at one.
        slots: by form, where it is held.
    """

    node: Node
    at: int
    seen: Operand
    form: Form
    differentiable: bool
    leaf: bool = False
    slots: dict[Form, int] = dataclasses.field(default_factory=dict)


def conversion_bytes(
    before: Form, after: Form, numel: int, itemsize: int, num: int, *, differentiable: bool
) -> tuple[str, float, float]:
    """The primitive that takes a value from form to form, and the bytes that a rank sends, forward and backward.

    Example:
        >>> conversion_bytes(WHOLE, VARYING, 8, 4, 2, differentiable=True)
        ('pvary', 0.0, 32.0)
    """
    part = numel * itemsize * (num - 1) / num
    if before == after:
        return "", 0.0, 0.0
    table = {
        ("whole", "varying"): ("pvary", 0.0, 2 * part),
        ("whole", "cut"): ("take_own_block", 0.0, part),
        ("cut", "whole"): ("all_gather_invariant", part, 0.0),
        ("cut", "varying"): ("all_gather", part, part),
        ("cut", "cut"): ("all_to_all", part / num, part / num),
        ("partial", "whole"): ("psum", 2 * part, 0.0),
        ("partial", "cut"): ("psum_scatter", part, part),
        ("varying", "cut"): ("take", 0.0, 0.0),
    }
    name, forward, backward = table[before.kind, after.kind]
    return name, forward, backward if differentiable else 0.0


class PartitionPlanner:
    """Plans one program along one axis, node by node in order."""

    def __init__(self, axis: str, num: int) -> None:
        self.program = PartitionProgram(axis, num)
        self._values: dict[Node, list[PlannedValue | None]] = {}
        self._strategies: dict[Node, Strategy] = {}
        self._line = ""
        self._because = ""
        self._section: Any = None

    def enter(self, node: Node, form: Form, *, differentiable: bool) -> None:
        """An input, whose slot is the next one."""
        x = node.meta["val"]
        leaf = form.kind == "cut"
        value = PlannedValue(node, 0, _seen(x), form, differentiable and _has_gradients(x), leaf)
        self._values[node] = [value]
        self.program.inputs.append(self._slot(value, form))

    def constant(self, node: Node, x: Tensor) -> None:
        """A tensor that the program closes over: the same on all ranks."""
        value = PlannedValue(node, 0, Operand(tuple(x.shape), x.element_size()), WHOLE, x.requires_grad)
        self._values[node] = [value]
        self.program.constants[self._slot(value, WHOLE)] = x

    def add(self, node: Node) -> None:
        """The next op."""
        if node.target is operator.getitem:
            source, at = node.args
            self._values[node] = [self._values[source][at]]  # pyright: ignore[reportArgumentType, reportIndexIssue, reportCallIssue]
            return
        self._line, self._section = short(node.meta.get("where")), node.meta.get("section")
        operands = [self._one(n) for n in operands_of(node)]
        strategy = self._choose(node, operands)
        self._strategies[node] = strategy
        made = _results(node)
        able = any(v.differentiable for v in operands) and not node.meta.get("no_grad")
        able = able and node.target is not _ATEN.detach.default
        forms = iter(strategy.outs)
        # A leaf that is cast, or a layer of one, too, stays cut if its spec says so.
        same = _is_look(node) or getattr(node.target, "overloadpacket", None) in _PARTS_OF_LEAVES
        leaf = same and operands[0].leaf and strategy.outs[0].kind == "cut"
        self._values[node] = [
            None if x is None else PlannedValue(node, k, _seen(x), next(forms), able and _has_gradients(x), leaf)
            for k, x in enumerate(made)
        ]
        if not _is_look(node):
            self._compute(node)

    def leave(self, outputs: Sequence[Any]) -> PartitionProgram:
        """The results, whole."""
        self._line, self._because, self._section = "the results", "", None
        for x in outputs:
            is_node = isinstance(x, Node)
            self.program.outputs.append((is_node, self._need(self._one(x), WHOLE) if is_node else x))
        self.program.last_use = last_uses(self.program)
        self.program.passages = passages(self.program)
        return self.program

    def _one(self, node: Node) -> PlannedValue:
        (value,) = self._values[node]
        assert value is not None
        return value

    def _slot(self, value: PlannedValue, form: Form) -> int:
        value.slots[form] = self.program.num_slots
        self.program.num_slots += 1
        return value.slots[form]

    # Which strategy.

    def _choose(self, node: Node, operands: Sequence[PlannedValue]) -> Strategy:
        rule = known_op(node.target).sharding
        use = _use(node, operands, self.program.num)
        try:
            offered = [whole(use)] if rule is None else rule(use)
        except Exception as error:
            shapes = [x.shape for x in use.operands]
            raise ValueError(f"{self._line}: partition cannot tell how {node.target} of {shapes} is cut.") from error
        # Nothing becomes a sum that is still to be taken; it is made as one.
        offered = [
            s for s in offered if all(f.kind != "partial" or v.form == f for v, f in zip(operands, s.ins, strict=True))
        ]
        prices = [self._price(s, operands) for s in offered]
        best = min(range(len(offered)), key=prices.__getitem__)
        chosen = offered[best]
        pairs = zip(operands, chosen.ins, strict=True)
        joined = any(v.form.kind == "cut" and f.kind in ("whole", "varying") for v, f in pairs)
        self._because = str(node.target) if joined else ""
        if chosen.sent:
            half = chosen.sent / 2
            self.program.sent.append(Conversion(chosen.note, use.outs[0].shape, half, half, self._line))
        return chosen

    def _price(self, strategy: Strategy, operands: Sequence[PlannedValue]) -> float:
        wanted = {(id(v), f): v for v, f in zip(operands, strategy.ins, strict=True)}
        sent = sum(self._cost(v, f) for (_, f), v in wanted.items())
        # Cut results are less work, and partial ones as much as whole ones.
        work = sum(1.0 if f.kind == "cut" else self.program.num for f in strategy.outs)
        return sent + strategy.sent + _PER_ELEMENT * work

    def _cost(self, value: PlannedValue, form: Form) -> float:
        """Bytes of what is still to be sent for a value in a form."""
        form = self._as_needed(value, form)
        if form in value.slots or form == value.form:
            return 0.0
        through = self._through(value, form)
        if through is not None:
            return self._cost(through, form)
        before = self._from(value, form)
        x = value.seen
        cost = self._cost(value, before) if before != value.form else 0.0
        how = {"differentiable": value.differentiable}
        _, forward, backward = conversion_bytes(before, form, math.prod(x.shape), x.itemsize, self.program.num, **how)
        return cost + (forward + backward + 1e-3) * (_KEPT_CUT if value.leaf else 1.0)

    def _as_needed(self, value: PlannedValue, form: Form) -> Form:
        return WHOLE if form == VARYING and not value.differentiable else form

    def _from(self, value: PlannedValue, form: Form) -> Form:
        """The form that a conversion starts from."""
        if form == VARYING and (value.form.kind == "partial" or WHOLE in value.slots):
            return WHOLE
        again = form.kind == value.form.kind == "cut"
        if again and (form.dim == value.form.dim or form.multiple * value.form.multiple > 1):
            return self._as_needed(value, VARYING)
        if form.kind == "cut" and WHOLE in value.slots and value.form.kind == "partial":
            return WHOLE
        return value.form

    def _through(self, value: PlannedValue, form: Form) -> PlannedValue | None:
        """The value of which a look can be made again in this form, in place of converting the look."""
        if form.kind in ("whole", "varying") and value.form.kind in ("whole", "partial") and _is_look(value.node):
            source = self._one(value.node.all_input_nodes[0])
            if source.form == value.form and math.prod(source.seen.shape) <= math.prod(value.seen.shape):
                return source
        return None

    # What is written down.

    def _need(self, value: PlannedValue, form: Form) -> int:
        """The slot of a value in a form, made if it is not there."""
        form = self._as_needed(value, form)
        if form in value.slots:
            return value.slots[form]
        if form == value.form:
            self._compute(value.node)
            return value.slots[form]
        through = self._through(value, form)
        if through is not None:
            return self._look_again(value, through, form)
        before = self._from(value, form)
        src = self._need(value, before)
        x, program = value.seen, self.program
        dst = self._slot(value, form)
        self._write(Convert(src, dst, before, form, x.shape, value.differentiable, self._line))
        how = {"differentiable": value.differentiable}
        name, forward, backward = conversion_bytes(before, form, math.prod(x.shape), x.itemsize, program.num, **how)
        if forward or backward:
            program.sent.append(Conversion(name, x.shape, forward, backward, self._line, self._because))
        return dst

    def _write(self, step: Convert | Compute) -> None:
        self.program.steps.append(step)
        self.program.sections.append(self._section)

    def _look_again(self, value: PlannedValue, source: PlannedValue, form: Form) -> int:
        src = self._need(source, form)
        node = value.node
        dst = self._slot(value, form)
        strategy = self._strategies[node]._replace(ins=(form,), outs=(form,))
        self._write(Compute(node, (src,), {0: dst}, strategy, True, self._line))
        return dst

    def _compute(self, node: Node) -> None:
        strategy = self._strategies[node]
        operands = [self._one(n) for n in operands_of(node)]
        slots = tuple(self._need(v, f) for v, f in zip(operands, strategy.ins, strict=True))
        values = self._values[node]
        dsts = {v.at: self._slot(v, v.form) for v in values if v is not None}
        single = isinstance(node.meta["val"], Tensor)
        line = short(node.meta.get("where"))
        self._write(Compute(node, slots, dsts, strategy, single, line))


def operands_of(node: Node) -> list[Node]:
    """The tensors among the arguments, in the order in which they stand, each as often as it does."""
    found: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return found


def short(line: str | None) -> str:
    """A line of the user's code, or that it is not known."""
    return line or "a line unknown"


def _use(node: Node, operands: Sequence[PlannedValue], num: int) -> OpUse:
    seen = iter(operands)
    counter = iter(range(len(operands)))
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: next(seen).seen._replace(number=next(counter)))
    outs = tuple(_seen(x) for x in _results(node) if x is not None)
    forms = tuple(v.form for v in operands)
    return OpUse(node.target, tuple(args), dict(kwargs), tuple(v.seen for v in operands), forms, outs, num)


def _results(node: Node) -> list[Tensor | None]:
    val = node.meta["val"]
    return [val] if isinstance(val, Tensor) else [x if isinstance(x, Tensor) else None for x in val]


def _has_gradients(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _seen(x: Tensor) -> Operand:
    return Operand(tuple(x.shape), x.element_size())


def _is_look(node: Node) -> bool:
    look = node.op == "call_function" and getattr(node.target, "overloadpacket", None) in LOOKS
    return look and node.target is not _ATEN.view.dtype  # which reads the bits as other numbers


def partition_graph(
    graph: Graph,
    axis: str,
    num: int,
    forms: Mapping[Node, Form],
    trained: Callable[[Node], bool],
    constants: Callable[[Node], Tensor],
) -> PartitionProgram:
    """The program of a graph along an axis.

    Args:
        graph: a captured forward, without writes; each node's `meta["val"]` has the whole shape.
        axis: the mesh axis.
        num: its ranks.
        forms: of inputs that are cut; the others are whole.
        trained: whether a gradient may arrive at an input.
        constants: the tensor of a `get_attr`.
    """
    plan = PartitionPlanner(axis, num)
    for node in graph.nodes:
        if node.op == "placeholder":
            plan.enter(node, forms.get(node, WHOLE), differentiable=trained(node))
        elif node.op == "get_attr":
            plan.constant(node, constants(node))
        elif node.op == "call_function":
            plan.add(node)
        elif node.op == "output":
            return plan.leave(node.args[0])
    raise AssertionError("a graph without output")
