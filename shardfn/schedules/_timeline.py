"""Cost of a schedule: the times of the actions, idle time and held microbatches, and whether the schedule can run.

An action starts when the rank has finished the previous action and the inputs have arrived. Sends never wait. A single
pass over the actions visits each action at most twice.

Pictures of timelines are text for a terminal, and SVG for a page.
"""

import collections
import dataclasses
import functools
import math
from typing import NamedTuple

from ._schedule import Action, Kind, PipelineSchedule, StageAction


class ScheduleError(ValueError):
    """Raised for a schedule that cannot run.

    An action is missing or there twice, or ranks wait for each other (a deadlock).
    """


class Costs(NamedTuple):
    """Time that a rank spends on a microbatch, in all chunks together. A backward that is not split takes both parts.

    Attributes:
        forward: time of the forward.
        backward: time of the gradient of the activations.
        weights: time of the gradient of the weights.
        transfer: time of a transfer from a rank to another.
    """

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0
    transfer: float = 0.0


class Span(NamedTuple):
    """Action with the time when the action runs."""

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Times at which the actions of a schedule run.

    Attributes:
        schedule: schedule.
        ranks: spans by rank.
        peaks: most activations held, by rank. A unit is a microbatch through a single chunk, from the forward to the
            end of the backward, W included.
    """

    schedule: PipelineSchedule
    ranks: tuple[tuple[Span, ...], ...]
    peaks: tuple[int, ...]

    @functools.cached_property
    def makespan(self) -> float:
        """Returns the time from the first start to the last end."""
        return max(row[-1].end for row in self.ranks)

    @functools.cached_property
    def bubble(self) -> float:
        """Returns the idle part of all ranks' time."""
        busy = sum(span.end - span.start for row in self.ranks for span in row)
        return 1 - busy / (self.makespan * len(self.ranks))


def timeline(schedule: PipelineSchedule, costs: Costs | None = None) -> Timeline:
    """Simulates the times of a pipeline's schedule.

    Args:
        schedule: schedule.
        costs: costs of the actions. By default each of F, B and W takes a unit of time, and a transfer none.

    Raises:
        ScheduleError: the schedule cannot run. The message lists actions that are missing or doubled, or ranks that
            wait in a circle.

    Example:
        >>> from shardfn.schedules import one_f_one_b
        >>> run = timeline(one_f_one_b(4, 8))
        >>> run.makespan, run.peaks
        (33.0, (4, 3, 2, 1))
    """
    check_complete(schedule)
    run = _PaperRun(schedule, costs or Costs())
    ready = list(range(schedule.num_ranks))
    while ready:
        ready += run.advance(ready.pop())
    if any(at < len(row) for at, row in zip(run.at, schedule.ranks, strict=True)):
        raise ScheduleError(_find_circle(schedule, run))
    return Timeline(schedule, tuple(map(tuple, run.spans)), tuple(map(max, run.held)))


def check_complete(schedule: PipelineSchedule) -> None:
    """Refuses a schedule in which an action is missing, there twice, or of no microbatch or chunk.

    Raises:
        ScheduleError: an action is wrong. The message lists all such actions by rank.
    """
    problems = []
    for rank, row in enumerate(schedule.ranks):
        counts = collections.Counter(row)
        pairs = [(k, c) for c in range(schedule.num_chunks) for k in range(schedule.num_microbatches)]
        wanted = [Action(kind, k, c) for k, c in pairs for kind in ("forward", "backward")]
        known = {*wanted, *(Action("weights", k, c) for k, c in pairs)}
        problems += [f"rank {rank}: {a} is there {counts[a]} times, not once" for a in wanted if counts[a] != 1]
        problems += [f"rank {rank}: {a} is there {n} times" for a, n in counts.items() if a.kind == "weights" and n > 1]
        problems += [f"rank {rank}: {a} is of no microbatch or chunk" for a in counts if a not in known]
    if problems:
        raise ScheduleError("\n  - ".join([f"the schedule {schedule.name} is not a step:", *problems]))


class _PaperRun:
    """Simulated run: how far each rank has come. A waiting rank is visited again once the missing action is done."""

    def __init__(self, schedule: PipelineSchedule, costs: Costs) -> None:
        self._schedule = schedule
        self._split = {schedule.place(r, a) for r, row in enumerate(schedule.ranks) for a in row if a.kind == "weights"}
        self._took = {kind: getattr(costs, kind) / schedule.num_chunks for kind in ("forward", "backward", "weights")}
        self._transfer = costs.transfer
        # The end times of finished actions. `_waiting` maps a missing action to the rank that waits. If the schedule
        # can run, the missing action is a neighbour's, and no other rank waits.
        self._done: dict[StageAction, float] = {}
        self._waiting: dict[StageAction, int] = {}
        # `at[rank]` actions of a rank have run and have spans. `held` counts held microbatches, before the first action
        # and after each.
        self.at = [0] * schedule.num_ranks
        self.spans: list[list[Span]] = [[] for _ in schedule.ranks]
        self.held: list[list[int]] = [[0] for _ in schedule.ranks]

    def advance(self, rank: int) -> list[int]:
        """Advances a rank as far as possible, and returns the ranks that waited for the actions run here."""
        woken, row = [], self._schedule.ranks[rank]
        while self.at[rank] < len(row):
            place = self._schedule.place(rank, row[self.at[rank]])
            missing = self.missing(place)
            if missing is not None:
                self._waiting[missing] = rank
                return woken
            self._perform_action(rank, row[self.at[rank]], place)
            if place in self._waiting:
                woken.append(self._waiting.pop(place))
        return woken

    def missing(self, place: StageAction) -> StageAction | None:
        """Returns the first action that must run before, or None if the action can run."""
        return next((x for x in self._schedule.needs(place) if x not in self._done), None)

    def _perform_action(self, rank: int, action: Action, place: StageAction) -> None:
        spans, home = self.spans[rank], self._schedule.home
        came = [self._done[x] + self._transfer * (home[x.stage][0] != rank) for x in self._schedule.needs(place)]
        start = max([spans[-1].end if spans else 0.0, *came])
        split = place._replace(kind="weights") in self._split
        end = start + self._took[action.kind]
        end += self._took["weights"] if action.kind == "backward" and not split else 0
        spans.append(Span(action, start, end))
        ends: Kind = "weights" if split else "backward"
        change = 1 if action.kind == "forward" else -1 if action.kind == ends else 0
        self.held[rank].append(self.held[rank][-1] + change)
        self._done[place] = end
        self.at[rank] += 1


def _find_circle(schedule: PipelineSchedule, run: _PaperRun) -> str:
    """Returns the ranks that wait for each other, a line each."""
    rank = next(r for r, row in enumerate(schedule.ranks) if run.at[r] < len(row))
    lines: dict[int, str] = {}
    while rank not in lines:
        action = schedule.ranks[rank][run.at[rank]]
        missing = run.missing(schedule.place(rank, action))
        assert missing is not None
        of, other = schedule.at(missing)
        lines[rank] = f"rank {rank} at {action} waits for {other} of rank {of}"
        before = schedule.ranks[of][run.at[of]]
        lines[rank] += f", which comes after {before} there" if before != other else ""
        rank = of
    first = list(lines).index(rank)
    stuck = [*list(lines.values())[first:]]
    return "\n  - ".join([f"the schedule {schedule.name} would never end, as its ranks wait in a circle:", *stuck])


# Forward, backward and weights. The second chunk of a rank is darker.
_COLORS = {
    "forward": ("#a8c8ec", "#5b93d3"),
    "backward": ("#f7c59f", "#e58a3c"),
    "weights": ("#b9dfb0", "#6fb35f"),
}
_ROW, _TOP, _LEFT = 24, 30, 58


def as_picture(run: Timeline, unit: float | None = None) -> str:
    """Returns a picture in text, a line per rank: time runs to the right, dots are idle, dashes continue an action.

    Args:
        run: timeline.
        unit: time of a column. Default: the duration of the shortest action.

    Example:
        >>> from shardfn.schedules import one_f_one_b, timeline
        >>> print(as_picture(timeline(one_f_one_b(2, 3))))
        1f1b: 2 ranks, 3 microbatches, 25.0% idle
        0  F0 F1 .. .. B0 -- F2 B1 -- .. B2 --
        1  .. F0 B0 -- F1 B1 -- F2 B2 -- .. ..
    """
    spans = [span for row in run.ranks for span in row]
    unit = unit or min(span.end - span.start for span in spans)
    width = max(len(str(span.action)) for span in spans)
    num = math.ceil(run.makespan / unit - 1e-9)
    lines = [_span_title(run)]
    for rank, row in enumerate(run.ranks):
        cells = ["." * width] * num
        for span in row:
            first = round(span.start / unit)
            for i in range(first, max(first + 1, round(span.end / unit))):
                cells[i] = (str(span.action) if i == first else "").ljust(width, " " if i == first else "-")
        lines.append(f"{rank}  {' '.join(cells)}".rstrip())
    return "\n".join(lines)


def as_svg(run: Timeline, width: int = 900) -> str:
    """Returns the picture as an SVG document `width` pixels wide.

    Example:
        >>> from shardfn.schedules import gpipe, timeline
        >>> as_svg(timeline(gpipe(2, 2))).startswith("<svg ")
        True
    """
    scale = (width - _LEFT - 10) / run.makespan
    height = _TOP + _ROW * len(run.ranks) + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="4" y="17" font-size="13">{_span_title(run)}</text>',
    ]
    for rank, row in enumerate(run.ranks):
        top = _TOP + _ROW * rank
        out.append(f'<text x="4" y="{top + 14}">rank {rank}</text>')
        out += [_span_box(span, top, scale) for span in row]
    return "\n".join([*out, "</svg>", ""])


def _span_title(run: Timeline) -> str:
    of = run.schedule
    return f"{of.name}: {of.num_ranks} ranks, {of.num_microbatches} microbatches, {run.bubble:.1%} idle"


def _span_box(span: Span, top: int, scale: float) -> str:
    x, wide = _LEFT + span.start * scale, (span.end - span.start) * scale
    color = _COLORS[span.action.kind][span.action.chunk % 2]
    label = f'<text x="{x + wide / 2:.1f}" y="{top + 14}" text-anchor="middle">{span.action.microbatch}</text>'
    rect = f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{_ROW - 4}" fill="{color}" stroke="#555"/>'
    return rect + (label if wide > 8 else "")
