"""DeepSpeed's optimizers and schedulers, by the names in the configuration.

A scheduler becomes a schedule, from the count of updates so far to the rate of the next update. DeepSpeed sets the rate
after each update, counting from 0, and once before the first. So a scheduler's iteration `k` gives the rate of update
`k + 1`, and the first update has a separate rate.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn import optim
from shardfn.core import did_you_mean

Rate = Any

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
# Arguments with the only values that have a counterpart here.
_ONLY: dict[str, tuple[Any, ...]] = {
    "bias_correction": (True,),
    "amsgrad": (False,),
    "maximize": (False,),
    "eps_inside_sqrt": (False,),
    "max_grad_norm": (0, 0.0),
}
_IDLE = (
    "torch_adam set_grad_none fp32_optimizer_states cuda_aware comm_backend_name fused foreach capturable"
    " differentiable adamw_mode"
).split()
_COEFFICIENTS = {"max_coeff": 10.0, "min_coeff": 0.01}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": _ADAM | {"adam_w_mode": True},
    "adamw": _ADAM | {"adam_w_mode": True},
    "lamb": _ADAM | _COEFFICIENTS,
    "lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "dampening": 0.0},
    "onebitadam": _ADAM | {"freeze_step": 100000},
    "onebitlamb": _ADAM
    | _COEFFICIENTS
    | {"freeze_step": 100000, "coeff_beta": 0.9, "factor_max": 4.0, "factor_min": 0.5, "factor_threshold": 0.1},
    "zerooneadam": _ADAM
    | {"var_freeze_step": 100000, "var_update_scaler": 16, "local_step_scaler": 32678, "local_step_clipper": 16},
}


def read_optimizer(
    kind: str, params: Mapping[str, Any], axis: str | tuple[str, ...]
) -> tuple[Callable[[Rate], optim.GradientTransformation] | None, float, list[str]]:
    """Returns an optimizer as a function of its rate, the rate in the file, and the problems found.

    Args:
        kind: name of the optimizer, in any case.
        params: arguments of the optimizer.
        axis: axis of the ranks that exchange signs.
    """
    name = kind.lower()
    known = OPTIMIZERS.get(name)
    if known is None:
        return None, 0.0, [f"optimizer.type {kind!r} has no counterpart.{did_you_mean(name, OPTIMIZERS)}"]
    problems = []
    for key, value in params.items():
        if key in _ONLY and value not in _ONLY[key]:
            clip = " Clip by gradient_clipping." if key == "max_grad_norm" else ""
            problems.append(f"optimizer.params.{key} = {value!r} has no counterpart.{clip}")
        elif key not in known and key not in _ONLY and key not in _IDLE:
            problems.append(f"optimizer.params.{key} is not an argument of {kind}.{did_you_mean(key, known)}")
    had = known | {k: v for k, v in params.items() if k in known}
    numbers = {k: v for k, v in had.items() if k not in ("betas", "adam_w_mode", "nesterov")}
    problems += [
        f"optimizer.params.{k} = {v!r} is not a number"
        for k, v in numbers.items()
        if isinstance(v, bool) or not isinstance(v, int | float)
    ]
    betas = had.get("betas", (0.9, 0.999))
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        problems.append(f"optimizer.params.betas = {betas!r} is not a pair")
    if had.get("dampening"):
        problems.append(f"optimizer.params.dampening = {had['dampening']!r} has no counterpart.")
    if problems:
        return None, 0.0, problems
    return (lambda rate: _make_optimizer(name, had, rate, axis)), float(had["lr"]), []


def _make_optimizer(
    name: str, had: Mapping[str, Any], rate: Rate, axis: str | tuple[str, ...]
) -> optim.GradientTransformation:
    decay = had["weight_decay"]
    if name == "sgd":
        return optim.sgd(rate, momentum=had["momentum"] or None, nesterov=had["nesterov"], weight_decay=decay)
    b1, b2 = had["betas"]
    if name == "lion":
        return optim.lion(rate, b1, b2, weight_decay=decay)
    eps = had["eps"]
    if name in ("adam", "adamw"):
        if name == "adamw" or had["adam_w_mode"]:
            return optim.adamw(rate, b1, b2, eps, weight_decay=decay)
        rule = optim.adam(rate, b1, b2, eps)  # the decay is a part of the gradient
        return optim.chain(optim.add_decayed_weights(decay), rule) if decay else rule
    rest = {k: v for k, v in had.items() if k not in (*_ADAM, "adam_w_mode")}
    if name == "lamb":
        return optim.lamb(rate, b1, b2, eps, decay, **rest)
    rule = {"onebitadam": optim.onebit_adam, "onebitlamb": optim.onebit_lamb, "zerooneadam": optim.zero_one_adam}[name]
    if name != "zerooneadam":
        rest["bias_correction"] = False  # DeepSpeed accepts the argument, and never uses it
    return rule(rate, b1, b2, eps, decay, axis=axis, **rest)


# Arguments and defaults; `...` marks required arguments.
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


def read_schedule(kind: str, params: Mapping[str, Any], lr: float) -> tuple[Schedule | None, list[str]]:
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
        f"scheduler.params.{k} is not an argument of {kind}.{did_you_mean(k, known)}"
        for k in params
        if k not in known and k != "last_batch_iteration"
    ]
    had = known | dict(params)
    problems += [f"scheduler.params.{k} is missing, which {kind} needs" for k, x in had.items() if x is ...]
    for k, x in had.items():
        if k.endswith(("_steps", "_size")) and x is not ... and (not isinstance(x, int) or x < 1):
            problems.append(f"scheduler.params.{k} = {x!r} is not a number of steps")
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


def _delay_schedule(first: float, at: Callable[[Tensor], Tensor]) -> Schedule:
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

    return _delay_schedule(low, rate_at)


def _cosine_rate(had: Mapping[str, Any], lr: float) -> Schedule:
    steps, part = _read_warmup(had)
    low, least, total = had["warmup_min_ratio"], had["cos_min_ratio"], max(1, had["total_num_steps"] - steps)

    def rate_at(k: Tensor) -> Tensor:
        wave = (1 + torch.cos(math.pi * ((k - steps + 1) / total).clamp(max=1))) / 2
        return lr * torch.where(k < steps, low + (1 - low) * part(k), (least + (1 - least) * wave).clamp(min=0))

    return _delay_schedule(0.0, rate_at)


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
