"""Covers states of models with experts on another mesh: checkpoints at another number of ranks, and `reshard`."""

import functools
import pathlib
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import checkpoint
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers
from shardfn.testing import distributed

NIGHT = pytest.mark.nightly
EXPERTS, PYRAMID, ROWS = 5, (3, 5), 12
# From axes to where the experts lie, and whether tp cuts the dense layers; a rank of four has no expert.
LAYOUTS: dict[str, tuple[dict[str, int], Any]] = {
    "ep 1": ({"ep": 1}, "ep"),
    "ep 2": ({"ep": 2}, "ep"),
    "ep 3": ({"ep": 3}, "ep"),
    "ep 4": ({"ep": 4}, "ep"),
    "dp 2, ep 2": ({"dp": 2, "ep": 2}, "ep"),
    "tp 2": ({"tp": 2}, "tp"),
    "ep 2, tp 2": ({"ep": 2, "tp": 2}, ("ep", "tp")),
}


def config(where: Any, pyramid: bool) -> gpt.Config:
    """DeepSeek's second layer, or PR-MoE's two layers with unlike numbers of experts."""
    experts = moe.Experts(
        num=PYRAMID if pyramid else EXPERTS,
        d_ff=6,
        route=functools.partial(layers.sigmoid_groups, groups=1, groups_kept=1),
        bias_rate=0.01,
        first=0 if pyramid else 1,
        shared=not pyramid,
        residual=pyramid,
        balance=0.0,
        exchange=layers.AllToAll(where),
    )
    sizes: dict[str, Any] = {"vocab_size": 20, "num_layers": 2, "d_model": 12, "num_heads": 2, "num_kv_heads": 2}
    return moe.deepseek_v3_like(**sizes, d_ff=10, max_len=8, experts=experts)


def made(layout: str, stage: int, pyramid: bool = False) -> tuple[Any, Any]:
    """The step of a layout, and its first state."""
    axes, where = LAYOUTS[layout]
    c = config(where, pyramid)
    data = tuple(a for a in axes if a != "tp")
    cut: dict[str, Any] = {"axis": "tp", "sequence": True} if "tp" in axes else {}
    step = sf.sharded_step(
        functools.partial(moe.loss, c, axes=data or None, **cut),
        sf.optim.adamw(1e-2),
        mesh=sf.make_mesh(axes, device="cpu"),
        specs=gpt.specs(c, tp="tp" if "tp" in axes else None),
        batch=sf.P(data or None),
        zero=sf.Zero(stage=stage, axis=data, persist_elements=0) if data else None,
        has_aux=True,
        has_state=True,
        finish=functools.partial(moe.finish, c),
    )
    start = sf.core.tree_map(lambda x: x.double() * 3, gpt.init(c, sf.key(0)))
    return step, step.init(start, model_state=moe.init_state(c))


def taken(step: Any, state: Any, n: int) -> tuple[Any, torch.Tensor]:
    made = torch.Generator().manual_seed(n)
    tokens = torch.randint(20, (ROWS, 7), generator=made)
    rows = step.rows(ROWS) if set(step.mesh.axis_names) != {"tp"} else slice(None)
    state, metrics = step(state, {"tokens": tokens[rows]})
    return state, metrics["loss"]


@distributed(world=[1, 2, 3, 4])
def _saved(directory: pathlib.Path, layout: str, stage: int, pyramid: bool, world: int) -> Any:
    step, state = made(layout, stage, pyramid)
    for n in range(2):
        state, _ = taken(step, state, n)
    checkpoint.save(directory / "saved", state, durable=False)
    whole = sf.unshard(state)
    return whole, taken(step, state, 2)[1]


@distributed(world=[1, 2, 3, 4])
def _restored(directory: pathlib.Path, layout: str, stage: int, pyramid: bool, world: int) -> Any:
    step, state = made(layout, stage, pyramid)
    state = checkpoint.restore(directory / "saved", state).tree
    whole = sf.unshard(state)
    return whole, taken(step, state, 2)[1]


def assert_bits(got: Any, want: Any) -> None:
    for path, a, b in zip(sf.core.tree_paths(want), *map(sf.core.tree_leaves, (got, want)), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), path


def size_of(layout: str) -> int:
    return torch.Size(LAYOUTS[layout][0].values()).numel()


TARGETS = ["ep 1", "ep 3", pytest.param("ep 4", marks=NIGHT), "tp 2", pytest.param("ep 2, tp 2", marks=NIGHT)]


@pytest.mark.day("3-ep 2-ep 1-alike")
@pytest.mark.parametrize("pyramid", [False, pytest.param(True, marks=NIGHT)], ids=["alike", "pyramid"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", ["ep 2", pytest.param("ep 2, tp 2", marks=NIGHT)])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=NIGHT), 3])
def test_a_checkpoint_has_the_same_experts_on_any_ranks(
    source: str, target: str, stage: int, pyramid: bool, tmp_path: pathlib.Path
) -> None:
    """Weights, moments of the optimizer and biases of the router keep their bits, and so the next loss its value."""
    want, loss = _saved(tmp_path, source, stage, pyramid, world=size_of(source))[0]
    assert all(x.any() for x in sf.core.tree_leaves(want.model_state["bias"]))
    for got, found in _restored(tmp_path, target, 4 - stage, pyramid, world=size_of(target)):
        assert_bits(got, want)
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)


@pytest.mark.nightly
@distributed(world=4)
def test_a_state_moves_to_other_ranks_of_experts_and_back() -> None:
    steps = {name: made(name, 3) for name in ("ep 4", "dp 2, ep 2", "ep 2, tp 2")}
    step, state = steps["ep 4"]
    state, _ = taken(step, state, 0)
    want = sf.unshard((state.params, state.opt_state))
    at = state.params, state.opt_state
    for name in ("dp 2, ep 2", "ep 2, tp 2"):
        at = sf.reshard(at, into=(steps[name][1].params, steps[name][1].opt_state))
        assert_bits(sf.unshard(at), want)
    _, fresh = made("ep 4", 3)
    at = sf.reshard(at, into=(fresh.params, fresh.opt_state))
    for x, y in zip(*map(sf.core.tree_leaves, (at, (state.params, state.opt_state))), strict=True):
        assert x.spec == y.spec and torch.equal(x.local, y.local)
