"""Covers the rules and schedules of optax: values of 300 steps against those that optax gives."""

import json
import os
import pathlib
import runpy
import subprocess
import types
from typing import Any

import numpy as np
import pytest
import torch

from shardfn import optim
from shardfn.core import tree_leaves

PROGRAM = pathlib.Path(__file__).with_name("optax_oracle.py")
oracle: Any = types.SimpleNamespace(**runpy.run_path(str(PROGRAM)))
GOLDENS = json.loads(oracle.GOLDENS.read_text())


def trained(name: str, steps: int, *, in_place: bool) -> list[torch.Tensor]:
    """The parameters after the steps that the oracle shows."""
    tx = oracle.form(name, "shardfn")(optim)
    params: Any = {k: torch.from_numpy(np.array(v)) for k, v in oracle.first().items()}
    state, shown, step_in_place, num_estimates = tx.init(params), [], optim.inplace(tx), 0
    for step in range(steps):
        rows = oracle.gradients({k: p.numpy() for k, p in params.items()}, step)
        grads = {k: torch.from_numpy(np.array(g)) for k, g in rows.items()}
        if in_place:
            params, state = step_in_place(grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = optim.apply_updates(params, updates)
        if isinstance(state, optim.SophiaState) and optim.is_hessian_step(state):
            before = [x.clone() for x in tree_leaves(params)]
            grads = {k: torch.from_numpy(g) for k, g in oracle.sampled(num_estimates).items()}
            updates, state = tx.update(grads, state, params)
            params, num_estimates = optim.apply_updates(params, updates), num_estimates + 1
            assert all(map(torch.equal, before, tree_leaves(params)))
        if step + 1 in oracle.SHOWN:
            shown.append(torch.cat([x.clone().reshape(-1) for x in tree_leaves(params)]))
    return shown


def compare(got: list[torch.Tensor], want: list[list[float]]) -> None:
    for a, b in zip(got, want, strict=False):
        torch.testing.assert_close(a, torch.tensor(b, dtype=torch.float64), rtol=1e-9, atol=1e-10)


@pytest.mark.day(4)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(oracle.RULES)]
)
def test_first_steps_are_those_of_optax(name: str) -> None:
    for in_place in (False, True):
        compare(trained(name, oracle.SHOWN[0], in_place=in_place), GOLDENS["rules"][name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", oracle.RULES)
def test_300_steps_are_those_of_optax(name: str) -> None:
    for in_place in (False, True):
        compare(trained(name, oracle.STEPS, in_place=in_place), GOLDENS["rules"][name])


@pytest.mark.nightly
def test_the_values_are_those_that_optax_gives_now(jax_python: str) -> None:
    run = subprocess.run([jax_python, str(PROGRAM)], env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    values = json.loads(run.stdout)
    assert values["rules"].keys() == GOLDENS["rules"].keys()
    for kind in ("rules", "schedules"):
        for name, rows in values[kind].items():
            np.testing.assert_allclose(rows, GOLDENS[kind][name], rtol=1e-9, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(oracle.SCHEDULES)]
)
def test_schedules_have_the_values_of_optax(name: str) -> None:
    schedule = oracle.SCHEDULES[name](optim)
    rates = [schedule(n).item() for n in oracle.SEEN]
    assert rates == pytest.approx(GOLDENS["schedules"][name], rel=2e-7)
    assert schedule(torch.tensor(oracle.SEEN[7], dtype=torch.int32)).item() == rates[7]
    assert schedule(torch.tensor(3, device="meta")).device.type == "meta"
