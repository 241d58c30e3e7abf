"""A policy whose layers lie on several ranks: its loss is that of one device, and its first ratios are 1."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt, moe
from shardfn.testing import assert_parity, distributed
from tests.inference.hf_models import MODELS
from tests.modules.test_batch_invariant_module import logprobs_of, sampled

PATH = "model.layers"
EXACT = gpt.Config.llama_like(
    vocab_size=16, num_layers=2, d_model=32, num_heads=4, d_ff=64, max_len=16, batch_invariant=True, stacked=True
)
WIDE = dataclasses.replace(EXACT, batch_invariant=False)  # float64
EXPERTS = moe.mixtral_like(
    vocab_size=16,
    num_layers=4,
    d_model=16,
    num_heads=2,
    num_kv_heads=1,
    d_ff=16,
    max_len=16,
    experts=moe.Experts(num=4, balance=0.0),
    stacked=True,
)


@functools.cache
def drawn() -> dict[str, Any]:
    """A batch of answers of the exact model, four to each of two prompts, some of other lengths."""
    made = decoder(EXACT)
    limits = limits_of(made, running=8, buckets=(32,))
    engine = Engine(made, gpt.init(EXACT, sf.key(0)), mesh=sf.make_mesh(alone=True), limits=limits)
    sampling = Sampling(max_tokens=6, n=4, stop_tokens=(0, 1, 2))
    x = rl.sample(engine, [[3, 4], [5, 6, 7]], sampling, key=sf.key(1), length=10)
    assert len(set(x.lengths.tolist())) > 1
    reference = x.logprobs - 0.3 * torch.linspace(0, 1, 6)
    return {"tokens": x.ids, "rollout": x, "advantages": torch.linspace(-1, 1, 8), "reference": reference}


def routed() -> dict[str, Any]:
    """The batch with experts that differ by layer and are not the routers' choices, and with positions of answers."""
    x, draw = drawn()["rollout"], torch.Generator().manual_seed(0)
    routes = torch.rand(*x.ids.shape, 4, 4, generator=draw).argsort(-1)[..., :2].to(torch.int16)
    return drawn() | {"at": rl.completion_positions(x.ids, x.spans), "routes": routes}


def learns(logits: torch.Tensor, batch: Any) -> Any:
    x = batch["rollout"]
    logprobs_of = rl.logprobs_at if "at" in batch else rl.completion_logprobs
    logprobs = logprobs_of(logits, batch["tokens"], x.spans)
    old, reference, advantages = (y.to(logits.dtype) for y in (x.logprobs, batch["reference"], batch["advantages"]))
    loss = rl.grpo(logprobs, old, advantages, x.lengths, epsilon_high=0.28, ref_logprobs_BT=reference, beta=0.1)
    return loss, rl.policy_metrics(logprobs, old, x.lengths, ref_logprobs_BT=reference)


def by_apply(config: gpt.Config, params: Any, batch: Any) -> Any:
    logits = gpt.apply(config, params, batch["tokens"], at=batch.get("at"), chosen=batch.get("routes"))
    return learns(logits, batch)


@pytest.mark.parametrize("kind", ["dense", "routed"])
def test_stages_of_a_policy_are_its_loss(kind: str) -> None:
    config, batch = (WIDE, drawn()) if kind == "dense" else (EXPERTS, routed())
    params = sf.tree_map(lambda x: x.double(), gpt.init(config, sf.key(0)))
    loss, aux = sf.pipeline(*gpt.stages(config, loss=learns), num_microbatches=4)(params, batch)
    want, metrics = by_apply(config, params, batch)
    torch.testing.assert_close(loss.mean(), want.mean(), rtol=1e-12, atol=0)
    for name, x in metrics.items():
        torch.testing.assert_close(aux[name].mean(), x.mean(), rtol=1e-12, atol=0)


def test_a_loss_of_logits_needs_all_of_them() -> None:
    with pytest.raises(ValueError, match=r"Config\(loss_tile=4\) has only those of a tile.*Use loss_tile=None"):
        gpt.stages(dataclasses.replace(WIDE, loss_tile=4), loss=learns)


def test_a_cross_entropy_takes_no_positions_and_routes() -> None:
    params = gpt.init(EXPERTS, sf.key(0))
    with pytest.raises(ValueError, match=r"has 'at' and 'routes', and the mean cross entropy.*Pass stages\(loss=\)"):
        gpt.stages(EXPERTS).first(params, routed())
    other = routed() | {"routes": routed()["routes"][:, :, :2]}
    with pytest.raises(ValueError, match=r"chosen has shape \(8, 10, 2, 2\).* must be \(8, 10, 4, 2\)"):
        gpt.stages(EXPERTS, loss=learns).first(params, other)


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "jit"), [(0, True), (1, False), (3, True)])
@distributed(world=4)
def test_a_gpt_policy_in_stages(stage: int, jit: bool) -> None:
    with sf.make_mesh({"pp": 2, "dp": 2}, device="cpu") as mesh:
        how: dict[str, Any] = {"specs": gpt.specs(EXACT, pp="pp"), "batch": sf.P("dp")}
        how |= {"zero": sf.Zero(stage=stage, persist_elements=0)} if stage else {}
        around = sf.jit if jit else lambda loss: loss
        piped = sf.pipeline(*gpt.stages(EXACT, loss=learns), num_microbatches=2)
        step = sf.sharded_step(around(piped), sf.optim.adamw(1e-2), mesh=mesh, has_aux=True, **how)
        state = step.init(gpt.init(EXACT, sf.key(0)))
        own = sf.tree_map(lambda x: x[step.rows(8)], drawn())  # the same on both ranks along "pp"
        state, metrics = step(state, own)
        assert metrics["exact"] == 1  # the first ratios, to the last bit
        _, metrics = step(state, own)
        assert metrics["exact"] < 1

        params = sf.tree_map(lambda x: x.double(), gpt.init(WIDE, sf.key(0)))
        plain = gpt.stages(WIDE, loss=lambda *x: learns(*x)[0])
        loss = around(sf.pipeline(*plain, num_microbatches=2))
        how |= {"mesh": mesh, "reference": lambda *x: by_apply(WIDE, *x)[0]}
        assert_parity(loss, sf.optim.adamw(1e-2), params, [drawn()] * 3, **how)


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "jit"), [(0, True), (3, False)])
@distributed(world=4)
def test_stages_send_the_experts_of_a_policy(stage: int, jit: bool) -> None:
    with sf.make_mesh({"pp": 2, "dp": 2}, device="cpu") as mesh:
        params = sf.tree_map(lambda x: x.double(), gpt.init(EXPERTS, sf.key(0)))
        piped = sf.pipeline(*gpt.stages(EXPERTS, loss=lambda *x: learns(*x)[0]), num_microbatches=2)
        how: dict[str, Any] = {"specs": gpt.specs(EXPERTS, pp="pp"), "batch": sf.P("dp"), "mesh": mesh}
        how |= {"zero": sf.Zero(stage=stage, persist_elements=0)} if stage else {}
        how |= {"reference": lambda *x: by_apply(EXPERTS, *x)[0]}
        assert_parity(sf.jit(piped) if jit else piped, sf.optim.adamw(1e-2), params, [routed()] * 3, **how)


@pytest.mark.nightly
@distributed(world=2)
def test_layers_of_a_policy_on_two_ranks(world: int) -> None:
    model = MODELS["llama"]()
    x = sampled(model)
    batch = (x, torch.linspace(-1, 1, len(x.ids)))
    specs: dict[str, Any] = {"batch": sf.P(), "zero": sf.Zero(stage=1)}
    with sf.make_mesh({"dp": 1, "pp": world}, device="cpu") as mesh:
        params, exact = sf.from_module(model, layers=PATH, batch_invariant=True)
        by_name = dict.fromkeys(params, sf.P()) | {PATH: dict.fromkeys(params[PATH], sf.P("pp"))}

        def mismatch(params: Any, batch: Any) -> Any:
            x, _ = batch
            return rl.token_mean((logprobs_of(exact, params, x) - x.logprobs).abs(), x.lengths)

        piped = sf.pipeline_module(mismatch, exact, num_microbatches=2)
        step = sf.sharded_step(piped, sf.optim.sgd(0.1), mesh=mesh, specs=by_name, **specs)
        _, metrics = step(step.init(params), batch)
        assert float(metrics["loss"]) == 0

        params, apply = sf.from_module(model.double(), layers=PATH)

        def loss(params: Any, batch: Any) -> Any:
            x, advantages = batch
            return rl.grpo(logprobs_of(apply, params, x), x.logprobs.double(), advantages.double(), x.lengths)

        piped = sf.pipeline_module(loss, apply, num_microbatches=2)
        how: dict[str, Any] = {"mesh": mesh, "specs": by_name, "reference": loss, "parts": 2, **specs}
        assert_parity(piped, sf.optim.sgd(0.1, momentum=0.9), params, [batch], **how)
