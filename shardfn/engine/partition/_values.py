"""Values of a program that is to be partitioned, for all plans: origins, shapes, last uses, and moves to other forms.

A scope is the program outside of all loops, or the body of a loop. A loop is an operation of the surrounding scope. A
move to another form has the bytes that it sends.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, Node

from shardfn.graph import (
    VARYING,
    WHOLE,
    Body,
    Form,
    Operand,
    bodies_of,
    looped,
    node_flops,
    reads,
)

_ATEN = torch.ops.aten
# Views of the same elements: to make a view twice is better than to send the view twice.
LOOKS = {
    getattr(_ATEN, name)
    for name in "view _unsafe_view reshape t transpose permute unsqueeze squeeze alias clone expand".split()
}
# Rows by number are views in this sense, too: with several copies of a row the source is less to send.
_ROWS = {_ATEN.index, _ATEN.index_select, torch.ops.shardfn_kernels.copied_rows}
# Such ops take the dtype and device of the operand, perhaps the shape, and nothing that has a gradient.
_SHAPED_ALIKE = {
    getattr(_ATEN, name)
    for name in "new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like".split()
}
_PARTS_OF_LEAVES = {getattr(_ATEN, name) for name in "_to_copy unbind select slice split split_with_sizes".split()}


@dataclasses.dataclass(eq=False)
class PlannedValue:
    """Tensor of a program.

    Attributes:
        node: node that makes the value.
        at: position among the node's results.
        seen: whole shape.
        differentiable: whether a gradient may arrive.
        look_at: source of a view, or source of rows.
        part_of: value that the tensor is a part, a view, or a cast of. For a join of inputs, the first input.
        outer: value in the surrounding scope, for an input of a loop's body from outside.
        times: number of runs of the body.
    """

    node: Node
    at: int
    seen: Operand
    differentiable: bool
    look_at: "PlannedValue | None" = None
    part_of: "PlannedValue | None" = None
    outer: "PlannedValue | None" = None
    times: int = 1


@dataclasses.dataclass(eq=False)
class LoopValues:
    """Loop, as the surrounding scope sees the loop.

    Attributes:
        scope: body.
        num: number of runs.
        given: values of the body that are the carry, then x.
        num_carry: number of values of the carry.
        carry: surrounding values that the carry begins with.
        layers: surrounding values that are the x of each layer.
        ends: values of the body that are the next carry, then y.
    """

    scope: "Scope"
    num: int
    given: list[PlannedValue]
    num_carry: int
    carry: list[PlannedValue]
    layers: list[list[PlannedValue]]
    ends: list[PlannedValue]

    @property
    def outside(self) -> list[PlannedValue]:
        """Returns the values of the body that are surrounding values."""
        return [v for v in self.scope.inputs if v.outer is not None]


@dataclasses.dataclass(eq=False)
class Scope:
    """Operations in order, with the values that operations read and make.

    Attributes:
        inputs: values passed to the scope.
        nodes: operations, without operations that only take a result out of several.
        made: results of each operation, or None for results that are not tensors.
        operands: operands of each operation, in the order of the arguments.
        loops: loops, by operation.
        dead: values that no later operation needs, by operation.
        weights: number of equal operations that an operation represents, if more than 1 (`_spec_rules.py`).
    """

    inputs: list[PlannedValue] = dataclasses.field(default_factory=list)
    nodes: list[Node] = dataclasses.field(default_factory=list)
    made: dict[Node, list[PlannedValue | None]] = dataclasses.field(default_factory=dict)
    operands: dict[Node, list[PlannedValue]] = dataclasses.field(default_factory=dict)
    loops: dict[Node, LoopValues] = dataclasses.field(default_factory=dict)
    dead: dict[Node, list[PlannedValue]] = dataclasses.field(default_factory=dict)
    weights: dict[Node, int] = dataclasses.field(default_factory=dict)
    _flops: dict[Node, int] = dataclasses.field(default_factory=dict)

    def flops(self, node: Node) -> int:
        """Returns the floating-point operations of an operation on whole values."""
        if node not in self._flops:
            self._flops[node] = node_flops(node)
        return self._flops[node]

    def one(self, node: Node) -> PlannedValue:
        """Returns the only result of a node."""
        (value,) = self.made[node]
        assert value is not None
        return value


def scope_of(graph: Graph, trained: Callable[[Node], bool], constants: Callable[[Node], Tensor]) -> Scope:
    """Returns the program outside of all loops, with the other scopes inside.

    Args:
        graph: captured forward, without writes. Each node's `meta["val"]` has the whole shape.
        trained: function that returns whether a gradient may arrive at an input.
        constants: function that returns the tensor of a `get_attr`.
    """
    nodes, bodies = bodies_of(graph)
    scope = Scope()
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            x = constants(node) if node.op == "get_attr" else node.meta["val"]
            able = x.requires_grad if node.op == "get_attr" else trained(node)
            _enter_value(scope, node, x, able and _has_gradients(x))
    _fill_scope(scope, [n for n in nodes if n.op == "call_function"], bodies)
    outputs: Any = nodes[-1].args[0]
    ends = [scope.one(n) for n in outputs if isinstance(n, Node)]
    find_last_uses(scope, ends)
    return scope


def is_look(node: Node) -> bool:
    """Returns whether an op only views or copies the operand. See `LOOKS`."""
    packet = getattr(node.target, "overloadpacket", None)
    if node.op == "call_function" and packet in _ROWS:
        return all(not _has_gradients(n.meta["val"]) for n in operands_of(node)[1:])
    look = node.op == "call_function" and packet in LOOKS
    return look and node.target is not _ATEN.view.dtype  # reads the bits as other numbers


def operands_of(node: Node) -> list[Node]:
    """Returns the tensors among the arguments, in order, with repetitions."""
    found: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return found


def results(node: Node) -> list[Tensor | None]:
    """Returns the results of an op, flat, or None for results that are not tensors."""
    val: Any = node.meta.get("val")
    val = () if val is None else val
    return [val] if isinstance(val, Tensor) else [x if isinstance(x, Tensor) else None for x in val]


def seen(x: Tensor) -> Operand:
    """Returns a tensor as a rule sees it."""
    return Operand(tuple(x.shape), x.element_size())


def _enter_value(scope: Scope, node: Node, x: Tensor, differentiable: bool) -> PlannedValue:
    value = PlannedValue(node, 0, seen(x), differentiable)
    scope.made[node] = [value]
    scope.inputs.append(value)
    return value


def _fill_scope(scope: Scope, nodes: Sequence[Node], bodies: dict[Node, Body]) -> None:
    for node in nodes:
        if node.target is operator.getitem:
            source, at = node.args
            scope.made[node] = [scope.made[source][at]]  # pyright: ignore[reportArgumentType, reportIndexIssue, reportCallIssue]
            continue
        scope.nodes.append(node)
        packet = getattr(node.target, "overloadpacket", None)
        if node.target is looped:
            loop = scope.loops[node] = _add_loop(scope, node, bodies)
            scope.operands[node] = [scope.one(n) for n in reads(node, bodies)]
            able = [v.differentiable for v in loop.ends]
            num_ys = len(able) - loop.num_carry
            flags = able[: loop.num_carry] + able[loop.num_carry :] * (loop.num if num_ys else 0)
        else:
            scope.operands[node] = [scope.one(n) for n in operands_of(node)]
            able = any(v.differentiable for v in scope.operands[node]) and not node.meta.get("no_grad")
            able = able and node.target is not _ATEN.detach.default and packet not in _SHAPED_ALIKE
            flags = [able and x is not None and _has_gradients(x) for x in results(node)]
        first = scope.operands[node][0] if scope.operands[node] else None
        look = first if is_look(node) else None
        part_of_leaf = packet in LOOKS or packet in _PARTS_OF_LEAVES or _joins_inputs(scope, node, packet)
        part = first if part_of_leaf and node.target is not _ATEN.view.dtype else None
        made = zip(results(node), flags, strict=True)
        scope.made[node] = [
            None if x is None else PlannedValue(node, k, seen(x), able, look, part) for k, (x, able) in enumerate(made)
        ]


def _joins_inputs(scope: Scope, node: Node, packet: Any) -> bool:
    """Returns whether an op joins inputs, or parts of inputs. Then the result counts as a leaf, as inputs do."""
    roots = list(scope.operands[node]) if packet is _ATEN.cat else []
    for k, value in enumerate(roots):
        while value.part_of is not None:
            value = value.part_of
        roots[k] = value
    return bool(roots) and all(v in scope.inputs for v in roots)


def _add_loop(scope: Scope, node: Node, bodies: dict[Node, Body]) -> LoopValues:
    body = bodies[node]
    args: Any = node.args
    carry, layers = [scope.one(n) for n in args[0]], [[scope.one(n) for n in x] for x in args[1]]
    able = [v.differentiable for v in (*carry, *layers[0])]
    while True:
        inner = Scope()
        for n, flag in zip(body.given, able, strict=True):
            _enter_value(inner, n, n.meta["val"], flag)
        for n in body.outside:
            outer = scope.one(n)
            value = PlannedValue(n, 0, outer.seen, outer.differentiable, outer=outer, times=len(layers))
            inner.made[n] = [value]
            inner.inputs.append(value)
        _fill_scope(inner, body.nodes, bodies)
        ends = [inner.one(n) for n in body.ends]
        more = [a or v.differentiable for a, v in zip(able, ends[: body.num_carry], strict=False)]
        if more == able[: body.num_carry]:
            break
        able[: body.num_carry] = more
    find_last_uses(inner, ends)
    given = inner.inputs[: len(body.given)]
    return LoopValues(inner, len(layers), given, body.num_carry, carry, layers, ends)


def find_last_uses(scope: Scope, ends: Sequence[PlannedValue]) -> None:
    """Fills `scope.dead`. A view keeps the source alive, as the view may be made again from the source."""
    alive = set(_add_sources(ends))
    for node in reversed(scope.nodes):
        used = dict.fromkeys(_add_sources([*scope.operands[node], *(v for v in scope.made[node] if v is not None)]))
        scope.dead[node] = [v for v in used if v not in alive]
        alive |= used.keys()


def _add_sources(values: Sequence[PlannedValue]) -> list[PlannedValue]:
    out: list[PlannedValue] = []
    for value in values:
        at: PlannedValue | None = value
        while at is not None:
            out.append(at)
            at = at.look_at
    return out


def _has_gradients(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class Knows(Protocol):
    """Forms of values at a point of a program."""

    def form_of(self, value: PlannedValue) -> Form:
        """Returns the form in which a value is made."""
        ...

    def has(self, value: PlannedValue, form: Form) -> bool:
        """Returns whether a value is there in a form."""
        ...


class FormMove(NamedTuple):
    """Last step towards a form.

    Attributes:
        kind: "there", "made" (in this form), "look" (made again as a view of `source`), or "convert" (from form
            `before`).
        before: form to convert from.
        source: value to view.
    """

    kind: str
    before: Form = WHOLE
    source: PlannedValue | None = None


def needed_form(value: PlannedValue, form: Form) -> Form:
    """Returns the form to convert to: a value without a gradient needs no `pvary`, and stays whole."""
    return WHOLE if form == VARYING and not value.differentiable else form


def move_to(value: PlannedValue, form: Form, known: Knows) -> FormMove:
    """Returns the last step that brings a value into a form of `needed_form`."""
    if known.has(value, form):
        return FormMove("there")
    own = known.form_of(value)
    if form == own:
        return FormMove("made")
    source = value.look_at
    if source is not None and form.kind in ("whole", "varying") and own.kind != "varying":
        # Views cost nothing: the source, sent for another view, serves this view.
        like = known.form_of(source).kind == "cut" if own.kind == "cut" else known.form_of(source) == own
        if like and math.prod(source.seen.shape) <= math.prod(value.seen.shape):
            return FormMove("look", source=source)
    return FormMove("convert", _moves_from(value, own, form, known))


def _moves_from(value: PlannedValue, own: Form, form: Form, known: Knows) -> Form:
    if form == VARYING and (own.kind in ("partial", "rows") or known.has(value, WHOLE)):
        return WHOLE
    again = form.kind == own.kind == "cut"
    if again and (form.dim == own.dim or form.multiple * own.multiple > 1 or form.parts or own.parts):
        return needed_form(value, VARYING)
    if form.kind == "cut" and own.kind in ("partial", "rows") and known.has(value, WHOLE):
        return WHOLE
    return own


def conversion_bytes(
    before: Form, after: Form, numel: int, itemsize: int, num: int, *, differentiable: bool
) -> tuple[str, float, float]:
    """Returns the primitive that takes a value from a form to another, and a rank's bytes, forward and backward.

    Example:
        >>> conversion_bytes(WHOLE, VARYING, 8, 4, 2, differentiable=True)
        ('pvary', 0.0, 32.0)
    """
    part = numel * itemsize * (num - 1) / num
    if before == after:
        return "", 0.0, 0.0
    table: dict[Any, tuple[str, float, float]] = {
        ("whole", "varying"): ("pvary", 0.0, 2 * part),
        ("whole", "cut"): ("take_own_block", 0.0, part),
        ("cut", "whole"): ("all_gather_invariant", part, 0.0),
        ("cut", "varying"): ("all_gather", part, part),
        ("cut", "cut"): ("all_to_all", part / num, part / num),
        ("partial", "partial"): ("", 0.0, 0.0),
        ("partial", "whole"): ("psum", 2 * part, 0.0),
        ("partial", "cut"): ("psum_scatter", part, part),
        ("varying", "cut"): ("take", 0.0, 0.0),
    }
    kind = "partial" if before.kind == "rows" else before.kind
    name, forward, backward = table[kind, after.kind]
    return name, forward, backward if differentiable else 0.0


def conversion_traffic(value: PlannedValue, before: Form, after: Form, num: int) -> tuple[str, float, float]:
    """Returns `conversion_bytes` of a value."""
    numel = math.prod(value.seen.shape)
    return conversion_bytes(before, after, numel, value.seen.itemsize, num, differentiable=value.differentiable)
