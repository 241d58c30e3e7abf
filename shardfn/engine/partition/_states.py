"""State of a search of plans at a point of a program, and the changes by an op (`_search.py`)."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.fx import Node

from shardfn.graph import (
    WHOLE,
    Form,
    Strategy,
    blocks,
    cut,
)

from ._values import PlannedValue, Scope, conversion_traffic, move_to, needed_form

# The price of a byte of a leaf that the leaf's spec cuts.
_KEPT_CUT = 1e6
# So little that the price only decides between strategies that send the same.
_PER_ELEMENT, _PER_MESSAGE = 1e-9, 1e-3


class Held(NamedTuple):
    """Value at a point of a plan.

    Attributes:
        form: form in which the value is made.
        slots: forms in which the value is there.
        leaf: whether the value is a leaf that the leaf's spec cuts, or a part of such a leaf.
        free: whether the value is a leaf with an undecided form.
    """

    form: Form
    slots: frozenset[Form]
    leaf: bool = False
    free: bool = False


class SearchChoice(NamedTuple):
    """Decision on an op.

    Attributes:
        strategy: strategy that computes the op. For a loop, the forms of the carry and of the results.
        plan: plan of a loop's body.
    """

    strategy: Strategy
    plan: "SearchedPlan | None" = None


@dataclasses.dataclass(frozen=True, eq=False)
class SearchedPlan:
    """Decisions on all ops of a scope.

    Attributes:
        price: bytes that the plan sends, and a little for each message, without conversions of `outside` values.
        total: price with these conversions, for a single run of the loop's body.
        choices: choices by op.
        forms: forms of the ends.
        outside: values around a body that the body reads, and the forms in which the body reads the values.
    """

    price: float
    total: float
    choices: dict[Node, SearchChoice]
    forms: tuple[Form, ...]
    outside: tuple[tuple[PlannedValue, Form], ...]


class SearchPrices(NamedTuple):
    """Prices of a search in addition to the price of a byte sent, 1.

    Attributes:
        num: number of ranks along the axis.
        held: price of a byte of a free leaf that a rank holds, in bytes that are sent.
        value: price of a byte of a computed value that gets a gradient.
        work: price of a floating-point operation of a rank.
    """

    num: int
    held: float
    value: float
    work: float = 0.0


class Change(NamedTuple):
    """Change to a state by an op, for a single strategy.

    Attributes:
        costs: bytes, in the order of summation.
        outside: bytes among the costs that bring values from around a body.
        held: values that change, with the new `Held`.
        choice: decision on the op.
    """

    costs: tuple[float, ...]
    outside: tuple[float, ...]
    held: dict[PlannedValue, Held]
    choice: SearchChoice


class NumberedChange(NamedTuple):
    """Change with numbers in place of `held`, from a table of the search.

    Attributes:
        costs: see `Change`.
        outside: see `Change`.
        held: see `Change`.
        choice: see `Change`.
        mark: number to xor with the mark of a state.
    """

    costs: tuple[float, ...]
    outside: tuple[float, ...]
    held: dict[PlannedValue, int]
    choice: SearchChoice
    mark: int = 0


class SearchState(NamedTuple):
    """Point of a plan.

    Attributes:
        price: price of all ops so far.
        outside: part of the price for values from around a body.
        held: number of the `Held` in a table of the search, by value.
        trail: choices so far: (trail before, node, choice), or None.
        mark: hash of `held`: the xor of 128 random bits for each value and number.
    """

    price: float
    outside: float
    held: dict[PlannedValue, int]
    trail: Any
    mark: int = 0

    def after(self, change: NumberedChange, node: Node, dead: Sequence[PlannedValue]) -> "SearchState":
        """Returns the state after an op, without the values that no later op reads."""
        held = self.held | change.held
        for value in dead:
            held.pop(value, None)
        outside = sum(change.outside, self.outside)
        trail = self.trail, node, change.choice
        return SearchState(self.price_after(change), outside, held, trail, self.mark ^ change.mark)

    def price_after(self, change: NumberedChange) -> float:
        """Returns the price after an op."""
        # In sequence, in a fixed order: so a plan's price has the same bits whether or not changes were cached.
        return sum(change.costs, self.price)


class Draft:
    """Collects the change by an op.

    Args:
        prices: prices of the search.
        known: function that returns the `Held` of a value before the op.
        weight: number of equal ops that the op represents.
    """

    def __init__(self, prices: SearchPrices, known: Callable[[PlannedValue], Held], weight: int = 1) -> None:
        self.prices, self._known, self._weight = prices, known, weight
        self.costs: list[float] = []
        self.outside: list[float] = []
        self.new: dict[PlannedValue, Held] = {}

    def __getitem__(self, value: PlannedValue) -> Held:
        return self.new.get(value) or self._known(value)

    def form_of(self, value: PlannedValue) -> Form:
        """Returns the form in which a value is made. See `Knows`."""
        return self[value].form

    def has(self, value: PlannedValue, form: Form) -> bool:
        """Returns whether a value is there in a form. See `Knows`."""
        return form in self[value].slots

    def bring(self, value: PlannedValue, form: Form) -> None:
        """Pays for a value in a form, if the value is not there."""
        if self[value].free:
            own = cut(form.dim, value.seen.shape[form.dim], self.prices.num) if form.kind == "cut" else WHOLE
            self.new[value] = Held(own, frozenset([own]), own.kind == "cut")
            self.costs.append(
                self._weight * self.prices.held * value.seen.itemsize * count_elements(value, own, self.prices.num)
            )
        form = needed_form(value, form)
        move = move_to(value, form, self)
        if move.kind == "there":
            return
        if move.kind == "look":
            assert move.source is not None
            self.bring(move.source, form)
        if move.kind == "convert":
            self.bring(value, move.before)
            _, forward, backward = conversion_traffic(value, move.before, form, self.prices.num)
            cost = forward + backward + _PER_MESSAGE
            if self[value].leaf and move.before.kind == "cut":  # equal for all forms, so bytes decide
                cost += _KEPT_CUT * (conversion_traffic(value, move.before, WHOLE, self.prices.num)[1] + _PER_MESSAGE)
            if value.outer is not None:
                cost /= value.times  # the value is brought once, and this is the price of a single run
                self.outside.append(cost)
            self.costs.append(self._weight * cost)
        held = self[value]
        self.new[value] = held._replace(slots=held.slots | {form})

    def decide(self, scope: Scope, node: Node, choice: SearchChoice, pairs: Sequence[tuple[Any, Form]]) -> Change:
        """Brings operands into the strategy's forms and makes the results."""
        for value, form in pairs:
            self.bring(value, form)
        strategy = choice.strategy
        # Cut results are less work, and partial results as much work as whole results.
        work = sum(1.0 if f.kind == "cut" else self.prices.num for f in strategy.outs)
        self.costs.append(self._weight * (strategy.sent + _PER_ELEMENT * work))
        if self.prices.work and choice.plan is None:  # a loop's work is in the price of the body
            self.costs.append(self._weight * self.prices.work * self._count_operations(scope, node, strategy))
        made = [v for v in scope.made[node] if v is not None]
        for value, form in zip(made, strategy.outs, strict=True):
            leaf = form.kind == "cut" and value.part_of is not None and self[value.part_of].leaf
            there = frozenset() if value.look_at is not None else frozenset([form])
            if self.prices.value and value.differentiable and value.look_at is None:
                held = value.seen.itemsize * count_elements(value, form, self.prices.num)
                self.costs.append(self._weight * self.prices.value * held)
            self.new[value] = Held(form, there, leaf)
        return Change(tuple(self.costs), tuple(self.outside), self.new, choice)

    def _count_operations(self, scope: Scope, node: Node, strategy: Strategy) -> float:
        """Returns the floating-point operations of the rank with the most, forward and backward."""
        flops = scope.flops(node)
        if not flops:
            return 0.0
        operands = scope.operands[node]
        # The gradient of each operand of a product costs as much as the product. The gradient of attention costs about
        # twice as much as attention.
        backward = min(sum(v.differentiable for v in operands), 2)
        own = [
            count_elements(v, f, self.prices.num) / max(math.prod(v.seen.shape), 1)
            for v, f in zip(operands, strategy.ins, strict=True)
        ]
        return flops * (1 + backward) * min(own)


def count_elements(value: PlannedValue, form: Form, num: int) -> int:
    """Returns the number of elements of a value on the rank with the most, for example 3 of 7 on 3 ranks."""
    shape = value.seen.shape
    if form.kind != "cut":
        return math.prod(shape)
    most = max(map(sum, zip(*blocks(shape[form.dim], num, form), strict=True)))
    return math.prod((*shape[: form.dim], most, *shape[form.dim + 1 :]))
