"""Measures candidates for kernels: the op by itself, and whole steps of the library, with and without the candidate."""

import dataclasses
import functools
import importlib
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardfn._torch import pytree

from ._harness import Candidate, check_signature, swapped
from ._harness_cases import Size
from ._harness_modules import cases_of, find_op
from ._harness_process import ProcessLimits, run_apart

_SIZES = ((1, 1024), (64, 1024), (1024, 512))
# Ratios within this distance of 1 count as equal.
_NOISE = 0.03
_LEAST_SECONDS = 0.1
_LIMITS = ProcessLimits()
_WORDS = {-1: "faster", 0: "equal", 1: "slower"}


@dataclasses.dataclass(frozen=True)
class MeasureReport:
    """Times of a candidate over times of the present implementation. Below 1 the candidate is faster.

    Attributes:
        name: name of the op.
        alone: ratio of the op by itself, by size.
        steps: ratio of each step that calls the op.
        calls: number of calls of the op in each step.
        differences: largest absolute difference of a step's results with and without the candidate.
        spread: quartiles of the ratios of rounds, by size or step.
    """

    name: str
    alone: Mapping[str, float]
    steps: Mapping[str, float]
    calls: Mapping[str, int]
    differences: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]]

    def _asdict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def verdict(self) -> str:
        """Returns the result in words, for example "faster by itself, slower in the step decode"."""
        alone = _WORDS[_sign(statistics.geometric_mean(self.alone.values()))]
        parts = [f"{alone} by itself"]
        for sign in (1, 0, -1):
            if found := [step for step, ratio in self.steps.items() if _sign(ratio) == sign]:
                parts.append(f"{_WORDS[sign]} in the step {', '.join(found)}")
        return ", ".join(parts if self.steps or not self.calls else [*parts, "called by no step"])

    def __str__(self) -> str:
        """Returns a line for each size and each step."""
        lines = [f"{self.name}: {self.verdict}"]
        for label, ratio in [*self.alone.items(), *self.steps.items()]:
            low, high = self.spread[label]
            calls = f", {self.calls[label]} calls" if label in self.calls else ""
            far = f", results differ by {self.differences[label]:.2g}" if self.differences.get(label) else ""
            lines.append(f"  {label:<34}{ratio:6.3f}  quartiles {low:.3f} to {high:.3f}{calls}{far}")
        return "\n".join([*lines, *(f"  {name:<34}does not call it" for name, n in self.calls.items() if not n)])


def measure(
    name: str,
    f: Candidate | str | pathlib.Path,
    steps: Mapping[str, Callable[[], Callable[[], Any]]] | None = None,
    *,
    rounds: int = 11,
    clock: Callable[[], float] = time.process_time,
    limits: ProcessLimits | None = None,
) -> MeasureReport:
    """Measures a candidate for an op by itself and in whole steps, against the present implementation.

    Both take turns, and the order changes with each round. A ratio is the median of the ratios of rounds. Processor
    time does not count the waits on a busy machine, but adds up the times of all threads.

    Args:
        name: name of the op.
        f: function in the place of the implementation, or a path, see `check`. It is not checked here.
        steps: functions that make whole steps, by name. A step has no arguments, and returns tensors, or nothing. Each
            step is made twice, once with the candidate in use, so that a captured step captures the candidate. A step
            that does not call the op is not timed. Only for a function.
        rounds: number of rounds.
        clock: function that returns seconds. For a GPU, pass a function that synchronizes. Not for a path.
        limits: time and memory of the process. Only for a path.

    Raises:
        ValueError: no such op, no rounds, or an argument without effect.
        CandidateError: see `check`.

    Example:
        >>> report = measure("gelu", find_op("gelu").reference, rounds=1)
        >>> sorted(report.alone)
        ['1 rows of width 1024 in float32', '1024 rows of width 512 in float32', '64 rows of width 1024 in float32']
    """
    cases_of(name)
    if rounds < 1:
        raise ValueError(f"rounds must be 1 or more, got {rounds}")
    if isinstance(f, str | pathlib.Path):
        if clock is not time.process_time or steps:
            raise ValueError("clock and steps must belong to a function, as a path runs in another process, got a path")
        return measure_file(pathlib.Path(f), (name,), limits or ProcessLimits(), rounds=rounds)[0]
    if limits is not None:
        raise ValueError(
            "limits must belong to a path, as a function runs in this process, got a function. Leave out limits="
        )
    check_signature(find_op(name), f)
    alone, found, calls, differences, spread = {}, {}, {}, {}, {}
    for size in (Size(*size) for size in _SIZES):
        label = str(size)
        run = functools.partial(find_op(name).op, *cases_of(name).make(size))
        alone[label], spread[label] = _take_turns(name, f, run, run, rounds, clock)
    for step, make in (steps or {}).items():
        count = [0]
        with swapped(name, _count_calls(f, count)):
            candidate = make()
            got = candidate()
        calls[step] = count[0]
        if not count[0]:
            continue
        present = make()
        differences[step] = _largest_difference(got, present())
        found[step], spread[step] = _take_turns(name, f, present, candidate, rounds, clock)
    return MeasureReport(name, alone, found, calls, differences, spread)


def measure_file(
    path: pathlib.Path,
    names: Sequence[str] = (),
    limits: ProcessLimits = _LIMITS,
    *,
    rounds: int = 11,
    steps: Sequence[str] = (),
) -> list[MeasureReport]:
    """Measures the candidates of a file by themselves and in whole steps, in a separate process.

    Args:
        path: Python file.
        names: names of ops. Empty: all ops for which the file has functions.
        limits: time and memory of the process.
        rounds: number of rounds.
        steps: functions that make whole steps, as "module:function", which the process imports. For example
            "shardfn.cli:training_step".

    Raises:
        ValueError: a step is not of this form.
        CandidateError: see `check`.
    """
    if wrong := [step for step in steps if not re.fullmatch(r"[\w.]+:\w+", step)]:
        raise ValueError(f"steps must be 'module:function', got {wrong}. For example 'shardfn.cli:training_step'")
    reports = run_apart(path, "measure", names, limits, str(rounds), *steps)
    return [MeasureReport(**one | {"spread": {k: tuple(v) for k, v in one["spread"].items()}}) for one in reports]


def import_steps(steps: Sequence[str]) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Returns the functions that make steps, by the names of the functions."""
    pairs = [step.split(":") for step in steps]
    return {name: getattr(importlib.import_module(module), name) for module, name in pairs}


def _count_calls(f: Candidate, count: list[int]) -> Candidate:
    def counted(*args: Any) -> Any:
        count[0] += 1
        return f(*args)

    return counted


def _take_turns(
    name: str, f: Candidate, present: Any, candidate: Any, rounds: int, clock: Callable[[], float]
) -> tuple[float, tuple[float, float]]:
    """Returns the median and the quartiles of the candidate's times over the present times."""

    def time_one(new: bool, number: int) -> float:
        if not new:
            return _time(present, number, clock)
        with swapped(name, f):
            return _time(candidate, number, clock)

    # Each side is repeated until it takes many ticks of the clock, as the two may differ by a factor of hundreds.
    numbers = [_count_repeats(functools.partial(time_one, new)) for new in (False, True)]
    ratios = []
    for i in range(rounds):
        times = [0.0, 0.0]
        for new in (i % 2 == 0, i % 2 == 1):
            times[new] = time_one(new, numbers[new]) / numbers[new]
        if not times[False]:
            raise ValueError(f"clock must advance during {numbers[False]} calls of {name}, got 0 s. Pass a finer clock")
        ratios.append(times[True] / times[False])
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
    return statistics.median(ratios), (low, high)


def _count_repeats(time_calls: Callable[[int], float]) -> int:
    """Returns the number of calls that take a tenth of a second or more, a power of two."""
    number = 1
    time_calls(1)  # builds and warms up
    while time_calls(number) < _LEAST_SECONDS and number < 1 << 20:
        number *= 2
    return number


def _time(run: Callable[[], Any], number: int, clock: Callable[[], float]) -> float:
    began = clock()
    for _ in range(number):
        run()
    return clock() - began


def _largest_difference(got: Any, expected: Any) -> float:
    pairs = zip(_tensors_of(got), _tensors_of(expected), strict=True)
    return max((float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def _tensors_of(results: Any) -> list[Tensor]:
    found, _ = pytree.tree_flatten(results)
    return [x for x in found if isinstance(x, Tensor)]


def _sign(ratio: float) -> int:
    return 0 if abs(ratio - 1) <= _NOISE else (1 if ratio > 1 else -1)
