"""The search for a plan: never dearer than greedy, and of small programs the cheapest there is, by trying all."""

import itertools
import random
from typing import Any

import pytest
import torch

from shardfn.capture import capture
from shardfn.engine import prepare
from shardfn.engine.partition._search import Search
from shardfn.engine.partition._states import Draft, Held, NumberedChange, SearchChoice, SearchState
from shardfn.engine.partition._values import Scope, scope_of
from shardfn.graph._forms import WHOLE, Form, cut

SIZE = 12


def drawn_loss(r: random.Random, steps: int) -> Any:
    """A loss of products, sums, softmax and views of earlier values, in random order."""
    moves = [
        (r.choice(["mm", "mm", "add", "t", "softmax", "relu", "sum"]), r.random(), r.random()) for _ in range(steps)
    ]

    def loss(*xs: torch.Tensor) -> list[torch.Tensor]:
        known = list(xs)
        for kind, i, j in moves:
            x, y = known[-1 - int(i * min(3, len(known)))], known[int(j * len(known))]
            if kind == "mm":
                x = x @ y
            elif kind == "add":
                x = x + y
            elif kind == "t":
                x = x.t()
            elif kind == "softmax":
                x = x.softmax(-1)
            elif kind == "relu":
                x = x.relu()
            else:
                x = x + y.sum(0, keepdim=True)
            known.append(x)
        return [(known[-1] * known[-2]).sum()]

    return loss


def planned(seed: int, steps: int, num: int) -> tuple[Scope, dict[Any, Held], list[tuple[Any, Form | None]]]:
    r = random.Random(seed)
    inputs = [torch.empty(SIZE, SIZE, device="meta").requires_grad_() for _ in range(4)]
    gm = prepare(capture(drawn_loss(r, steps), inputs, differentiable=True))
    scope = scope_of(gm.graph, lambda n: True, lambda n: torch.zeros(()))
    forms = [r.choice([WHOLE, cut(0, SIZE, num), cut(1, SIZE, num)]) for _ in inputs]
    start = {
        v: Held(f, frozenset([f]), f.kind == "cut" and r.random() < 0.5)
        for v, f in zip(scope.inputs, forms, strict=True)
    }
    (end,) = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    return scope, start, [(scope.one(end), WHOLE)]


def price(search: Search, scope: Scope, start: Any, ends: Any, choices: dict[Any, SearchChoice]) -> float:
    """The price of these choices, by going through them."""
    state, known = SearchState(0.0, 0.0, {}, None), dict(start)
    for node in scope.nodes:
        pairs = list(zip(scope.operands[node], choices[node].strategy.ins, strict=True))
        change = Draft(search._prices, known.__getitem__).decide(scope, node, choices[node], pairs)
        known |= change.held
        numbered = NumberedChange(change.costs, change.outside, search.numbered(change.held), change.choice)
        state = state.after(numbered, node, [])
    return search._end_state(scope, state, start, ends).total


def cheapest(search: Search, scope: Scope, start: Any, ends: Any) -> float:
    """By trying all: no state is ever forgotten."""
    states, begun = [SearchState(0.0, 0.0, {}, None)], search.numbered(start)
    for node in scope.nodes:
        states = [s.after(c, node, scope.dead[node]) for s in states for c in search.changes(scope, node, s, begun)]
    return min(search._end_state(scope, s, start, ends).total for s in states)


@pytest.mark.nightly
@pytest.mark.parametrize("num", [2, 3])
def test_small_programs_get_the_cheapest_plan(num: int) -> None:
    better = 0
    for seed in range(12):
        scope, start, ends = planned(seed, 3, num)
        search = Search(num, 64)
        found, greedy = search.best(scope, start, ends), Search(num, 1).best(scope, start, ends)
        least = cheapest(search, scope, start, ends)
        assert found.total == pytest.approx(least, rel=1e-9), seed
        assert found.total == pytest.approx(price(search, scope, start, ends, found.choices), rel=1e-9), seed
        better += found.total < greedy.total - 1
    assert better, "greedy is as good on all of them, so that this shows nothing"


@pytest.mark.nightly
@pytest.mark.parametrize("width", [1, 2, 8])
def test_no_plan_is_dearer_than_that_of_greedy(width: int) -> None:
    for seed, num in itertools.product(range(6), (2, 4)):
        scope, start, ends = planned(seed, 12, num)
        greedy = Search(num, 1).searched(scope, start, ends, 1)
        assert Search(num, width).best(scope, start, ends).total <= greedy.total
