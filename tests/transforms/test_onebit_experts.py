"""Covers optimizers that average for themselves beside experts on an axis of the batch: each leaf over its own axes."""

import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, checkpoint, optim
from shardfn.collectives import identity
from shardfn.core import tree_leaves
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


@pytest.mark.nightly
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
    for axis, stage in itertools.product(("dp", "ep", ("dp", "ep")), (0, 3)):
        if (rule == "zero_one_adam" and stage == 3 and axis != "dp") or (axis == "ep" and sizes["ep"] == 1):
            continue  # it keeps whole leaves along the axes of the mean; nothing is averaged along one rank
        found = _trained(mesh, RULES[rule](axis, compressor=identity()), stage)
        for n, (got, want) in enumerate(zip(found, alone, strict=True)):
            for name, x in want.items():
                where = f"{sizes} over {axis} at stage {stage}: {name} {n}"
                torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-6, msg=where)


@distributed(world=4, timeout=120)
def _as_captured(axis: Any, stage: int) -> None:
    mesh = sf.make_mesh({"dp": 2, "ep": 2})
    for rule in RULES.values():
        eager = _trained(mesh, rule(axis), stage)
        graph = _trained(mesh, rule(axis), stage, lambda f: sf.jit(f, backend="graph"))
        for a, b in zip(eager, graph, strict=True):
            assert all(torch.equal(a[k], b[k]) for k in a)
        assert not torch.equal(eager[-1]["experts"], eager[-2]["experts"])


@pytest.mark.nightly
@pytest.mark.parametrize("axis, stage", [("dp", 3), (("dp", "ep"), 0)])
def test_with_one_bit_eager_and_captured_steps_are_the_same(axis: Any, stage: int) -> None:
    _as_captured(axis, stage)


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


def _states(
    tx: Any, loss: Any, params: dict, mesh: sf.Mesh, specs: Any, batch: P, stage: int, rows: int = 4 * EXPERTS
) -> tuple[dict, list[Tensor]]:
    """The last parameters, and the norms of the gradient."""
    zero = sf.Zero(stage, axis=mesh.axes(batch.axes), persist_elements=0)
    step = sf.sharded_step(loss, tx, mesh=mesh, specs=specs, batch=batch, zero=zero)
    state, norms = step.init(params), []
    for n in range(STEPS):
        state, metrics = step(state, _integers(n)[:rows].chunk(mesh.size)[mesh.rank])
        norms.append(metrics["grad_norm"])
    return sf.unshard(state.params), norms


@pytest.mark.day("zero_one_adam")
@pytest.mark.parametrize("rule", ["onebit_adam", "zero_one_adam"])
def test_with_one_bit_each_rank_s_experts_are_as_leaves_of_their_own(rule: str) -> None:
    dense: list[Any] = _dense(rule)
    experts: list[Any] = _apart(rule)
    _together(rule, dense[0], experts[0])


@distributed(world=4)
def _dense(rule: str) -> list[dict]:
    """The dense leaf alone, averaged exactly along "ep", or with one bit over all ranks."""
    mesh, ones = sf.make_mesh({"dp": 2, "ep": 2}), {"dense": torch.ones(8)}
    tried = [RULES[rule](axis) for axis in ("dp", ("dp", "ep"))]
    return [_states(tx, lambda p, x: (x * p["dense"]).mean(), ones, mesh, P(), P(("dp", "ep")), 0)[0] for tx in tried]


@distributed(world=2)
def _apart(rule: str) -> dict:
    ones = {"dense": torch.ones(8), "experts 0": torch.ones(2, 8), "experts 1": torch.ones(2, 8)}
    return _states(RULES[rule]("dp"), _linear_apart, ones, sf.make_mesh({"dp": 2}), P(), P("dp"), 0)[0]


@distributed(world=4)
def _together(rule: str, dense: list[dict], experts: dict) -> None:
    ones, mesh = {"dense": torch.ones(8), "experts": torch.ones(EXPERTS, 8)}, sf.make_mesh({"dp": 2, "ep": 2})
    specs, batch = {"dense": P(), "experts": P("ep")}, P(("dp", "ep"))
    for i, axis in enumerate(("dp", ("dp", "ep"))):
        # Rows along an axis that is not the mean's are compressed apart; `zero_one_adam` keeps whole leaves.
        for stage in (0, 3) if rule == "onebit_adam" and i else (0,):
            got, norms = _states(RULES[rule](axis), _linear, ones, mesh, specs, batch, stage)
            assert torch.equal(got["dense"], dense[i]["dense"]), (axis, stage)
            assert torch.equal(got["experts"], torch.cat([experts["experts 0"], experts["experts 1"]])), (axis, stage)
            torch.testing.assert_close(norms[-1], _norm_of_means(_integers(STEPS - 1), over_all=bool(i)))


def _norm_of_means(x: Tensor, *, over_all: bool) -> Tensor:
    """The root of the mean, over ranks that average, of the squares of their gradients of `_linear`."""
    by_rank = x.view(2, 2, EXPERTS, 8)
    dense = by_rank.mean(2) / 8
    experts = by_rank.view(2, 2, EXPERTS, 8).sum(1) / x[: 2 * EXPERTS].numel()
    squares = (dense if over_all else dense.mean(1)).square().sum(-1).mean() + experts.square().sum((1, 2)).mean()
    return squares.sqrt()


@distributed(world=1)
def _uncompressed(rule: str) -> Tensor:
    ones, mesh = {"dense": torch.ones(8), "experts": torch.ones(EXPERTS, 8)}, sf.make_mesh({"ep": 1})
    tx = RULES[rule]("ep", compressor=identity())
    return _states(tx, _linear, ones, mesh, P(), P("ep"), 0, rows=2 * EXPERTS)[0]["experts"]


@distributed(world=2)
def _compressed(rule: str, want: Tensor) -> None:
    ones, mesh = {"dense": torch.ones(8), "experts": torch.ones(EXPERTS, 8)}, sf.make_mesh({"ep": 2})
    specs = {"dense": P(), "experts": P("ep")}
    got, _ = _states(RULES[rule]("ep"), _linear, ones, mesh, specs, P("ep"), 0, rows=2 * EXPERTS)
    torch.testing.assert_close(got["experts"], want, rtol=1e-6 if rule == "onebit_lamb" else 0, atol=0)


@pytest.mark.day("zero_one_adam")
@pytest.mark.parametrize("rule", list(RULES))
def test_experts_cut_along_all_axes_of_the_mean_are_not_rounded(rule: str) -> None:
    [want] = _uncompressed(rule)
    _compressed(rule, want)


def _step_over(sizes: dict, stage: int) -> tuple[Any, Any]:
    mesh = sf.make_mesh(sizes, device="cpu")
    zero = sf.Zero(stage, axis=("dp", "ep"), persist_elements=0)
    specs, batch = {"dense": P(), "experts": P("ep")}, P(("dp", "ep"))
    tx = RULES["onebit_adam"](("dp", "ep"))
    step = sf.sharded_step(_loss, tx, mesh=mesh, specs=specs, batch=batch, zero=zero)
    return step, step.init(_params())


def _gone_on(step: Any, state: Any) -> Any:
    for n in (4, 5):
        state, _ = step(state, _batch(n).chunk(step.mesh.size)[step.mesh.rank])
    return state


@distributed(world=4, timeout=120)
def _saved(directory: pathlib.Path) -> None:
    step, state = _step_over({"dp": 2, "ep": 2}, 1)
    for n in range(4):
        state, _ = step(state, _batch(n).chunk(4)[step.mesh.rank])
    checkpoint.save(directory / "four", state, 0)
    old, after = sf.unshard(state), sf.unshard(_gone_on(step, state))
    again = checkpoint.restore(directory / "four", step.init(_params())).tree
    for a, b in zip(tree_leaves(sf.unshard(_gone_on(step, again))), tree_leaves(after), strict=True):
        assert torch.equal(a, b)
    # Four ranks share the dense leaf's errors, two each expert's; elsewhere the sums that are owed stay.
    shapes = {name: tuple(r.worker.shape) for name, r in old.opt_state.residual.items()}
    assert shapes == {"dense": (4, 32), "experts": (2, 32)}
    for sizes in ({"dp": 4, "ep": 1}, {"dp": 1, "ep": 4}):
        other, like = _step_over(sizes, 1)
        state = checkpoint.restore(directory / "four", like).tree
        new = sf.unshard(state)
        for name, size in (("dense", WIDTH * WIDTH), ("experts", EXPERTS * WIDTH)):
            was, now = (_owed(x.opt_state.residual[name], size, blocks) for x, blocks in ((old, 2), (new, sizes["ep"])))
            torch.testing.assert_close(now, was, rtol=1e-6, atol=1e-7)
            assert now.any()
        assert torch.equal(new.params["experts"], old.params["experts"])
        assert all(x.isfinite().all() for x in tree_leaves(sf.unshard(_gone_on(other, state).params)))


def _owed(residual: Any, size: int, blocks: int) -> Tensor:
    """The errors of a leaf; those of experts lie in blocks."""
    blocks = blocks if size == EXPERTS * WIDTH else 1
    total = residual.worker.mean(0) + residual.server
    return total.view(blocks, -1)[:, : size // blocks].reshape(-1)


@pytest.mark.nightly
def test_errors_are_in_checkpoints_and_move_to_other_meshes(tmp_path: pathlib.Path) -> None:
    _saved(tmp_path)


def test_errors_of_experts_in_other_blocks_are_not_rebalanced() -> None:
    def first(sizes: dict) -> Any:
        mesh, specs = sf.make_mesh(sizes, abstract=True), {"dense": P(), "experts": P("ep")}
        tx = RULES["onebit_adam"](("dp", "ep"))
        return sf.sharded_step(_loss, tx, mesh=mesh, specs=specs, batch=P(("dp", "ep"))).init(_params()).opt_state

    with pytest.raises(ValueError, match="residual 1: 2 blocks became 4"):
        optim.rebalance_residuals(first({"dp": 2, "ep": 2}), first({"dp": 1, "ep": 4}))
