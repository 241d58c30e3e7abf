"""Which strategy each op of a partitioned program takes: a search over the whole of it, for the fewest bytes.

A state of the search says in which forms the values are that a later op reads; its price is what was sent so far,
forward and backward. Ops are decided in order. Of states that hold the same only the cheapest is kept, and of all
states the `width` cheapest. So where few values are alive, between two blocks, the search forgets nothing that matters.
With a width of 1 it is greedy; the plan is the better of the two.

A loop is one op, whose strategies are the forms of its carry: for each the body is searched once, and paid for as often
as it runs. What it reads from outside is brought into its form once, before the loop.

A leaf that its spec cuts is joined only where nothing else is possible: that it stays cut is what the spec is for.

A leaf whose spec is still to be found is free: the first op that uses it says in which form it is, and pays for what a
rank then holds of it (`_propose.py`).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ._forms import WHOLE, Form, OpUse, Strategy, blocks, cut, whole
from ._ops import known_op
from ._partition_moves import move_to, needed_form, sent_by
from ._partition_values import LoopValues, PlannedValue, Scope, results, seen
from ._values import where_of

# What a byte of a leaf costs that its spec has cut.
_KEPT_CUT = 1e6
# So little that it decides only between strategies that send the same.
_PER_ELEMENT, _PER_MESSAGE = 1e-9, 1e-3


class Held(NamedTuple):
    """One value at one point of a plan.

    Attributes:
        form: as it is made.
        slots: the forms in which it is there.
        leaf: whether it is a leaf that its spec cuts, or a part of one.
        free: whether it is a leaf whose form is not decided yet.
    """

    form: Form
    slots: frozenset[Form]
    leaf: bool = False
    free: bool = False


class SearchChoice(NamedTuple):
    """What is decided of one op.

    Attributes:
        strategy: how it is computed; of a loop, the forms of the carry and of what it returns.
        plan: of a loop, that of its body.
    """

    strategy: Strategy
    plan: "SearchedPlan | None" = None


@dataclasses.dataclass(frozen=True, eq=False)
class SearchedPlan:
    """What is decided of all ops of a scope.

    Attributes:
        price: bytes that it sends, and a little for each message; without what it asks of `outside`.
        total: with that, for one run of the loop's body.
        choices: by op.
        forms: of the ends.
        outside: of the values around a body, in which forms it reads them.
    """

    price: float
    total: float
    choices: dict[Node, SearchChoice]
    forms: tuple[Form, ...]
    outside: tuple[tuple[PlannedValue, Form], ...]


class _SearchState(NamedTuple):
    price: float
    outside: float
    held: dict[PlannedValue, Held]
    trail: Any  # (trail before, node, choice), or None


class Search:
    """Searches plans of one program along an axis.

    Args:
        num: ranks along the axis.
        width: how many states are kept.
        held_price: what a byte of a free leaf costs that a rank holds, in bytes that are sent.
        value_price: and what one costs of a value that is computed, and gets a gradient.
        margin: how much dearer the greedy plan of a loop's body may be than that of another form of its carry, for the
            form to be searched any further.
    """

    def __init__(
        self, num: int, width: int, held_price: float = 0.0, value_price: float = 0.0, margin: float = math.inf
    ) -> None:
        self.num, self.width, self.held_price, self.value_price = num, width, held_price, value_price
        self._margin = margin
        self._plans: dict[Any, SearchedPlan] = {}
        # By op and forms of its operands, which searches of one program may share.
        self.offers: dict[Any, list[Strategy]] = {}

    def best(
        self, scope: Scope, start: Mapping[PlannedValue, Held], ends: Sequence[tuple[PlannedValue, Form | None]]
    ) -> SearchedPlan:
        """The cheapest plan that is found.

        Args:
            scope: what is planned.
            start: its inputs.
            ends: the values that it is to have in the end, and in which form; None: as they are made.
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
        """The cheapest plan that is found with a width."""
        states = [_SearchState(0.0, 0.0, {}, None)]
        for node in scope.nodes:
            found: dict[Any, _SearchState] = {}
            for state in states:
                for draft in self._steps(scope, node, state, start):
                    after, key = draft.state()
                    if key not in found or after.price < found[key].price:
                        found[key] = after
            states = sorted(found.values(), key=lambda s: s.price)[:width]
        return min((self._ended(scope, state, start, ends) for state in states), key=lambda p: p.total)

    def _ended(
        self,
        scope: Scope,
        state: _SearchState,
        start: Mapping[PlannedValue, Held],
        ends: Sequence[tuple[PlannedValue, Form | None]],
    ) -> SearchedPlan:
        draft = _Draft(self, state, start)
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
        return SearchedPlan(draft.price - draft.outside, draft.price, choices, forms, asked)

    # What an op may do.

    def _steps(
        self, scope: Scope, node: Node, state: _SearchState, start: Mapping[PlannedValue, Held]
    ) -> Iterator["_Draft"]:
        operands = scope.operands[node]
        first = _Draft(self, state, start, scope.weights.get(node, 1))
        loop = scope.loops.get(node)
        if loop is not None:
            for choice in self._of_loop(loop, first):
                draft = _Draft(self, state, start, scope.weights.get(node, 1))
                asked = [] if choice.plan is None else choice.plan.outside
                pairs = [*zip(loop.carry, choice.strategy.ins, strict=True), *((v.outer, f) for v, f in asked)]
                yield draft.decide(scope, node, choice, pairs)
            return
        forms = tuple(first.form_of(v) for v in operands)
        for strategy in self.offered(node, operands, forms):
            if all(f.kind != "partial" or form == f for form, f in zip(forms, strategy.ins, strict=True)):
                # Nothing becomes a sum that is still to be taken; it is made as one.
                draft = _Draft(self, state, start, scope.weights.get(node, 1))
                yield draft.decide(scope, node, SearchChoice(strategy), list(zip(operands, strategy.ins, strict=True)))

    def offered(self, node: Node, operands: Sequence[PlannedValue], forms: tuple[Form, ...]) -> list[Strategy]:
        """The strategies of an op whose operands are in these forms."""
        key = node, forms
        if key not in self.offers:
            rule = known_op(node.target).sharding
            use = use_of(node, operands, forms, self.num)
            try:
                self.offers[key] = [whole(use)] if rule is None else list(dict.fromkeys(rule(use)))
            except Exception as error:
                raise ValueError(
                    f"{where_of(node) or 'a line unknown'}: partition cannot tell how {node.target} of"
                    f" {[x.shape for x in use.operands]} is cut."
                ) from error
        return self.offers[key]

    def _of_loop(self, loop: LoopValues, draft: "_Draft") -> Iterator[SearchChoice]:
        given = dict(zip(loop.given[loop.num_carry :], loop.layers[0], strict=True))
        given |= {v: v.outer for v in loop.outside if v.outer is not None}
        begin = {v: draft[outer] for v, outer in given.items()}
        greedy = {forms: self._body(loop, begin, forms, 1) for forms in _carries(loop, self.num)}
        most = self._margin * min(plan.total for plan in greedy.values())
        for forms, once in greedy.items():
            if not once.total <= most:
                continue
            plan = min(once, self._body(loop, begin, forms, self.width), key=lambda p: p.total)
            ys = plan.forms[loop.num_carry :]
            strategy = Strategy(forms, (*forms, *(ys * loop.num)), None, loop.num * plan.price)
            yield SearchChoice(strategy, plan)

    def _body(
        self, loop: LoopValues, begin: Mapping[PlannedValue, Held], forms: tuple[Form, ...], width: int
    ) -> SearchedPlan:
        """The plan of a body whose carry is in these forms, searched once."""
        key = loop.scope, forms, width, tuple(begin.values())
        if key not in self._plans:
            inputs = zip(loop.given[: loop.num_carry], forms, strict=True)
            start = dict(begin) | {v: Held(f, frozenset([f])) for v, f in inputs}
            ends = list(itertools.zip_longest(loop.ends, forms))
            self._plans[key] = self.searched(loop.scope, start, ends, width)
        return self._plans[key]


class _Draft:
    """A state, and what one op changes of it."""

    def __init__(
        self, search: Search, state: _SearchState, start: Mapping[PlannedValue, Held], weight: int = 1
    ) -> None:
        self.price, self.outside = state.price, state.outside
        self._num, self._state, self._start = search.num, state, start
        self._held_price, self._value_price, self._weight = search.held_price, search.value_price, weight
        self._new: dict[PlannedValue, Held] = {}
        self._dead: Sequence[PlannedValue] = ()
        self._trail: Any = state.trail

    def __getitem__(self, value: PlannedValue) -> Held:
        found = self._new.get(value) or self._state.held.get(value)
        return self._start[value] if found is None else found

    def form_of(self, value: PlannedValue) -> Form:
        """See `Knows`."""
        return self[value].form

    def has(self, value: PlannedValue, form: Form) -> bool:
        """See `Knows`."""
        return form in self[value].slots

    def bring(self, value: PlannedValue, form: Form) -> None:
        """Pays for a value in a form, if it is not there."""
        if self[value].free:
            own = cut(form.dim, value.seen.shape[form.dim], self._num) if form.kind == "cut" else WHOLE
            self._new[value] = Held(own, frozenset([own]), own.kind == "cut")
            self.price += self._weight * self._held_price * value.seen.itemsize * held_elements(value, own, self._num)
        form = needed_form(value, form)
        move = move_to(value, form, self)
        if move.kind == "there":
            return
        if move.kind == "look":
            assert move.source is not None
            self.bring(move.source, form)
        if move.kind == "convert":
            self.bring(value, move.before)
            _, forward, backward = sent_by(value, move.before, form, self._num)
            cost = (forward + backward + _PER_MESSAGE) * (_KEPT_CUT if self[value].leaf else 1.0)
            if value.outer is not None:
                cost /= value.times  # it is brought once, and this is the price of one run
                self.outside += cost
            self.price += self._weight * cost
        held = self[value]
        self._new[value] = held._replace(slots=held.slots | {form})

    def decide(self, scope: Scope, node: Node, choice: SearchChoice, pairs: Sequence[tuple[Any, Form]]) -> "_Draft":
        """Brings operands into their forms and makes the results."""
        for value, form in pairs:
            self.bring(value, form)
        strategy = choice.strategy
        # Cut results are less work, and partial ones as much as whole ones.
        work = sum(1.0 if f.kind == "cut" else self._num for f in strategy.outs)
        self.price += self._weight * (strategy.sent + _PER_ELEMENT * work)
        made = [v for v in scope.made[node] if v is not None]
        for value, form in zip(made, strategy.outs, strict=True):
            leaf = form.kind == "cut" and value.part_of is not None and self[value.part_of].leaf
            there = frozenset() if value.look_at is not None else frozenset([form])
            if self._value_price and value.differentiable and value.look_at is None:
                held = value.seen.itemsize * held_elements(value, form, self._num)
                self.price += self._weight * self._value_price * held
            self._new[value] = Held(form, there, leaf)
        self._dead, self._trail = scope.dead[node], (self._state.trail, node, choice)
        return self

    def state(self) -> tuple[_SearchState, Any]:
        """The state afterwards, and what tells it from others."""
        held = self._state.held | self._new
        for value in self._dead:
            held.pop(value, None)
        return _SearchState(self.price, self.outside, held, self._trail), frozenset(held.items())


def _carries(loop: LoopValues, num: int) -> Iterator[tuple[Form, ...]]:
    """The forms in which a carry may pass from layer to layer: whole, or one shape of value cut along one dim."""
    carry = loop.given[: loop.num_carry]
    yield (WHOLE,) * len(carry)
    for shape in dict.fromkeys(v.seen.shape for v in carry if v.differentiable):
        for dim, size in enumerate(shape):
            if size > 1:
                form = cut(dim, size, num)
                yield tuple(form if v.differentiable and v.seen.shape == shape else WHOLE for v in carry)


def held_elements(value: PlannedValue, form: Form, num: int) -> int:
    """How many elements the rank with the most of a value has of it."""
    shape = value.seen.shape
    if form.kind != "cut":
        return math.prod(shape)
    most = max(map(sum, zip(*blocks(shape[form.dim], num, form), strict=True)))
    return math.prod((*shape[: form.dim], most, *shape[form.dim + 1 :]))


def use_of(node: Node, operands: Sequence[PlannedValue], forms: tuple[Form, ...], num: int) -> OpUse:
    """An op as its rule sees it."""
    given, counter = iter(operands), iter(range(len(operands)))
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: next(given).seen._replace(number=next(counter)))
    outs = tuple(seen(x) for x in results(node) if x is not None)
    return OpUse(node.target, tuple(args), dict(kwargs), tuple(v.seen for v in operands), forms, outs, num)
