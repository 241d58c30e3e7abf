"""Covers optimizers that average for themselves beside experts on an axis of the batch: along the other axes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, optim
from shardfn.collectives import identity
from shardfn.testing import distributed

EXPERTS, WIDTH, STEPS = 4, 5, 5
RULES: dict[str, Callable[..., Any]] = {
    "onebit_adam": lambda axis, **how: optim.onebit_adam(1e-2, freeze_step=2, axis=axis, **how),
    "onebit_lamb": lambda axis, **how: optim.onebit_lamb(1e-2, freeze_step=2, axis=axis, **how),
    "zero_one_adam": lambda axis, **how: optim.zero_one_adam(
        1e-2, var_freeze_step=2, local_step_clipper=1, axis=axis, **how
    ),
}


def _loss(p: dict, x: Tensor) -> Tensor:
    """Each rank has as many rows for each expert; they go to it and come back."""
    h = torch.tanh(x @ p["dense"])
    rows = sf.all_to_all(h, "ep", split_dim=0, concat_dim=0)
    rows = (rows.view(-1, len(p["experts"]), WIDTH) * p["experts"]).view(-1, WIDTH)
    return sf.all_to_all(rows, "ep", split_dim=0, concat_dim=0).square().mean()


def _params() -> dict:
    draw = torch.Generator().manual_seed(0)
    return {n: torch.randn(rows, WIDTH, generator=draw) for n, rows in (("dense", WIDTH), ("experts", EXPERTS))}


def _batch(n: int) -> Tensor:
    """A row for each expert, four times."""
    return torch.randn(4 * EXPERTS, WIDTH, generator=torch.Generator().manual_seed(n))


def _trained(mesh: sf.Mesh, tx: Any, stage: int, mode: Any = lambda f: f) -> list[dict]:
    zero = sf.Zero(stage, axis="ep", persist_elements=0)
    step = sf.sharded_step(
        mode(_loss), tx, mesh=mesh, specs={"dense": P(), "experts": P("ep")}, batch=P(("dp", "ep")), zero=zero
    )
    state, out = step.init(_params()), []
    for n in range(STEPS):
        state, _ = step(state, _batch(n).chunk(mesh.size)[mesh.rank])
        out.append(sf.unshard(state.params))
    return out


@pytest.mark.parametrize("rule", list(RULES))
def test_without_compression_it_has_the_steps_of_one_device(rule: str) -> None:
    alone: list[Any] = _on_one(rule)[0]
    for sizes in ({"dp": 2, "ep": 1}, {"dp": 2, "ep": 2}):
        _on_ranks(rule, sizes, alone, world=sizes["dp"] * sizes["ep"])


@distributed(world=1)
def _on_one(rule: str) -> list[dict]:
    mesh = sf.make_mesh({"dp": 1, "ep": 1})
    return _trained(mesh, RULES[rule](("dp", "ep"), compressor=identity()), 0)


@distributed(world=[2, 4], timeout=120)
def _on_ranks(rule: str, sizes: dict, alone: list[dict], world: int) -> None:
    mesh = sf.make_mesh(sizes)
    for stage in (0, 3):
        found = _trained(mesh, RULES[rule]("dp", compressor=identity()), stage)
        for n, (got, want) in enumerate(zip(found, alone, strict=True)):
            for name, x in want.items():
                torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-6, msg=f"{sizes} stage {stage}: {name} {n}")


@distributed(world=4, timeout=120)
def test_with_one_bit_eager_and_captured_steps_are_the_same() -> None:
    mesh = sf.make_mesh({"dp": 2, "ep": 2})
    for rule in RULES.values():
        eager = _trained(mesh, rule("dp"), 3)
        graph = _trained(mesh, rule("dp"), 3, lambda f: sf.jit(f, backend="graph"))
        for a, b in zip(eager, graph, strict=True):
            assert all(torch.equal(a[k], b[k]) for k in a)
        assert not torch.equal(eager[-1]["experts"], eager[-2]["experts"])


def _linear(p: dict, x: Tensor) -> Tensor:
    """Its gradients depend on the rows alone, and sums of small integers over powers of two are exact."""
    rows = sf.all_to_all(x, "ep", split_dim=0, concat_dim=0).view(-1, len(p["experts"]), 8)
    return (x * p["dense"]).mean() + (rows * p["experts"]).sum() / x.numel()


def _linear_apart(p: dict, x: Tensor) -> Tensor:
    """The same, of the rows of all ranks along "ep", with each rank's experts in a leaf of their own."""
    experts = torch.cat([p["experts 0"], p["experts 1"]])
    return (x * p["dense"]).mean() + (x.view(-1, EXPERTS, 8) * experts).sum() / x.numel()


def _integers(n: int) -> Tensor:
    return torch.randint(-8, 9, (4 * EXPERTS, 8), generator=torch.Generator().manual_seed(n)).float()


def _states(rule: str, loss: Any, params: dict, mesh: sf.Mesh, specs: Any, batch: P, stage: int) -> dict:
    zero = sf.Zero(stage, axis="dp", persist_elements=0)
    step = sf.sharded_step(loss, RULES[rule]("dp"), mesh=mesh, specs=specs, batch=batch, zero=zero)
    state = step.init(params)
    for n in range(STEPS):
        state, _ = step(state, _integers(n).chunk(mesh.size)[mesh.rank])
    return sf.unshard(state.params)


@pytest.mark.parametrize("rule", ["onebit_adam", "zero_one_adam"])
def test_with_one_bit_each_rank_s_experts_are_as_leaves_of_their_own(rule: str) -> None:
    want: list[Any] = _apart(rule)
    _together(rule, want[0])


@distributed(world=2)
def _apart(rule: str) -> dict:
    ones = {"dense": torch.ones(8), "experts 0": torch.ones(2, 8), "experts 1": torch.ones(2, 8)}
    return _states(rule, _linear_apart, ones, sf.make_mesh({"dp": 2}), P(), P("dp"), 0)


@distributed(world=4)
def _together(rule: str, want: dict) -> None:
    ones, mesh = {"dense": torch.ones(8), "experts": torch.ones(EXPERTS, 8)}, sf.make_mesh({"dp": 2, "ep": 2})
    # Along the axis of the mean, as rows along another are compressed apart; `zero_one_adam` keeps whole leaves.
    for stage in (0, 3) if rule == "onebit_adam" else (0,):
        got = _states(rule, _linear, ones, mesh, {"dense": P(), "experts": P("ep")}, P(("dp", "ep")), stage)
        assert torch.equal(got["dense"], want["dense"]), stage
        assert torch.equal(got["experts"], torch.cat([want["experts 0"], want["experts 1"]])), stage


def test_an_axis_that_cuts_experts_is_refused_with_the_one_to_pass() -> None:
    specs = {"dense": P(), "experts": P("ep")}
    mesh = sf.make_mesh({"dp": 2, "ep": 2}, abstract=True)
    for rule in RULES.values():
        for axis in (("dp", "ep"), "ep"):
            step = sf.sharded_step(_loss, rule(axis), mesh=mesh, specs=specs, batch=P(("dp", "ep")))
            with pytest.raises(
                ValueError, match=r"(?s)averages over .* itself.*params\['experts'\].*P\('ep'\)"
            ) as found:
                step.init(_params())
            assert "dense" not in str(found.value)
            assert "the mean of its gradients is over ('dp',) alone" in str(found.value)
            assert "axis='dp'" in str(found.value)
    alone = sf.make_mesh({"ep": 2}, abstract=True)
    with pytest.raises(ValueError, match=r"its gradients have no mean.*or use an optimizer that does not average"):
        sf.sharded_step(_loss, RULES["onebit_adam"]("ep"), mesh=alone, specs=specs, batch=P("ep")).init(_params())
