"""Makes optax_wrapping.json: where optax's rules lead. Run it with a Python that has jax and optax:

    python tests/optim/optax_wrapping.py > tests/optim/optax_wrapping.json

The parts that the tests use need numpy only.
"""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

STEPS = 300
KEPT = (1, 10, STEPS)
SHAPES = {"w": (4, 3), "v": (3, 5), "u": (6, 6), "b": (5,)}
# Steps at which gradients are not finite, for rules that take it.
BROKEN = (3, 40, 41, 200)


def first() -> dict[str, np.ndarray]:
    """The parameters at the start."""
    draw = np.random.default_rng(0)
    return {k: draw.uniform(0.2, 1.0, shape) for k, shape in SHAPES.items()}


def grad(params: dict[str, np.ndarray], step: int, *, broken: bool = False) -> dict[str, np.ndarray]:
    """The gradient of a quadratic, with a disturbance that never ends."""
    out = {}
    for name, p in params.items():
        place = np.arange(p.size, dtype=np.float64).reshape(p.shape)
        out[name] = np.asarray(p) - 0.1 * np.cos(place) + 0.3 * np.sin(step * 0.7 + place)
        if broken and step in BROKEN:
            out[name] = np.where(place == 1, np.nan, out[name])
    return out


def _cases() -> dict[str, Callable[[], dict[str, Any]]]:
    import optax  # pyright: ignore[reportMissingImports]
    from optax._src import factorized  # pyright: ignore[reportMissingImports]

    # Rates that are small: Newton-Schulz makes a rounding in a small singular value 500 times larger, in each step.
    torch_linear = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    some = {"w": torch_linear, "v": torch_linear, "u": None, "b": None}
    warm = optax.warmup_constant_schedule(0.0, 0.0625, 16)
    average = optax.contrib.schedule_free_eval_params
    free = optax.chain(
        optax.scale_by_rms(0.99, 1e-8, eps_in_sqrt=False, bias_correction=True), optax.scale_by_learning_rate(warm)
    )
    # optax computes this decay in float32 for parameters of any dtype.
    exact = functools.partial(factorized.scale_by_factored_rms, decay_rate_fn=lambda i, e: 1 - (i + 1.0) ** -e)
    factorized.scale_by_factored_rms = exact
    small = {"min_dim_size_to_factor": 3, "decay_rate": 0.7}
    return {
        "adafactor": lambda: run(optax.adafactor(0.05, **small)),
        "adafactor momentum": lambda: run(
            optax.adafactor(
                0.05,
                momentum=0.9,
                weight_decay_rate=0.01,
                multiply_by_parameter_scale=False,
                factored=True,
                **small,
                dtype_momentum="float64",
            )
        ),
        "ema": lambda: run(optax.chain(optax.ema(0.9), optax.scale(-0.1))),
        "if finite": lambda: run(optax.apply_if_finite(optax.adam(0.02), 2), broken=True),
        "nonnegative": lambda: run(optax.chain(optax.adam(0.02), optax.keep_params_nonnegative())),
        "average": lambda: run(averaging(optax.adam(0.02), 0.1), seen=lambda params, state: state[1]),
        "average debiased": lambda: run(debiased(optax.adam(0.02), 0.99), seen=lambda params, state: state[2]),
        "lookahead": lambda: run(optax.lookahead(optax.adam(0.05), 5, 0.5), pairs=True),
        "lookahead reset": lambda: run(optax.lookahead(optax.adam(0.05), 6, 0.3, reset_state=True), pairs=True),
        "schedule free": lambda: run(optax.contrib.schedule_free(optax.sgd(0.1), 0.1)),
        "schedule free average": lambda: run(
            optax.contrib.schedule_free(free, warm, b1=0.95), seen=lambda params, state: average(state, params)
        ),
        "muon": lambda: run(
            optax.contrib.muon(0.005, weight_decay=0.1, nesterov=False, muon_weight_dimension_numbers=some)
        ),
        "muon nesterov": lambda: run(
            optax.contrib.muon(0.005, consistent_rms=0.2, muon_weight_dimension_numbers=torch_linear), only="wvu"
        ),
    }


def averaging(tx: Any, step_size: float) -> Any:
    """A rule that keeps a moving average of the parameters, by optax's `incremental_update`."""
    import jax  # pyright: ignore[reportMissingImports]
    import optax  # pyright: ignore[reportMissingImports]

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, inner = tx.update(grads, state[0], params)
        new = optax.apply_updates(params, updates)
        return updates, (inner, optax.incremental_update(new, state[1], step_size))

    return optax.GradientTransformation(lambda params: (tx.init(params), jax.tree.map(lambda x: x, params)), update)


def debiased(tx: Any, decay: float) -> Any:
    """A rule that keeps a moving average of the parameters without bias, by optax's `ema`."""
    import optax  # pyright: ignore[reportMissingImports]

    rule = optax.ema(decay)

    def init(params: Any) -> Any:
        return tx.init(params), rule.init(params), params

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, inner = tx.update(grads, state[0], params)
        average, own = rule.update(optax.apply_updates(params, updates), state[1])
        return updates, (inner, own, average)

    return optax.GradientTransformation(init, update)


def run(
    tx: Any,
    *,
    pairs: bool = False,
    only: str = "wvub",
    broken: bool = False,
    seen: Callable[[Any, Any], Any] = lambda params, state: params,
) -> Any:
    """Where a rule leads: by step the parameters, fast and slow ones, or the result of `seen`."""
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    import optax  # pyright: ignore[reportMissingImports]

    params = jax.tree.map(jnp.asarray, {k: x for k, x in first().items() if k in only})
    params = optax.LookaheadParams.init_synced(params) if pairs else params
    state, update, out = tx.init(params), jax.jit(tx.update), {}
    for step in range(1, STEPS + 1):
        grads = jax.tree.map(jnp.asarray, grad(params.fast if pairs else params, step, broken=broken))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if step in KEPT:
            found = {f"{k} of {n}": x for n, p in params._asdict().items() for k, x in p.items()} if pairs else None
            out[str(step)] = {k: np.asarray(x).ravel().tolist() for k, x in (found or seen(params, state)).items()}
    return out


if __name__ == "__main__":
    import jax  # pyright: ignore[reportMissingImports]

    jax.config.update("jax_enable_x64", True)
    json.dump({name: make() for name, make in _cases().items()}, sys.stdout, indent=0)
