"""A policy whose layers lie on several ranks: its loss is that of one device, and its first ratios are 1."""

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import rl
from shardfn.testing import assert_parity, distributed
from tests.inference.hf_models import MODELS
from tests.modules.test_module_exact import logprobs_of, sampled

PATH = "model.layers"


@pytest.mark.nightly
@distributed(world=2)
def test_layers_of_a_policy_on_two_ranks(world: int) -> None:
    model = MODELS["llama"]()
    x = sampled(model)
    batch = (x, torch.linspace(-1, 1, len(x.ids)))
    specs: dict[str, Any] = {"batch": sf.P(), "zero": sf.Zero(stage=1)}
    with sf.make_mesh({"dp": 1, "pp": world}, device="cpu") as mesh:
        params, exact = sf.from_module(model, layers=PATH, exact=True)
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
