"""DeepSpeed's optimizers, by the names in the configuration."""

from collections.abc import Callable, Mapping
from typing import Any

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


def optimizer_of(
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
            problems.append(f"optimizer.params.{key} is no argument of {kind}.{did_you_mean(key, known)}")
    had = known | {k: v for k, v in params.items() if k in known}
    numbers = {k: v for k, v in had.items() if k not in ("betas", "adam_w_mode", "nesterov")}
    problems += [
        f"optimizer.params.{k} = {v!r} is no number"
        for k, v in numbers.items()
        if isinstance(v, bool) or not isinstance(v, int | float)
    ]
    betas = had.get("betas", (0.9, 0.999))
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        problems.append(f"optimizer.params.betas = {betas!r} is no pair")
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
