"""`partition_graph`: cuts a program of a single device along a mesh axis, by a form for each value and conversions.

The rules of the op table offer strategies for each op, and a search chooses (`_search.py`). Three rules connect the
choices. A value is converted once to each form, and kept for other uses. Views cost nothing, so the source of a view is
sent, once, and the view is made again. And sums are taken late: partial values stay partial through linear ops.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from shardfn.graph import PARTIAL, WHOLE, Form, whole_look

from ._other_axis_ops import EveryRank
from ._program import Compute, Conversion, Convert, Loop, PartitionProgram, Step, last_uses, passages
from ._search import Search, name_of
from ._states import Held, SearchChoice, SearchedPlan
from ._values import (
    FormMove,
    LoopValues,
    PlannedValue,
    Scope,
    conversion_traffic,
    is_look,
    move_to,
    needed_form,
    scope_of,
)

# States that the search keeps.
WIDTH = 16


def partition_graph(
    graph: Graph,
    axis: str,
    num: int,
    forms: Mapping[Node, Form],
    trained: Callable[[Node], bool],
    constants: Callable[[Node], Tensor],
    *,
    value_price: float = 0.0,
    every_rank: EveryRank | None = None,
) -> PartitionProgram:
    """Returns the program of a graph along an axis.

    Args:
        graph: captured forward, without writes. Each node's `meta["val"]` has the whole shape.
        axis: mesh axis.
        num: number of ranks.
        forms: forms of inputs that are cut. Other inputs are whole.
        trained: function that returns whether a gradient may arrive at an input.
        constants: function that returns the tensor of a `get_attr`.
        value_price: price of a byte of a value that a rank holds, in bytes that are sent.
        every_rank: strategies that the ranks along other axes can take, too. None: all ranks see the same graph.
    """
    scope = scope_of(graph, trained, constants)
    start = {v: initial_form(forms.get(v.node, WHOLE)) for v in scope.inputs}
    outputs: Any = next(n for n in graph.nodes if n.op == "output").args[0]
    ends = [(scope.one(n), WHOLE) for n in outputs if isinstance(n, Node)]
    plan = Search(num, WIDTH, value_price=value_price, every_rank=every_rank).best(scope, start, ends)
    writer = _ProgramWriter(PartitionProgram(axis, num), scope, plan)
    for value in scope.inputs:
        if value.node.op == "get_attr":
            writer.program.constants[writer.enter(value, WHOLE)] = constants(value.node)
        else:
            writer.program.inputs.append(writer.enter(value, start[value].form))
    return writer.written([scope.one(n) if isinstance(n, Node) else n for n in outputs], [WHOLE] * len(outputs))


def initial_form(form: Form) -> Held:
    """Returns a leaf in the form in which the program receives it."""
    return Held(form, frozenset([form]), form.kind == "cut")


class _ProgramWriter:
    """Writes the plan of a scope as steps over slots."""

    def __init__(self, program: PartitionProgram, scope: Scope, plan: SearchedPlan) -> None:
        self.program, self._scope, self._plan = program, scope, plan
        # The values that a body reads from outside, in the order of its inputs.
        self.asked: list[tuple[PlannedValue, Form]] = []
        self._forms: dict[PlannedValue, Form] = {}
        self._slots: dict[PlannedValue, dict[Form, int]] = {}
        # The operands of the ops so far, by the names that rules see.
        self._named: dict[str, PlannedValue] = {}
        self._line = self._because = ""
        self._section: Any = None

    def enter(self, value: PlannedValue, form: Form) -> int:
        """Returns the slot of an input."""
        self._forms[value] = form
        return self._new_slot(value, form)

    def written(self, ends: Sequence[Any], forms: Sequence[Form | None]) -> PartitionProgram:
        """Returns the program, once the inputs are entered.

        Args:
            ends: values that the program returns. Values other than tensors stay unchanged.
            forms: form of each end. None: the form in which the value is made.
        """
        for node in self._scope.nodes:
            self._add_node(node)
        self._line, self._because, self._section = "the results", "", None
        for x, form in zip(ends, forms, strict=True):
            is_value = isinstance(x, PlannedValue)
            slot = self._need_slot(x, self._forms[x] if form is None else form) if is_value else x
            self.program.outputs.append((is_value, slot))
        self.program.last_use = last_uses(self.program)
        self.program.passages = passages(self.program)
        return self.program

    # The protocol `Knows`.

    def form_of(self, value: PlannedValue) -> Form:
        """Returns the form in which a value is made. See `Knows`."""
        return self._forms[value]

    def has(self, value: PlannedValue, form: Form) -> bool:
        """Returns whether a value is there in a form. See `Knows`."""
        return form in self._slots.get(value, {})

    # Steps.

    def _add_node(self, node: Node) -> None:
        self._line, self._section = short(node.meta.get("where")), node.meta.get("section")
        choice = self._plan.choices[node]
        made = [v for v in self._scope.made[node] if v is not None]
        self._forms |= zip(made, choice.strategy.outs, strict=True)
        if node in self._scope.loops:
            self._write_loop(node, self._scope.loops[node], choice)
            return
        strategy, operands = choice.strategy, self._scope.operands[node]
        pairs = [(self._forms[v], f) for v, f in zip(operands, strategy.ins, strict=True)]
        joined = any(own.kind == "cut" and f.kind in ("whole", "varying") for own, f in pairs)
        self._because = str(node.target) if joined else ""
        if strategy.sent:
            half = strategy.sent / 2
            shape = made[0].seen.shape
            self.program.sent.append(Conversion(strategy.note, shape, half, half, self._line))
        if not is_look(node):
            self._write_compute(node)

    def _need_slot(self, value: PlannedValue, form: Form) -> int:
        """Returns the slot of a value in a form, made if missing."""
        form = needed_form(value, form)
        if value.outer is not None and not self.has(value, form):
            self.asked.append((value, form))
            return self._new_slot(value, form)
        move = move_to(value, form, self)
        if move.kind == "made":
            self._write_compute(value.node)
        elif move.kind == "look":
            self._look_again(value, move, form)
        elif move.kind == "convert":
            self._write_convert(value, move.before, form)
        return self._slots[value][form]

    def _new_slot(self, value: PlannedValue, form: Form) -> int:
        slot = self._slots.setdefault(value, {})[form] = self.program.num_slots
        self.program.num_slots += 1
        return slot

    def _write_step(self, step: Step) -> None:
        self.program.steps.append(step)
        self.program.sections.append(self._section)

    def _write_convert(self, value: PlannedValue, before: Form, form: Form) -> None:
        src = self._need_slot(value, before)
        before = PARTIAL if before.kind == "rows" else before
        if form == before:  # own rows are already a summand
            self._slots[value][form] = src
            return
        dst, shape = self._new_slot(value, form), value.seen.shape
        self._write_step(Convert(src, dst, before, form, shape, value.differentiable, self._line))
        name, forward, backward = conversion_traffic(value, before, form, self.program.num)
        if forward or backward:
            self.program.sent.append(Conversion(name, shape, forward, backward, self._line, self._because))

    def _look_again(self, value: PlannedValue, move: FormMove, form: Form) -> None:
        assert move.source is not None
        src = self._need_slot(move.source, form)
        others = tuple(self._need_slot(v, WHOLE) for v in self._scope.operands[value.node][1:])
        dst = self._new_slot(value, form)
        # The strategy's `run` has the shape of a block. This view is of the whole value.
        strategy = self._plan.choices[value.node].strategy._replace(
            ins=(form, *(WHOLE for _ in others)), outs=(form,), run=whole_look(value.node)
        )
        self._write_step(Compute(value.node, (src, *others), {0: dst}, strategy, True, self._line))

    def _write_compute(self, node: Node) -> None:
        strategy = self._plan.choices[node].strategy
        operands = self._scope.operands[node]
        slots = tuple(self._need_slot(v, f) for v, f in zip(operands, strategy.ins, strict=True))
        slots += tuple(self._need_slot(self._named[name], WHOLE) for name in strategy.beside)
        self._named |= {name_of(v): v for v in operands}
        dsts = {v.at: self._new_slot(v, self._forms[v]) for v in self._scope.made[node] if v is not None}
        single = isinstance(node.meta.get("val"), Tensor)
        self._write_step(Compute(node, slots, dsts, strategy, single, short(node.meta.get("where"))))

    def _write_loop(self, node: Node, loop: LoopValues, choice: SearchChoice) -> None:
        assert choice.plan is not None
        body = _ProgramWriter(PartitionProgram(self.program.axis, self.program.num), loop.scope, choice.plan)
        forms = [*choice.strategy.ins, *(self._forms[v] for v in loop.layers[0])]
        body.program.inputs += [body.enter(v, form) for v, form in zip(loop.given, forms, strict=True)]
        body._forms |= {v: self._forms[v.outer] for v in loop.outside if v.outer is not None}
        body.written(loop.ends, choice.plan.forms)
        body.program.inputs += [body._slots[v][form] for v, form in body.asked]
        carry, x = forms[: loop.num_carry], forms[loop.num_carry :]
        step = Loop(
            body.program,
            tuple(self._need_slot(v, form) for v, form in zip(loop.carry, carry, strict=True)),
            tuple(tuple(self._need_slot(v, form) for v, form in zip(layer, x, strict=True)) for layer in loop.layers),
            tuple(self._need_slot(v.outer, form) for v, form in body.asked if v.outer is not None),
            {v.at: self._new_slot(v, self._forms[v]) for v in self._scope.made[node] if v is not None},
            self._line,
        )
        self.program.sent += [sent._replace(times=sent.times * loop.num) for sent in body.program.sent]
        self._write_step(step)


def short(line: str | None) -> str:
    """Returns a line of the user's code, or a text for an unknown line."""
    return line or "a line unknown"
