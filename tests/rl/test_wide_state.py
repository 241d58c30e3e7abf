"""A training state in float64: an exact forward computes float32, as the engine does, so first ratios are 1."""

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt
from shardfn.testing import distributed

CONFIG = gpt.Config.llama_like(
    vocab_size=16, num_layers=2, d_model=32, num_heads=4, d_ff=64, max_len=16, exact=True, tie_embeddings=True
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
    logprobs = rl.answer_logprobs(gpt.apply(CONFIG, params, x.ids), x.ids, *x.where)
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


def test_an_exact_forward_in_float64_is_refused() -> None:
    made, tokens = decoder(CONFIG), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"float64: exact layers compute float32; .*Policy\(compute=torch.float32\)"):
        gpt.apply(CONFIG, wide_params(), tokens)
    with pytest.raises(
        TypeError, match=r"(?s)convert these leaves.*\['blocks'\]\[1\]\['wq'\] is torch.float64"
    ) as caught:
        Engine(made, wide_params(), mesh=sf.make_mesh(alone=True), limits=limits_of(made, running=8, buckets=(32,)))
    assert str(caught.value).count("torch.float64") == len(sf.tree_leaves(wide_params()))
