"""DeepSpeed's schedulers as schedules: from the count of updates so far to the rate of the next update.

DeepSpeed sets the rate after each update, counting from 0, and once before the first. So a scheduler's iteration `k`
gives the rate of update `k + 1`, and the first update has a separate rate.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn.core import did_you_mean

# Arguments and defaults; `...` marks required ones.
_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": _WARMUP | {"warmup_max_lr": 0.001, "total_num_steps": ...},
    "WarmupCosineLR": {
        "total_num_steps": ...,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
}
Schedule = Callable[[Any], Tensor]


def schedule_of(kind: str, params: Mapping[str, Any], lr: float) -> tuple[Schedule | None, list[str]]:
    """Returns a scheduler's schedule, and the problems with its arguments.

    Args:
        kind: name of the scheduler.
        params: arguments of the scheduler.
        lr: rate of the optimizer, from which some schedulers start.
    """
    known = SCHEDULERS.get(kind)
    if known is None:
        more = " It moves the betas as well, which are constant here." if kind == "OneCycle" else ""
        return None, [f"scheduler.type {kind!r} has no counterpart.{more}{did_you_mean(kind, SCHEDULERS)}"]
    problems = [
        f"scheduler.params.{k} is no argument of {kind}.{did_you_mean(k, known)}"
        for k in params
        if k not in known and k != "last_batch_iteration"
    ]
    had = known | dict(params)
    problems += [f"scheduler.params.{k} is missing, which {kind} needs" for k, x in had.items() if x is ...]
    for k, x in had.items():
        if k.endswith(("_steps", "_size")) and x is not ... and (not isinstance(x, int) or x < 1):
            problems.append(f"scheduler.params.{k} = {x!r} is no number of steps")
    if had.get("warmup_type", "log") not in ("log", "linear"):
        problems.append(f"scheduler.params.warmup_type = {had['warmup_type']!r} is neither 'log' nor 'linear'")
    if problems:
        return None, problems
    return _MAKERS[kind](had, lr), []


def _read_warmup(had: Mapping[str, Any]) -> tuple[int, Callable[[Tensor], Tensor]]:
    """Returns the length of a warm-up, and the fraction of the full rate by iteration."""
    steps = max(2, had["warmup_num_steps"])
    if had["warmup_type"] == "linear":
        return steps, lambda k: k / steps
    return steps, lambda k: torch.log1p(k.clamp(min=0)) / math.log(steps)


def _after_first(first: float, at: Callable[[Tensor], Tensor]) -> Schedule:
    def scheduled_rate(count: Any) -> Tensor:
        n = torch.as_tensor(count).double()
        return torch.where(n < 1, torch.full_like(n, first), at((n - 1).clamp(min=0))).float()

    return scheduled_rate


def _warmup_rate(had: Mapping[str, Any], lr: float) -> Schedule:
    low, high = had["warmup_min_lr"], lr if had["warmup_max_lr"] is None else had["warmup_max_lr"]
    steps, part = _read_warmup(had)
    total = had.get("total_num_steps")

    def rate_at(k: Tensor) -> Tensor:
        rest = torch.ones_like(k) if total is None else ((total - k) / max(1.0, total - steps)).clamp(min=0)
        return low + (high - low) * torch.where(k < steps, part(k), rest)

    return _after_first(low, rate_at)


def _cosine_rate(had: Mapping[str, Any], lr: float) -> Schedule:
    steps, part = _read_warmup(had)
    low, least, total = had["warmup_min_ratio"], had["cos_min_ratio"], max(1, had["total_num_steps"] - steps)

    def rate_at(k: Tensor) -> Tensor:
        wave = (1 + torch.cos(math.pi * ((k - steps + 1) / total).clamp(max=1))) / 2
        return lr * torch.where(k < steps, low + (1 - low) * part(k), (least + (1 - least) * wave).clamp(min=0))

    return _after_first(0.0, rate_at)


def _range_test(had: Mapping[str, Any], lr: float) -> Schedule:
    first, size, rate = (had[f"lr_range_test_{x}"] for x in ("min_lr", "step_size", "step_rate"))

    def scheduled_rate(count: Any) -> Tensor:
        done = torch.as_tensor(count).double() / size
        return (first * (1 + rate * (done.floor() if had["lr_range_test_staircase"] else done))).float()

    return scheduled_rate


_MAKERS = {
    "WarmupLR": _warmup_rate,
    "WarmupDecayLR": _warmup_rate,
    "WarmupCosineLR": _cosine_rate,
    "LRRangeTest": _range_test,
}
