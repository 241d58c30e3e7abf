"""Chooses the strategy of each op of a partitioned program: a search over the whole program, for the fewest bytes.

A state of the search has the forms of the values that a later op reads. The price of a state is the bytes sent so far,
forward and backward. Ops are decided in order. Among states with equal forms only the cheapest is kept, and among all
states the `width` cheapest. So where few values are alive, for example between two blocks, the search keeps every state
that matters. With a width of 1 the search is greedy. The result is the better plan of the two widths.

A loop is a single op. The forms of the carry are the loop's strategies. For each form the body is searched once, and
the body's price counts for every run. Values read from outside are brought into the right forms once, before the loop.

A leaf that the leaf's spec cuts is gathered only if there is no other way, since the spec asks for the cut.

A leaf with a spec still to be found is free: the first op that uses the leaf decides the form, and pays for the part
that a rank then holds (`_spec_search.py`).
"""

import itertools
import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from shardfn.graph import (
    PARTIAL,
    WHOLE,
    Form,
    Operand,
    OpUse,
    Strategy,
    cut,
    find_op,
    where_of,
    whole,
)

from ._other_axis_ops import EveryRank
from ._states import (
    Change,
    Draft,
    Held,
    NumberedChange,
    SearchChoice,
    SearchedPlan,
    SearchPrices,
    SearchState,
)
from ._values import LoopValues, PlannedValue, Scope, needed_form, results, seen


class Search:
    """Searches plans of a program along an axis.

    Args:
        num: number of ranks along the axis.
        width: number of states that are kept.
        held_price: price of a byte of a free leaf that a rank holds, in bytes that are sent.
        value_price: price of a byte of a computed value that gets a gradient.
        margin: factor. A form of a loop's carry is searched further only if the greedy plan of the body costs at most
            this factor times the cheapest greedy plan.
        every_rank: strategies that the ranks along other axes can take, too. None: all ranks see the same program.
        work_price: price of a floating-point operation of a rank.
    """

    def __init__(
        self,
        num: int,
        width: int,
        held_price: float = 0.0,
        value_price: float = 0.0,
        margin: float = math.inf,
        every_rank: EveryRank | None = None,
        work_price: float = 0.0,
    ) -> None:
        self.num, self.width, self._margin, self._every_rank = num, width, margin, every_rank
        self._prices = SearchPrices(num, held_price, value_price, work_price)
        self._plans: dict[Any, SearchedPlan] = {}
        # Values share few different `Held`: each has a number.
        self._numbers: dict[Held, int] = {}
        self._known: list[Held] = []
        # The changes of an op depend only on the operands and on the sources of the operands.
        self._changes: dict[Any, list[NumberedChange]] = {}
        self._marks: dict[tuple[PlannedValue, int], int] = {}
        self._random = random.Random(0)  # all ranks search in the same way
        self._reads: dict[Node, list[PlannedValue]] = {}
        # The state after some ops depends on the inputs that the ops read, and on no other inputs.
        self._runs: dict[Scope, list[tuple[list[PlannedValue], list[Node]]]] = {}
        self._keys: dict[Any, int] = {}
        self._reached: dict[int, list[SearchState]] = {}
        # By op and forms of the operands. Searches of the same program may share the strategies.
        self.offers: dict[Any, list[Strategy]] = {}

    def best(
        self, scope: Scope, start: Mapping[PlannedValue, Held], ends: Sequence[tuple[PlannedValue, Form | None]]
    ) -> SearchedPlan:
        """Returns the cheapest plan that is found.

        Args:
            scope: scope to plan.
            start: inputs.
            ends: values that the plan must have in the end, with forms. None: the form in which the value is made.
        """
        widths = {1, self.width}
        return min((self.searched(scope, start, ends, w) for w in sorted(widths)), key=lambda p: p.total)

    def searched(
        self,
        scope: Scope,
        start: Mapping[PlannedValue, Held],
        ends: Sequence[tuple[PlannedValue, Form | None]],
        width: int,
    ) -> SearchedPlan:
        """Returns the cheapest plan that is found with a width."""
        begun = self.numbered(start)
        states, at = [SearchState(0.0, 0.0, {}, None)], self._number_key((scope, width))
        for inputs, nodes in self._runs_of(scope):
            at = self._number_key((at, *(begun[v] for v in inputs)))
            if at not in self._reached:
                self._reached[at] = self._search_nodes(scope, nodes, states, begun, width)
            states = self._reached[at]
        return min((self._end_state(scope, state, start, ends) for state in states), key=lambda p: p.total)

    def _search_nodes(
        self,
        scope: Scope,
        nodes: Sequence[Node],
        states: list[SearchState],
        begun: Mapping[PlannedValue, int],
        width: int,
    ) -> list[SearchState]:
        """Returns the cheapest states after some ops."""
        for node in nodes:
            found: dict[int, tuple[float, SearchState, NumberedChange]] = {}
            for state in states:
                for change in self.changes(scope, node, state, begun):
                    mark, price = state.mark ^ change.mark, state.price_after(change)
                    if mark not in found or price < found[mark][0]:
                        found[mark] = price, state, change
            cheapest = sorted(found.values(), key=operator.itemgetter(0))[:width]
            states = [state.after(change, node, scope.dead[node]) for _, state, change in cheapest]
        return states

    def _runs_of(self, scope: Scope) -> list[tuple[list[PlannedValue], list[Node]]]:
        """Returns the ops of a scope in runs, each with the inputs that the run's first op is the first to read."""
        if scope not in self._runs:
            left, runs = dict.fromkeys(scope.inputs), [([], [])]
            for node in scope.nodes:
                new = [v for v in dict.fromkeys(scope.operands[node]) if v in left]
                for value in new:
                    del left[value]
                if new:
                    runs.append((new, []))
                runs[-1][1].append(node)
            self._runs[scope] = runs
        return self._runs[scope]

    def _number_key(self, key: Any) -> int:
        return self._keys.setdefault(key, len(self._keys))

    def numbered(self, held: Mapping[PlannedValue, Held]) -> dict[PlannedValue, int]:
        """Returns the numbers of values' `Held`."""
        out: dict[PlannedValue, int] = {}
        for value, x in held.items():
            out[value] = self._numbers.setdefault(x, len(self._known))
            if out[value] == len(self._known):
                self._known.append(x)
        return out

    def changes(
        self, scope: Scope, node: Node, state: SearchState, begun: Mapping[PlannedValue, int]
    ) -> list[NumberedChange]:
        """Returns the changes to a state that an op can make, a change for each strategy that applies.

        Args:
            scope: scope of the op.
            node: op.
            state: state before the op.
            begun: numbers of the `Held` of inputs that no op has read yet.
        """
        held, reads = state.held, self._read_by(scope, node)
        key = node, *(held[v] if v in held else begun[v] for v in reads)
        if key not in self._changes:
            before = dict(zip(reads, key[1:], strict=True))
            self._changes[key] = [
                self._numbered_change(change, before, scope.dead[node])
                for change in self._output_changes(scope, node, before)
            ]
        return self._changes[key]

    def _numbered_change(
        self, change: Change, before: dict[PlannedValue, int], dead: Sequence[PlannedValue]
    ) -> NumberedChange:
        new, mark = self.numbered(change.held), 0
        for value, number in new.items():
            mark ^= self._mark_value(value, number)
            if value in before:
                mark ^= self._mark_value(value, before[value])
        for value in dead:
            mark ^= self._mark_value(value, new[value] if value in new else before[value])
        return NumberedChange(change.costs, change.outside, new, change.choice, mark)

    def _mark_value(self, value: PlannedValue, number: int) -> int:
        key = value, number
        if key not in self._marks:
            self._marks[key] = self._random.getrandbits(128)
        return self._marks[key]

    def _read_by(self, scope: Scope, node: Node) -> list[PlannedValue]:
        """Returns the operands of an op, and the values that the operands are views of."""
        if node not in self._reads:
            found: dict[PlannedValue, None] = {}
            for operand in scope.operands[node]:
                value: PlannedValue | None = operand
                while value is not None:
                    found[value] = None
                    value = value.look_at
            self._reads[node] = list(found)
        return self._reads[node]

    def _end_state(
        self,
        scope: Scope,
        state: SearchState,
        start: Mapping[PlannedValue, Held],
        ends: Sequence[tuple[PlannedValue, Form | None]],
    ) -> SearchedPlan:
        held = state.held
        draft = Draft(self._prices, lambda v: self._known[held[v]] if v in held else start[v])
        for value, form in ends:
            draft.bring(value, draft.form_of(value) if form is None else form)
        choices: dict[Node, SearchChoice] = {}
        trail = state.trail
        while trail is not None:
            trail, node, choice = trail
            choices[node] = choice
        forms = tuple(draft.form_of(v) if f is None else needed_form(v, f) for v, f in ends)
        outer = [v for v in scope.inputs if v.outer is not None]
        asked = tuple((v, f) for v in outer for f in sorted(draft[v].slots - start[v].slots))
        price, outside = sum(draft.costs, state.price), sum(draft.outside, state.outside)
        return SearchedPlan(price - outside, price, choices, forms, asked)

    # The strategies of an op.

    def _output_changes(self, scope: Scope, node: Node, held: Mapping[PlannedValue, int]) -> Iterator[Change]:
        operands, weight, loop = scope.operands[node], scope.weights.get(node, 1), scope.loops.get(node)
        known: Callable[[PlannedValue], Held] = lambda v: self._known[held[v]]  # noqa: E731
        if loop is not None:
            for choice in self._loop_changes(loop, known):
                asked = [] if choice.plan is None else choice.plan.outside
                pairs = [*zip(loop.carry, choice.strategy.ins, strict=True), *((v.outer, f) for v, f in asked)]
                yield Draft(self._prices, known, weight).decide(scope, node, choice, pairs)
            return
        forms = tuple(known(v).form for v in operands)
        for strategy in self.offered(node, operands, forms):
            if all(_can_be(form, f) for form, f in zip(forms, strategy.ins, strict=True)):
                pairs = list(zip(operands, strategy.ins, strict=True))
                yield Draft(self._prices, known, weight).decide(scope, node, SearchChoice(strategy), pairs)

    def offered(self, node: Node, operands: Sequence[PlannedValue], forms: tuple[Form, ...]) -> list[Strategy]:
        """Returns the strategies of an op with operands in these forms."""
        key = node, forms
        if key not in self.offers:
            rule = find_op(node.target).sharding
            use = use_of(node, operands, forms, self.num)
            try:
                made = [whole(use)] if rule is None else list(dict.fromkeys(rule(use)))
            except Exception as error:
                raise ValueError(
                    f"{where_of(node) or 'a line unknown'}: partition does not know how {node.target} of"
                    f" {[x.shape for x in use.operands]} is cut."
                ) from error
            self.offers[key] = made if self._every_rank is None else self._every_rank.offered(node, made)
        return self.offers[key]

    def _loop_changes(self, loop: LoopValues, known: Callable[[PlannedValue], Held]) -> Iterator[SearchChoice]:
        given = dict(zip(loop.given[loop.num_carry :], loop.layers[0], strict=True))
        given |= {v: v.outer for v in loop.outside if v.outer is not None}
        begin = {v: known(outer) for v, outer in given.items()}
        greedy = {forms: self._search_body(loop, begin, forms, 1) for forms in _carry_forms(loop, self.num)}
        most = self._margin * min(plan.total for plan in greedy.values())
        for forms, once in greedy.items():
            if not once.total <= most:
                continue
            plan = min(once, self._search_body(loop, begin, forms, self.width), key=lambda p: p.total)
            ys = plan.forms[loop.num_carry :]
            strategy = Strategy(forms, (*forms, *(ys * loop.num)), None, loop.num * plan.price)
            yield SearchChoice(strategy, plan)

    def _search_body(
        self, loop: LoopValues, begin: Mapping[PlannedValue, Held], forms: tuple[Form, ...], width: int
    ) -> SearchedPlan:
        """Returns the plan of a body with a carry in these forms, searched once."""
        key = loop.scope, forms, width, tuple(begin.values())
        if key not in self._plans:
            inputs = zip(loop.given[: loop.num_carry], forms, strict=True)
            start = dict(begin) | {v: Held(f, frozenset([f])) for v, f in inputs}
            ends = list(itertools.zip_longest(loop.ends, forms))
            self._plans[key] = self.searched(loop.scope, start, ends, width)
        return self._plans[key]


def _can_be(own: Form, form: Form) -> bool:
    """Returns whether a value can be brought into a form. Only ops make partial forms, and own rows are partial."""
    return form.kind not in ("partial", "rows") or own == form or (form == PARTIAL and own.kind == "rows")


def _carry_forms(loop: LoopValues, num: int) -> Iterator[tuple[Form, ...]]:
    """Yields the forms in which a carry may pass from layer to layer.

    Whole, or values of the same shape cut along the same dim.
    """
    carry = loop.given[: loop.num_carry]
    yield (WHOLE,) * len(carry)
    for shape in dict.fromkeys(v.seen.shape for v in carry if v.differentiable):
        for dim, size in enumerate(shape):
            if size > 1:
                form = cut(dim, size, num)
                yield tuple(form if v.differentiable and v.seen.shape == shape else WHOLE for v in carry)


def use_of(node: Node, operands: Sequence[PlannedValue], forms: tuple[Form, ...], num: int) -> OpUse:
    """Returns an op as the op's rule sees the op."""
    given, counter = iter(operands), iter(range(len(operands)))
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: _name_operand(next(given), next(counter)))
    outs = tuple(seen(x) for x in results(node) if x is not None)
    return OpUse(node.target, tuple(args), dict(kwargs), tuple(v.seen for v in operands), forms, outs, num)


def _name_operand(value: PlannedValue, number: int) -> Operand:
    return value.seen._replace(number=number, name=name_of(value))


def name_of(value: PlannedValue) -> str:
    """Returns the name by which rules know a value."""
    return f"{value.node.name}.{value.at}"
