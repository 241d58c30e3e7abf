"""Covers rules of matrices and rules around others against optax: its results as committed, and of a run."""

import functools
import json
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardfn import optim
from shardfn.core import tree_map

from . import optax_wrapping as oracle

HERE = pathlib.Path(__file__).parent
GOLDENS = json.loads((HERE / "optax_wrapping.json").read_text())


def run(tx: Any, *, only: str = "wvub", broken: bool = False, seen: Callable[[Any, Any], Any] | None = None) -> Any:
    """The values that `optax_wrapping.run` returns, for a rule of ours."""
    params: Any = {k: torch.from_numpy(x) for k, x in oracle.first().items() if k in only}
    state, step_in_place, out = tx.init(params), optim.inplace(tx), {}
    for step in range(1, oracle.STEPS + 1):
        values = {k: x.numpy() for k, x in params.items()}
        grads = tree_map(torch.from_numpy, oracle.grad(values, step, broken=broken))
        if step % 2:
            updates, state = tx.update(grads, state, params)
            params = optim.apply_updates(params, updates)
        else:
            params, state = step_in_place(grads, state, params)
        if step in oracle.KEPT:
            found: dict[str, Tensor] = params if seen is None else seen(params, state)
            out[str(step)] = {k: x.flatten().tolist() for k, x in found.items()}
    return out


def fast_and_slow(params: Any, state: Any) -> Any:
    return {f"{k} of {n}": x for n, p in (("fast", params), ("slow", state.slow)) for k, x in p.items()}


SOME = {"w": True, "v": True, "u": False, "b": False}
# Rates that float32 has exactly, as schedules are float32 here.
WARM = optim.warmup_constant_schedule(0.0, 0.0625, 16)
SMALL: Any = {"min_dim_size_to_factor": 3, "decay_rate": 0.7}
OURS: dict[str, Callable[[], Any]] = {
    "adafactor": lambda: run(optim.adafactor(0.05, **SMALL)),
    "adafactor momentum": lambda: run(
        optim.adafactor(
            0.05,
            momentum=0.9,
            weight_decay_rate=0.01,
            multiply_by_parameter_scale=False,
            **SMALL,
        )
    ),
    "ema": lambda: run(optim.chain(optim.ema(0.9), optim.scale_by_learning_rate(0.1))),
    "if finite": lambda: run(optim.apply_if_finite(optim.adam(0.02), 2), broken=True),
    "nonnegative": lambda: run(optim.chain(optim.adam(0.02), optim.keep_params_nonnegative())),
    "average": lambda: run(optim.average_params(optim.adam(0.02), 0.9), seen=lambda params, state: state.average),
    "average debiased": lambda: run(
        optim.average_params(optim.adam(0.02), 0.99, debias=True), seen=lambda params, state: state.average
    ),
    "lookahead": lambda: run(optim.lookahead(optim.adam(0.05), 5, 0.5), seen=fast_and_slow),
    "lookahead reset": lambda: run(optim.lookahead(optim.adam(0.05), 6, 0.3, reset_state=True), seen=fast_and_slow),
    "schedule free": lambda: run(optim.schedule_free(optim.sgd(0.1), 0.1)),
    "schedule free average": lambda: run(
        optim.schedule_free(optim.adam(WARM, b1=0.0, b2=0.99), WARM, b1=0.95),
        seen=lambda params, state: optim.schedule_free_eval_params(state, params),
    ),
    "muon": lambda: run(optim.muon(0.005, optim.adam(0.005), SOME, nesterov=False, weight_decay=0.1)),
    "muon nesterov": lambda: run(optim.muon(0.005, consistent_rms=0.2), only="wvu"),
}


def compare(got: Any, want: Any) -> None:
    for step, leaves in want.items():
        for name, x in leaves.items():
            np.testing.assert_allclose(got[step][name], x, rtol=1e-9, atol=1e-10, err_msg=f"{name} at step {step}")


@pytest.mark.day("schedule free")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(OURS)]
)
def test_300_steps_lead_where_optax_led(name: str) -> None:
    compare(OURS[name](), GOLDENS[name])


@functools.cache
def fresh(python: str) -> Any:
    script = str(HERE / "optax_wrapping.py")
    return json.loads(subprocess.run([python, script], capture_output=True, check=True, text=True).stdout)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OURS)
def test_300_steps_lead_where_optax_leads(name: str, jax_python: str) -> None:
    compare(OURS[name](), fresh(jax_python)[name])


def test_every_golden_has_a_rule() -> None:
    assert GOLDENS.keys() == OURS.keys()
