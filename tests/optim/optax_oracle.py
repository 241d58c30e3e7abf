"""The rules and schedules that equal optax's, and their values over 300 steps as optax computes them.

`python optax_oracle.py` prints the values as JSON, with a Python that has jax and optax; `--write` keeps them beside
this file, where the tests of the day read them.
"""

import json
import math
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

GOLDENS = pathlib.Path(__file__).with_name("optax_goldens.json")
STEPS, SHOWN = 300, (20, 300)
SHAPES = {"s": (), "b": (3,), "w": (3, 2), "k": (2, 1, 3), "c": (1, 2, 2, 2)}
MASK = {"s": False, "b": False, "w": True, "k": True, "c": True}
LABELS = {"s": "slow", "b": "slow", "w": "fast", "k": "fast", "c": "fast"}

# `o` is optax or shardfn.optim. Where defaults differ, the arguments of shardfn are a case's second form.
Rule = Callable[[Any], Any]
RULES: dict[str, Rule | tuple[Rule, Rule]] = {
    "scale": lambda o: o.chain(o.scale_by_adam(), o.scale(-0.01)),
    # Values that float32 has, in which the schedules of shardfn are.
    "scale_by_schedule": lambda o: o.chain(
        o.trace(0.9), o.scale_by_schedule(o.piecewise_constant_schedule(-1 / 64, {10: 2.0, 100: 0.25}))
    ),
    "adam nesterov": lambda o: o.adam(0.01, nesterov=True),
    "adam eps_root": lambda o: o.adam(0.01, 0.8, 0.95, 1e-3, 1e-4),
    "adamw": (lambda o: o.adamw(0.01), lambda o: o.adamw(0.01, weight_decay=1e-4)),
    "adamw all": lambda o: o.adamw(0.01, eps_root=1e-4, weight_decay=0.1, mask=MASK, nesterov=True),
    "nadamw": lambda o: o.nadamw(0.01),
    "radam": lambda o: o.radam(0.01),
    "radam all": lambda o: o.radam(0.01, 0.8, 0.95, 1e-3, 1e-4, 6.0, nesterov=True),
    "rmsprop": lambda o: o.rmsprop(0.01),
    "rmsprop momentum": lambda o: o.rmsprop(0.01, 0.8, 1e-3, 0.5, False, momentum=0.9, nesterov=True),
    "rmsprop centered": lambda o: o.rmsprop(0.01, 0.8, 1e-2, centered=True, momentum=0.5, bias_correction=True),
    "rmsprop bias_correction": lambda o: o.rmsprop(0.01, eps_in_sqrt=False, bias_correction=True),
    "adagrad": lambda o: o.adagrad(0.1),
    "adagrad all": lambda o: o.adagrad(0.1, 0.0, 1e-3),
    "lamb": (lambda o: o.lamb(0.01), lambda o: _lamb(o, eps=1e-6)),
    "lamb all": (
        lambda o: o.lamb(0.01, 0.8, 0.95, 1e-3, 1e-4, 0.1, MASK),
        lambda o: _lamb(o, b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-4, weight_decay=0.1, mask=MASK),
    ),
    "lars": lambda o: o.lars(1.0),
    "lars all": lambda o: o.lars(1.0, 0.1, MASK, 0.01, 1e-3, MASK, 0.8, True),
    "trust_ratio": (
        lambda o: o.chain(o.scale_by_trust_ratio(0.1, 0.5, 1e-2), o.scale(-0.01)),
        lambda o: o.chain(
            o.scale_by_trust_ratio(0.0, math.inf, min_norm=0.1, trust_coefficient=0.5, eps=1e-2), o.scale(-0.01)
        ),
    ),
    "clip_by_block_rms": lambda o: o.chain(o.clip_by_block_rms(0.3), o.sgd(0.1, momentum=0.9)),
    "adaptive_grad_clip": lambda o: o.chain(o.adaptive_grad_clip(0.3), o.sgd(0.1)),
    "adaptive_grad_clip axis": lambda o: o.chain(
        o.masked(o.adaptive_grad_clip(0.3, 0.1, (1, -1)), {**MASK, "w": False}), o.sgd(0.1)
    ),
    "partition": lambda o: o.partition({"slow": o.sgd(0.01), "fast": o.rmsprop(0.01)}, LABELS),
    "ademamix": lambda o: contrib(o).ademamix(0.01),
    "ademamix all": lambda o: contrib(o).ademamix(
        0.01,
        0.8,
        0.95,
        o.piecewise_constant_schedule(0.875, {50: 1.125}),
        o.piecewise_constant_schedule(1.0, {20: 4.0}),
        1e-3,
        1e-4,
        weight_decay=0.1,
        mask=MASK,
    ),
    "adopt": lambda o: contrib(o).adopt(0.01),
    "adopt all": (
        lambda o: o.contrib.adopt(0.01, 0.8, 0.95, 1e-3, nesterov=True, use_clipping=False),
        lambda o: o.adopt(0.01, 0.8, 0.95, 1e-3, nesterov=True, clip_value_fn=None),
    ),
    "prodigy": lambda o: contrib(o).prodigy(),
    "prodigy all": lambda o: contrib(o).prodigy(
        o.piecewise_constant_schedule(1.0, {30: 0.5}), (0.8, 0.95), 0.9, 1e-3, 1e-3, 0.5, 0.1, True
    ),
    "sam": (
        lambda o: o.contrib.sam(o.adam(0.01), o.chain(o.contrib.normalize(), o.sgd(0.05))),
        lambda o: o.sam(o.adam(0.01), 0.05),
    ),
    "sophia": (lambda o: _sophia(o.contrib, 10), lambda o: o.sophia(0.01)),
    "sophia all": (
        lambda o: _sophia(
            o.contrib, 3, 0.8, 0.9, 1e-3, 0.1, weight_decay_mask=MASK, gamma=0.5, clip_threshold=0.5, update_interval=3
        ),
        lambda o: o.sophia(
            0.01, 0.8, 0.9, 1e-3, 0.1, MASK, gamma=0.5, clip_threshold=0.5, update_interval=3, num_samples=4
        ),
    ),
    "galore": (
        lambda o: o.contrib.galore(0.01, 1, 1000, 0.5, weight_decay=0.1, mask=MASK),
        lambda o: o.galore(0.01, 1, 1000, 0.5, weight_decay=0.1, mask=MASK),
    ),
    "named_chain": lambda o: o.named_chain(("clip", o.clip_by_block_rms(0.5)), ("step", o.radam(0.01))),
}
SCHEDULES: dict[str, Rule] = {
    "exponential_decay": lambda o: o.exponential_decay(0.1, 20, 0.7, 30, end_value=0.003),
    "exponential_decay staircase": lambda o: o.exponential_decay(0.1, 20, 1.2, 30, True, 0.9),
    "polynomial_schedule": lambda o: o.polynomial_schedule(0.1, 0.003, 1.7, 150, 30),
    "piecewise_constant_schedule": lambda o: o.piecewise_constant_schedule(0.1, {200: 0.5, 50: 0.1, 51: 3.0}),
    "sgdr_schedule": lambda o: o.sgdr_schedule(
        [
            {"init_value": 0.0, "peak_value": 0.1, "warmup_steps": 10, "decay_steps": 60},
            {"init_value": 0.0, "peak_value": 0.2, "warmup_steps": 0, "decay_steps": 90, "end_value": 0.01},
            {"init_value": 0.01, "peak_value": 0.05, "warmup_steps": 5, "decay_steps": 100, "exponent": 2.0},
        ]
    ),
    "linear_onecycle_schedule": lambda o: o.linear_onecycle_schedule(250, 0.1),
    "linear_onecycle_schedule all": lambda o: o.linear_onecycle_schedule(101, 0.1, 0.0, 0.5, 10.0, 20.0),
    "cosine_onecycle_schedule": lambda o: o.cosine_onecycle_schedule(250, 0.1),
    "cosine_onecycle_schedule all": lambda o: o.cosine_onecycle_schedule(101, 0.1, 0.55, 10.0, 20.0),
}
SEEN = (0, 1, 9, 10, 29, 30, 31, 49, 50, 51, 60, 75, 89, 90, 101, 149, 150, 155, 199, 200, 211, 212, 249, 250, 299)


def _lamb(o: Any, **more: Any) -> Any:
    """optax's LAMB by the arguments of shardfn's."""
    return o.lamb(0.01, bias_correction="moments", min_coeff=0.0, max_coeff=math.inf, **more)


def contrib(o: Any) -> Any:
    """The rules that optax keeps in a room of their own."""
    return getattr(o, "contrib", o)


def sampled(n: int) -> dict[str, np.ndarray]:
    """The n-th gradient of a sampled loss, for Sophia."""
    return {k: np.cos(0.7 * n + np.arange(math.prod(s)) + len(k)).reshape(s) for k, s in SHAPES.items()}


def _sophia(c: Any, interval: int, *args: Any, **more: Any) -> Any:
    """optax's Sophia, with the estimates of shardfn's test."""
    import jax  # pyright: ignore[reportMissingImports]
    import optax  # pyright: ignore[reportMissingImports]

    num = 1 if interval == 10 else 4
    table = {k: jax.numpy.stack([num * sampled(n)[k] ** 2 for n in range(STEPS)]) for k in SHAPES}

    def update(grads: Any, n: Any, params: Any = None) -> Any:
        del grads, params
        return {k: x[n] for k, x in table.items()}, n + 1

    by = optax.GradientTransformation(lambda params: jax.numpy.zeros([], jax.numpy.int32), update)
    return c.sophia(0.01, *args, hessian_diagonal_fn=by, **more)


def form(name: str, package: str) -> Rule:
    """A rule as one of the two packages writes it."""
    rule = RULES[name]
    return rule[package != "optax"] if isinstance(rule, tuple) else rule


def first() -> dict[str, np.ndarray]:
    """The parameters before the first step."""
    return {k: 0.5 + np.sin(np.arange(math.prod(s)) + len(k)).reshape(s) for k, s in SHAPES.items()}


def gradients(params: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
    """The gradients of a bowl, with a disturbance that depends on the step."""
    out = {}
    for i, (k, p) in enumerate(sorted(params.items())):
        n = np.arange(p.size).reshape(p.shape)
        out[k] = (0.1 + 0.05 * n) * p + np.sin(1.3 * step + 2.1 * n + i) / (1 + 0.02 * step)
    return out


def trained(name: str) -> list[list[float]]:
    """The parameters after some steps, by optax."""
    import jax  # pyright: ignore[reportMissingImports]
    import optax  # pyright: ignore[reportMissingImports]

    tx, params = form(name, "optax")(optax), {k: jax.numpy.asarray(v) for k, v in first().items()}
    state, update, shown = tx.init(params), jax.jit(tx.update), []
    for step in range(STEPS):
        grads = gradients({k: np.asarray(v) for k, v in params.items()}, step)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if step + 1 in SHOWN:
            shown.append([_rounded(x) for k in sorted(params) for x in np.asarray(params[k]).reshape(-1).tolist()])
    return shown


def oracle() -> dict[str, Any]:
    """All values, by optax in float64."""
    import jax  # pyright: ignore[reportMissingImports]
    import optax  # pyright: ignore[reportMissingImports]

    jax.config.update("jax_enable_x64", True)
    # GaLore decomposes float32, whatever the gradients are. Here it is to be as exact as the other rules.
    module: Any = sys.modules["optax.contrib._galore"]
    module.jnp = types.SimpleNamespace(**{**vars(jax.numpy), "float32": jax.numpy.float64})
    rates = {name: [_rounded(float(make(optax)(n))) for n in SEEN] for name, make in SCHEDULES.items()}
    return {"optax": optax.__version__, "rules": {name: trained(name) for name in RULES}, "schedules": rates}


def _rounded(x: float) -> float:
    return float(f"{x:.12g}")


if __name__ == "__main__":
    lines = [f'"optax": {json.dumps((values := oracle())["optax"])}']
    for kind in ("rules", "schedules"):
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in values[kind].items())
        lines.append(f'"{kind}": {{\n{rows}\n}}')
    text = "{" + ",\n".join(lines) + "}\n"
    if "--write" in sys.argv[1:]:
        GOLDENS.write_text(text)
    else:
        print(text)
