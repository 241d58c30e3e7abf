"""Covers the order of use as a value: windows, and schedules of gathers and releases."""

import random

from shardfn.engine.plan._plan import Turn, UseOrder


def _order(*phases: list[int]) -> UseOrder:
    return UseOrder([list(units) for units in phases])


def test_a_window_holds_distinct_units_while_they_fit_and_one_in_any_case() -> None:
    order, sizes = _order([0, 1, 0, 2], [3, 0]), [4, 3, 5, 1]
    assert list(order.window(0, 0, sizes, 7)) == [0, 1]
    assert list(order.window(0, 0, sizes, 12)) == [0, 1, 2]
    assert list(order.window(0, 2, sizes, 10)) == [0, 2, 3]  # goes on in the next phase
    assert list(order.window(0, 3, sizes, 0)) == [2]
    assert list(order.window(1, 0, sizes, 100)) == [3, 0]
    assert not order.window(2, 0, sizes, 100)


def test_a_unit_is_found_from_a_position_on() -> None:
    order = _order([5, 7, 5])
    assert [order.find(0, start, 5) for start in range(4)] == [0, 2, 2, None]
    assert order.find(0, 0, 6) is None
    assert order.find(3, 0, 5) is None and order.phases == [[5, 7, 5], [], [], []]


def test_schedules_hold_used_leaves_and_no_more_than_fits() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        sizes = [draw.randint(0, 5) for _ in range(6)]
        order = _order(*([draw.randrange(6) for _ in range(draw.randint(0, 8))] for _ in range(draw.randint(1, 4))))
        limit, held = draw.randint(0, 15), set[int]()
        for units, moves in zip(order.phases, order.schedule(sizes, limit), strict=True):
            for unit, move in zip(units, moves, strict=True):
                assert set(move.drop) <= held and not held & set(move.issue), seed
                held = held - set(move.drop) | set(move.issue)
                assert unit in held, seed
                assert sum(sizes[u] for u in held) <= limit or held == {unit}, seed


def test_uses_beyond_the_order_of_a_phase_make_schedules_anew() -> None:
    order = _order([0])
    assert order.schedule([1, 1], 9) == [[Turn([], [0])]]
    order.extend(1, [1, 0])
    assert order.phases == [[0], [1, 0]]
    assert order.schedule([1, 1], 9) == [[Turn([], [0, 1])], [Turn([], []), Turn([1], [])]]
