"""Rewards by a function in Python, which may fail: each call has a time limit, and failures are counted."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardfn.core import Axes, Mesh, explains_keywords

from ._meant import ADVANTAGES
from ._rollout import FAILURES, Rollout
from ._sandbox import Called, count_kinds, outcomes_of


class Scores(NamedTuple):
    """Rollout with rewards, and the failures.

    Attributes:
        rollout: rollout whose rewards are NaN where the function failed.
        counts: "raised", "late", "invalid" (NaN, infinite, or no number) and "died" (the process ended), of this rank's
            rows. `rollout_metrics` has their parts of all ranks' answers.
        first: first failure by row, with its error, empty if nothing failed.
    """

    rollout: Rollout
    counts: dict[str, int]
    first: str


@explains_keywords(**ADVANTAGES)
def score(
    reward: Callable[..., float],
    rollout: Rollout,
    given: Sequence[Any] | None = None,
    *,
    seconds: float = 10.0,
    workers: int = 1,
    mesh: Mesh | None = None,
    axis: Axes = None,
) -> Scores:
    """Calls a reward function for each answer.

    `group_advantages` leaves answers out that have no reward, and `kl_rewards` counts 0 for them. If no answer of this
    rank gets a reward, for example where the function takes other arguments, a warning has the counts and the first
    failure.

    Args:
        reward: function `reward(prompt, answer) -> float`, of lists of ids, and with `given` also of the row's entry.
            The function runs in a fork of this process: its changes of variables are lost, and it must not use a GPU.
        rollout: rollout of this rank.
        given: value of each row, such as a solution.
        seconds: limit of a call.
        workers: number of processes. At most `rows / workers` calls wait for each other.
        mesh: mesh of `axis`. All its ranks call then, and wait for each other no longer than its `agreement_timeout`.
        axis: axes whose ranks hold the same rows, such as "tp". The ranks divide the calls and have the same rewards,
            also if a call is late on a single rank.

    Raises:
        ValueError: `given` is not one value for each row, or a number is out of range.
        NotImplementedError: this system has no fork.

    Example:
        >>> from shardfn.rl import empty_rollout
        >>> rollout = empty_rollout(2, 8, 4)
        >>> found = score(lambda prompt, answer, weight: 1 / weight, rollout, [0, 2])
        >>> found.counts["raised"], found.first, found.rollout.rewards
        (1, 'row 0 raised ZeroDivisionError: division by zero', tensor([   nan, 0.5000]))
    """
    num = len(rollout.ids)
    if given is not None and len(given) != num:
        raise ValueError(f"score: {len(given)} values are given for {num} rows. Pass one for each.")
    calls = [(*rollout.tokens(row), *(() if given is None else (given[row],))) for row in range(num)]
    called = Called("score", reward, _check_finite, "a finite number")
    outcomes = outcomes_of(called, calls, seconds=seconds, workers=workers, mesh=mesh, axis=axis)
    rewards = [value if kind == "" else math.nan for _, kind, value in outcomes]
    failed = [FAILURES.index(kind) + 1 if kind else 0 for _, kind, _ in outcomes]
    counts = count_kinds(outcomes)
    first = next((called.text(one) for one in outcomes if one[1]), "")
    if num and all(failed):
        some = ", ".join(f"{kind} {count}" for kind, count in counts.items() if count)
        warnings.warn(
            f"score: the reward function must return a finite number, but it failed for all {num} answers ({some}), so"
            f" nothing is learnt from them. First failure: {first}. It is called as {_make_call(given)}.",
            stacklevel=2,
        )
    return Scores(
        rollout._replace(
            rewards=torch.tensor(rewards, dtype=rollout.rewards.dtype, device=rollout.rewards.device),
            failed=torch.tensor(failed, dtype=torch.int8, device=rollout.rewards.device),
        ),
        counts,
        first,
    )


def _make_call(given: Sequence[Any] | None) -> str:
    return "reward(prompt, answer), with lists of ids" + ("" if given is None else ", and the row's entry of given")


def _check_finite(value: Any) -> float:
    if not math.isfinite(value):  # refuses texts, which float() reads
        raise ValueError(value)
    return float(value)
