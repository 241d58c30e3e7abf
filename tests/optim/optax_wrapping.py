"""Makes optax_wrapping.json: where optax's rules lead. Run it with a Python that has jax and optax:

    python tests/optim/optax_wrapping.py > tests/optim/optax_wrapping.json

What the tests share with it needs numpy only.
"""

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

    # Rates that are small: Newton-Schulz makes a rounding in a small singular value 500 times larger, in each step.
    torch_linear = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    some = {"w": torch_linear, "v": torch_linear, "u": None, "b": None}
    return {
        "muon": lambda: run(
            optax.contrib.muon(0.005, weight_decay=0.1, nesterov=False, muon_weight_dimension_numbers=some)
        ),
        "muon nesterov": lambda: run(
            optax.contrib.muon(0.005, consistent_rms=0.2, muon_weight_dimension_numbers=torch_linear), only="wvu"
        ),
    }


def run(
    tx: Any,
    *,
    only: str = "wvub",
    broken: bool = False,
    seen: Callable[[Any, Any], Any] = lambda params, state: params,
) -> Any:
    """Where a rule leads: by step the parameters, or what `seen` makes of them."""
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    import optax  # pyright: ignore[reportMissingImports]

    params = jax.tree.map(jnp.asarray, {k: x for k, x in first().items() if k in only})
    state, update, out = tx.init(params), jax.jit(tx.update), {}
    for step in range(1, STEPS + 1):
        grads = jax.tree.map(jnp.asarray, grad(params, step, broken=broken))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if step in KEPT:
            out[str(step)] = {k: np.asarray(x).ravel().tolist() for k, x in seen(params, state).items()}
    return out


if __name__ == "__main__":
    import jax  # pyright: ignore[reportMissingImports]

    jax.config.update("jax_enable_x64", True)
    json.dump({name: make() for name, make in _cases().items()}, sys.stdout, indent=0)
