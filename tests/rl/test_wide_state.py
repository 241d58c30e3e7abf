"""Training states in float64: first ratios are 1 where forward and engine are float64, and where both are float32."""

import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P, rl
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt
from shardfn.testing import distributed

CONFIG = gpt.Config.llama_like(
    vocab_size=16, num_layers=2, d_model=32, num_heads=4, d_ff=64, max_len=16, batch_invariant=True, tie_embeddings=True
)
F64 = torch.float64
POLICY = sf.Policy(param=F64, compute=torch.float32, reduce=F64, accum=F64, master=F64)
PROMPTS = [[3, 4], [5, 6, 7], [8], [9, 9]]


def wide_params() -> Any:
    """Parameters that no float32 has."""
    return sf.tree_map(lambda x: x.double() * (1 + 1e-9), gpt.init(CONFIG, sf.key(0)))


def narrow(params: Any) -> Any:
    return sf.tree_map(lambda x: x.float(), params)


def loss(params: Any, batch: Any) -> Any:
    x = batch["rollout"]
    logprobs = rl.completion_logprobs(gpt.apply(CONFIG, params, x.ids), x.ids, x.spans)
    metrics = rl.policy_metrics(logprobs, x.logprobs, x.lengths) | rl.mismatch_metrics(logprobs, x.logprobs, x.lengths)
    return rl.grpo(logprobs, x.logprobs, batch["advantages"], x.lengths), metrics


@distributed(world=[1, pytest.param(2, marks=pytest.mark.nightly), pytest.param(4, marks=pytest.mark.nightly)])
def test_first_ratios_of_a_state_in_float64_are_one(world: int) -> None:
    made = decoder(CONFIG)
    limits = limits_of(made, running=8, buckets=(32,))
    with sf.make_mesh({"dp": world}, device="cpu") as mesh:
        for stage, parts in ((0, 1), (3, 2)):
            mixed = sf.mixed_precision(loss, POLICY)
            zero = sf.Zero(stage=stage, persist_elements=0)
            step = sf.sharded_step(
                sf.accumulate(mixed, parts) if world == 1 else mixed,
                sf.optim.adamw(1e-3),
                mesh=mesh,
                zero=zero,
                has_aux=True,
            )
            state = step.init(wide_params())
            engine = Engine(made, narrow(sf.unshard(state.params)), mesh=sf.make_mesh(alone=True), limits=limits)
            own = step.rows(len(PROMPTS))
            for n in range(3):
                assert {x.dtype for x in sf.tree_leaves(sf.unshard(state.params))} == {torch.float64}
                engine.update_weights(narrow(sf.unshard(state.params)))
                key = sf.fold_in(sf.key(1), n)
                x = rl.sample(engine, PROMPTS[own], Sampling(max_tokens=6, n=2), key=key, start=own.start)
                state, metrics = step(state, {"rollout": x, "advantages": torch.linspace(-1, 1, len(x.ids))})
                assert metrics["exact"] == 1 and metrics["mismatched"] == 0


def wide_loss(params: Any, batch: Any, *, axis: str | None = None) -> Any:
    x = batch["rollout"]
    logits = gpt.apply(CONFIG, params, x.ids, axis=axis)
    logits = sf.all_gather_invariant(logits, axis, dim=-1, size=CONFIG.vocab_size)
    logprobs = rl.completion_logprobs(logits, x.ids, x.spans)
    metrics = rl.policy_metrics(logprobs, x.logprobs, x.lengths) | rl.mismatch_metrics(logprobs, x.logprobs, x.lengths)
    return rl.grpo(logprobs, x.logprobs, batch["advantages"], x.lengths), metrics


def wide_engine(params: Any, mesh: Any, tp: str | None = None) -> Engine:
    made = decoder(CONFIG, tp=tp)
    limits = limits_of(made, running=8, buckets=(32,), cache_dtype="float64")
    return Engine(made, params, mesh=mesh, limits=limits)


def iterate(step: Any, engine: Engine, state: Any, own: slice) -> list[rl.Rollout]:
    """Rollouts of two iterations, each with ratios of exactly 1 before its update and of another number after it."""
    rollouts = []
    for n in range(2):
        engine.update_weights(state.params if engine.mesh.size > 1 else sf.unshard(state.params))
        key = sf.fold_in(sf.key(1), n)
        x = rl.sample(engine, PROMPTS[own], Sampling(max_tokens=6, n=2), key=key, start=own.start)
        assert x.logprobs.dtype == F64 and not torch.equal(x.logprobs, x.logprobs.float().double())
        batch = {"rollout": x, "advantages": torch.linspace(-1, 1, len(x.ids), dtype=F64)}
        state, metrics = step(state, batch)
        assert metrics["exact"] == 1 and metrics["ratio"] == 1 and metrics["mismatched"] == 0, metrics
        state, metrics = step(state, batch)
        assert metrics["exact"] < 1
        assert {leaf.dtype for leaf in sf.tree_leaves(sf.unshard(state.params))} == {F64}
        rollouts.append(x)
    return rollouts


@functools.cache
def of_one_device() -> list[rl.Rollout]:
    alone = sf.make_mesh(alone=True)
    step = sf.sharded_step(wide_loss, sf.optim.sgd(0.5), mesh=alone, has_aux=True)
    return iterate(step, wide_engine(wide_params(), alone), step.init(wide_params()), slice(0, len(PROMPTS)))


def assert_first_are(found: list[rl.Rollout], rows: slice) -> None:
    for a, b in zip(found[0], of_one_device()[0], strict=True):
        assert torch.equal(a.nan_to_num(), b[rows].nan_to_num())


STAGES = [*(pytest.param(stage, marks=pytest.mark.nightly) for stage in (0, 1, 2)), 3]


@pytest.mark.parametrize("stage", STAGES)
@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_first_ratios_of_a_forward_in_float64_are_one(world: int, stage: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    how: dict[str, Any] = {"mesh": mesh, "zero": sf.Zero(stage=stage, persist_elements=0), "has_aux": True}
    step = sf.sharded_step(wide_loss, sf.optim.sgd(0.5), **how)
    engine = wide_engine(wide_params(), sf.make_mesh(alone=True))
    found = iterate(step, engine, step.init(wide_params()), step.rows(len(PROMPTS)))
    assert_first_are(found, step.rows(2 * len(PROMPTS)))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world=2)
def test_first_ratios_in_float64_are_one_under_tensor_parallelism(world: int, stage: int) -> None:
    mesh = sf.make_mesh({"tp": world})
    how: dict[str, Any] = {"mesh": mesh, "specs": gpt.specs(CONFIG, tp="tp"), "batch": P(), "has_aux": True}
    one = functools.partial(wide_loss, axis="tp")
    step = sf.sharded_step(one, sf.optim.sgd(0.5), zero=sf.Zero(stage=stage, axis="tp", persist_elements=0), **how)
    state = step.init(wide_params())
    found = iterate(step, wide_engine(state.params, mesh, "tp"), state, slice(0, len(PROMPTS)))
    assert_first_are(found, slice(0, 2 * len(PROMPTS)))


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["accumulate", "remat", "jit"])
def test_first_ratios_in_float64_are_one_under_transforms(how: str) -> None:
    one = {"accumulate": lambda f: sf.accumulate(f, 4), "remat": sf.remat, "jit": sf.jit}[how](wide_loss)
    step = sf.sharded_step(one, sf.optim.sgd(0.5), has_aux=True)
    engine = wide_engine(wide_params(), sf.make_mesh(alone=True))
    iterate(step, engine, step.init(wide_params()), slice(0, len(PROMPTS)))


def test_mixtures_of_float64_and_float32_are_refused() -> None:
    made, mesh = decoder(CONFIG), sf.make_mesh(alone=True)
    sizes: dict[str, Any] = {"running": 8, "buckets": (32,)}
    with pytest.raises(ValueError, match=r"got 'float32' for float64"):
        Engine(made, wide_params(), mesh=mesh, limits=limits_of(made, **sizes))
    with pytest.raises(ValueError, match=r"got 'bfloat16' for float64"):
        Engine(made, wide_params(), mesh=mesh, limits=limits_of(made, cache_dtype="bfloat16", **sizes))
    with pytest.raises(ValueError, match=r"got 'float64' for not float64"):
        wide_engine(narrow(wide_params()), mesh)
    some = wide_params() | {"embed": wide_params()["embed"].float()}
    with pytest.raises(TypeError, match=r"(?s)float64 if all leaves are.*\['blocks'\]\[1\]\['wq'\] is torch.float64"):
        wide_engine(some, mesh)
    with pytest.raises(TypeError, match=r"pack: quantization='int8' of leaves in float64. Convert them"):
        limits = limits_of(made, cache_dtype="float64", **sizes)
        Engine(decoder(CONFIG, quantization="int8"), wide_params(), mesh=mesh, limits=limits)
    with pytest.raises(TypeError, match=r"float32, or float64 where all is float64. .*Policy\(compute=torch.float32\)"):
        gpt.apply(CONFIG, some, torch.zeros(1, 3, dtype=torch.int64))
