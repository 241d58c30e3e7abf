"""Covers schedules: every generator against theory for p <= 8 and m <= 16, the verifier, and pictures."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardfn.schedules import (
    Action,
    Costs,
    PipelineSchedule,
    ScheduleError,
    Timeline,
    _timeline,
    as_picture,
    as_svg,
    as_text,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    parse,
    timeline,
    zero_bubble_h1,
    zero_bubble_v,
)

PAIRS = list(itertools.product(range(1, 9), range(1, 17)))
SINGLE = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zero_bubble_h1}
UNEQUAL = Costs(forward=1.0, backward=1.25, weights=0.75)


def _all() -> Iterator[tuple[str, PipelineSchedule]]:
    for p, m in PAIRS:
        made = [f(p, m) for f in (*SINGLE.values(), zero_bubble_v)]
        made += [interleaved(p, m, v) for v in (1, 2, 3, 4) if m % p == 0]
        made += [dual_pipe_v(p, m)] if m >= 2 * p else []
        yield from ((f"{s.name} {p} {m} {s.num_chunks}", s) for s in made)


def _idle(run: Timeline, costs: Costs) -> float:
    """Idle time of a rank: the same for all, as all have equal work."""
    return run.makespan - run.schedule.num_microbatches * sum(costs[:3])


def test_all_run_and_a_timeline_meets_every_need() -> None:
    for name, schedule in _all():
        run = timeline(schedule, UNEQUAL)
        ends = {schedule.place(r, s.action): s.end for r, row in enumerate(run.ranks) for s in row}
        for rank, row in enumerate(run.ranks):
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(row)), name
            for span in row:
                needs = schedule.needs(schedule.place(rank, span.action))
                assert all(ends[x] <= span.start + 1e-9 for x in needs), name


@pytest.mark.day("costs0-gpipe", "costs1-gpipe")
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("costs", [Costs(), UNEQUAL])
def test_gpipe_and_1f1b(make: Callable[[int, int], PipelineSchedule], costs: Costs) -> None:
    for p, m in PAIRS:
        run = timeline(make(p, m), costs)
        assert math.isclose(_idle(run, costs), (p - 1) * sum(costs[:3]), abs_tol=1e-9), (p, m)
        assert math.isclose(run.bubble, (p - 1) / (m + p - 1), abs_tol=1e-9)
        assert run.peaks == tuple(m if make is gpipe else min(m, p - r) for r in range(p))


@pytest.mark.parametrize(
    "v", [1, pytest.param(2, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.nightly), 4]
)
def test_interleaved(v: int) -> None:
    for p, m in PAIRS:
        if m % p:
            with pytest.raises(ValueError, match=f"{m} microbatches and {v} chunks. Use"):
                interleaved(p, m, v)
            continue
        run = timeline(interleaved(p, m, v), UNEQUAL)
        assert math.isclose(_idle(run, UNEQUAL), (p - 1) * sum(UNEQUAL[:3]) / v, abs_tol=1e-9), (p, m)
        warmup = [2 * (p - r - 1) + (v - 1) * p for r in range(p)]
        assert run.peaks == tuple(min(m * v, w + 1) for w in warmup)


@pytest.mark.parametrize(
    "costs",
    [
        Costs(),
        pytest.param(UNEQUAL, marks=pytest.mark.nightly),
        pytest.param(Costs(1.0, 1.0, 0.5), marks=pytest.mark.nightly),
    ],
)
def test_zb_h1(costs: Costs) -> None:
    f, b, w, _ = costs
    for p, m in PAIRS:
        run, plain = timeline(zero_bubble_h1(p, m), costs), timeline(one_f_one_b(p, m), costs)
        assert max(run.peaks) == max(plain.peaks), (p, m)
        assert run.makespan <= plain.makespan + 1e-9
        if m >= 2 * p:
            assert math.isclose(_idle(run, costs), (p - 1) * (f + b - w), abs_tol=1e-9), (p, m)


def test_a_list_by_hand_splits_by_its_actions() -> None:
    plain = one_f_one_b(2, 2)
    assert not plain.splits
    assert dataclasses.replace(plain, ranks=(parse("F0 B0 W0"),)).splits


def test_zb_v() -> None:
    for p, m in PAIRS:
        run = timeline(zero_bubble_v(p, m))
        assert max(run.peaks) <= 2 * min(m, p), (p, m)
        if m >= 2 * p - 1:
            for row in run.ranks:  # idle only before a rank's first action and after its last one
                assert math.isclose(row[-1].end - row[0].start, 3 * m, abs_tol=1e-9), (p, m)
            assert math.isclose(_idle(run, Costs()), (p - 1) / 2, abs_tol=1e-9)


def test_dualpipe_v() -> None:
    for p, m in PAIRS:
        if m < 2 * p:
            with pytest.raises(ValueError, match=f"needs {2 * p} microbatches or more, got {m}"):
                dual_pipe_v(p, m)
            continue
        run = timeline(dual_pipe_v(p, m))
        assert max(run.peaks) <= 2 * p + 1, (p, m)
        assert math.isclose(_idle(run, Costs()), (p - 1) / 2, abs_tol=1e-9), (p, m)


def test_zero_bubble_is_less_than_half_of_1f1b() -> None:
    for p, m in [(4, 16), (8, 16)]:
        plain = timeline(one_f_one_b(p, m)).bubble
        assert all(timeline(f(p, m)).bubble < plain / 2 for f in (zero_bubble_h1, zero_bubble_v, dual_pipe_v))


def test_transfers_take_time() -> None:
    costs = Costs(transfer=0.5)
    run = timeline(gpipe(4, 8), costs)
    assert math.isclose(run.makespan, 8 * 3 + 3 * 3 + 6 * 0.5)


def test_a_circle_is_printed() -> None:
    plain = one_f_one_b(3, 2)
    last = dataclasses.replace(plain, name="wrong", ranks=(plain.ranks[0], parse("F0 B1 F1 B0"), plain.ranks[2]))
    with pytest.raises(ScheduleError) as caught:
        timeline(last)
    assert str(caught.value).splitlines() == [
        "the schedule wrong would never end, as its ranks wait in a circle:",
        "  - rank 1 at B1 waits for F1 of rank 1, which comes after B1 there",
    ]
    ranks = (parse("F0 B0 F1 B1"), parse("F0 F1 B1 B0"))
    with pytest.raises(ScheduleError) as caught:
        timeline(PipelineSchedule("by hand", 2, ((0,), (1,)), ranks))
    assert str(caught.value).splitlines()[1:] == [
        "  - rank 0 at B0 waits for B0 of rank 1, which comes after F1 there",
        "  - rank 1 at F1 waits for F1 of rank 0, which comes after B0 there",
    ]


def test_missing_actions_are_listed() -> None:
    with pytest.raises(ScheduleError) as caught:
        timeline(PipelineSchedule("short", 2, ((0,),), (parse("F0 B0 B0 F1 W1 W1 F2"),)))
    assert str(caught.value).splitlines()[1:] == [
        "  - rank 0: B0 is there 2 times, not once",
        "  - rank 0: B1 is there 0 times, not once",
        "  - rank 0: W1 is there 2 times",
        "  - rank 0: F2 is of no microbatch or chunk",
    ]


def test_mutants_are_refused_or_meet_every_need() -> None:
    """Two actions of a rank change places: the run either ends, with all needs met, or a circle is printed."""
    draw, refused = random.Random(0), 0
    for _, schedule in itertools.islice(_all(), 40, None, 7):
        rank = draw.randrange(schedule.num_ranks)
        row = list(schedule.ranks[rank])
        i, j = draw.randrange(len(row)), draw.randrange(len(row))
        row[i], row[j] = row[j], row[i]
        rows = (*schedule.ranks[:rank], tuple(row), *schedule.ranks[rank + 1 :])
        mutant = dataclasses.replace(schedule, ranks=rows)
        try:
            run = timeline(mutant)
        except ScheduleError as error:
            assert "wait in a circle" in str(error)
            refused += 1
            continue
        ends = {mutant.place(r, s.action): s.end for r, spans in enumerate(run.ranks) for s in spans}
        for r, spans in enumerate(run.ranks):
            assert all(ends[x] <= s.start for s in spans for x in mutant.needs(mutant.place(r, s.action)))
    assert refused > 20


def test_a_verifier_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each action is visited twice at most: when its rank comes to it, and when the action it waits for is done."""
    looks = 0
    missing = _timeline._PaperRun.missing

    def counted(run: Any, place: Any) -> Any:
        nonlocal looks
        looks += 1
        return missing(run, place)

    monkeypatch.setattr(_timeline._PaperRun, "missing", counted)
    for m in (20, 200):
        for schedule in (one_f_one_b(16, m), zero_bubble_h1(16, m), dual_pipe_v(8, m)):
            looks = 0
            timeline(schedule)
            assert looks <= 2 * sum(map(len, schedule.ranks))


def test_text() -> None:
    row = (Action("forward", 0), Action("backward", 12, 1), Action("weights", 3))
    assert as_text(row) == "F0 B12.1 W3" and parse(as_text(row)) == row


def test_pictures() -> None:
    run = timeline(zero_bubble_h1(2, 2))
    assert as_picture(run).splitlines() == [
        "zb-h1: 2 ranks, 2 microbatches, 14.3% idle",
        "0  F0 F1 .. B0 W0 B1 W1",
        "1  .. F0 B0 F1 B1 W0 W1",
    ]
    assert as_svg(run).count("<rect") == 1 + 12


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(x, marks=pytest.mark.nightly if i % 3 else ())
        for i, x in enumerate([*SINGLE.values(), interleaved, zero_bubble_v, dual_pipe_v])
    ],
)
def test_numbers_below_one_are_refused(make: Callable[[int, int], PipelineSchedule]) -> None:
    with pytest.raises(ValueError, match="must have a rank and a microbatch at least, got 2 and 0"):
        make(2, 0)
