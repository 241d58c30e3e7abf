"""Covers lower and eval_shape: predicted and counted bytes, abstract meshes, compilation; passes one by one."""

import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import optim
from shardfn.models import gpt
from shardfn.testing import ODD_TRAINABLE, assert_same, distributed, odd_batch, odd_loss, odd_params, on_mesh

ODD: dict[str, Any] = {"persist_elements": 2, "bucket_bytes": 64}
CONFIG = gpt.Config(vocab_size=33, num_layers=1, d_model=16, num_heads=2, max_len=8)
NOTHING = sf.graph.Schedule(prefetch=None, bucket=None, reductions=None, donate=False)
PASSES: dict[str, Any] = {
    "prefetch": {"prefetch": 300},
    "reuse": {"reuse": 10**6},
    "bucket": {"bucket": 200},
    "reductions": {"reductions": 300},
    "budget": {"budget": 0},
    "donate": {"donate": True},
    "all": {"prefetch": 300, "reuse": 300, "bucket": 200, "reductions": 10**6, "budget": 10**4, "donate": True},
}


def _tokens(n: int, rows: int = 4) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(33, (rows, 9), generator=torch.Generator().manual_seed(n))}


@pytest.mark.nightly
@distributed(world=3, timeout=200)
def test_each_pass_and_all_of_them_keep_every_bit() -> None:
    mesh = sf.make_mesh({"dp": 3})
    # Written as pure functions too, so that `donate` has something to do.
    tx = optim.chain(optim.clip_by_global_norm(0.1), optim.scale_by_adam(), optim.scale_by_learning_rate(1e-2))
    options: dict[str, Any] = {"mesh": mesh, "zero": sf.Zero.flat(stage=3, **ODD), "trainable": ODD_TRAINABLE}
    batches = [odd_batch(n) for n in range(3)]
    want = on_mesh(odd_loss, tx, odd_params(), batches, **options)
    for changes in ({}, *PASSES.values()):
        jitted = sf.jit(odd_loss, backend="graph", graph_schedule=sf.graph.Schedule(**{**vars(NOTHING), **changes}))
        assert_same(on_mesh(jitted, tx, odd_params(), batches, **options), want, exact=True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "stage, remat, microbatches",
    [
        pytest.param(0, False, 1, marks=pytest.mark.nightly),
        pytest.param(1, True, 2, marks=pytest.mark.nightly),
        pytest.param(2, False, 2, marks=pytest.mark.nightly),
        pytest.param(3, False, 1, marks=pytest.mark.nightly),
        (3, True, 2),
    ],
)
@distributed(world=2, timeout=300)
def test_predicted_bytes_are_the_counted_ones(stage: int, remat: bool, microbatches: int) -> None:
    mesh = sf.make_mesh({"dp": 2})
    wrap = sf.remat if remat else lambda f: f
    loss = sf.jit(sf.accumulate(functools.partial(gpt.loss, CONFIG, wrap=wrap), microbatches), backend="graph")
    step = sf.sharded_step(loss, optim.adamw(1e-2), mesh=mesh, zero=sf.Zero(stage=stage, persist_elements=0))
    state = step.init(functools.partial(gpt.init, CONFIG), sf.key(0))
    predicted = step.lower(state, _tokens(0)).cost_analysis()
    state, _ = step(state, _tokens(0))
    with sf.count_traffic() as traffic:
        step(state, _tokens(1))
    counted = {(op, ",".join(axes)): tuple(entry) for (op, axes), entry in traffic.by_op.items()}
    assert {k: tuple(v) for k, v in predicted.transfers.items()} == counted


@distributed(world=2)
def test_a_lowered_step_compiles_to_the_step() -> None:
    mesh = sf.make_mesh({"dp": 2})
    loss = functools.partial(gpt.loss, CONFIG)
    step = sf.sharded_step(loss, optim.adamw(1e-2), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0), donate=False)
    state = step.init(functools.partial(gpt.init, CONFIG), sf.key(0))
    compiled = step.lower(sf.eval_shape(functools.partial(gpt.init, CONFIG), sf.key(0)), _tokens(0)).compile("graph")
    (a, ma), (b, mb) = step(state, _tokens(1)), compiled(state, _tokens(1))
    assert torch.equal(ma["loss"], mb["loss"]) and torch.equal(ma["grad_norm"], mb["grad_norm"])
    for x, y in zip(sf.core.tree_leaves(a.params), sf.core.tree_leaves(b.params), strict=True):
        assert torch.equal(x.local, y.local)
    with pytest.raises(ValueError, match="Lower the step again"):
        compiled(state, _tokens(1, rows=2))


@pytest.mark.nightly
def test_a_mesh_larger_than_the_machine() -> None:
    mesh = sf.make_mesh({"dp": 64, "tp": 2}, abstract=True)
    config = gpt.Config(vocab_size=1000, num_layers=2, d_model=256, num_heads=4, max_len=64)
    step = sf.sharded_step(sf.jit(functools.partial(gpt.loss, config)), optim.adamw(1e-3), mesh=mesh, zero=sf.Zero(3))
    state = sf.eval_shape(step.init, functools.partial(gpt.init, config), sf.key(0))
    assert state.params["blocks"][0]["w_up"].shape == (1024, 256)
    assert state.params["blocks"][0]["w_up"].local.shape == (16, 256)
    lowered = step.lower(state, {"tokens": torch.empty(2, 65, dtype=torch.int64, device="meta")})
    memory, cost = lowered.memory_analysis(), lowered.cost_analysis()
    held, moments = (sum(x.local.nbytes for x in sf.core.tree_leaves(t)) for t in (state.params, state.opt_state))
    assert memory.by_kind["params"] == held and memory.by_kind["optimizer"] == moments
    assert memory.peak >= sum(memory.by_kind.values()) - 1 and cost.flops > 0
    psi = 4 * gpt.num_params(config)
    assert 2.0 * psi < cost.sent * 64 / 63 < 3.2 * psi
    text = lowered.as_text()
    assert "params['blocks'][0]['w_up']" in text and "all_gather" in text and "gpt.py" in text
    estimate = lowered.estimate(sf.graph.cluster("a100-80"))
    assert estimate.seconds > 0
    with pytest.raises(ValueError, match="abstract"):
        lowered.compile()
    with pytest.raises(ValueError, match="abstract"):
        step(state, _tokens(0))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        pytest.param(torch.float32, marks=pytest.mark.nightly),
        pytest.param(torch.bfloat16, marks=pytest.mark.nightly),
    ],
)
def test_eval_shape_of_draws_has_their_shapes_and_dtypes(dtype: torch.dtype) -> None:
    def draws() -> list[Any]:
        one, two = sf.split(sf.key(0))
        numbers = [sf.core.normal(one, (3, 5), dtype=dtype), sf.core.uniform(two, (0, 2), dtype=dtype)]
        return [*numbers, sf.core.bernoulli(one, 0.5, (7,)), numbers[0] @ numbers[0].t()]

    found, want = sf.eval_shape(draws), draws()
    assert [(x.shape, x.dtype, x.stride()) for x in found] == [(x.shape, x.dtype, x.stride()) for x in want]
    assert all(x.device.type == "meta" for x in found)


def test_eval_shape_computes_nothing() -> None:
    out = sf.eval_shape(lambda p: {"y": p["x"] @ p["x"].T, "n": 3}, {"x": torch.empty(1 << 24, 4, device="meta")})
    assert out["y"].shape == (1 << 24, 1 << 24) and out["y"].device.type == "meta" and out["n"] == 3
