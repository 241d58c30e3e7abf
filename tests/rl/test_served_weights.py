"""Weights of a training state on their way to an engine: the bytes that are sent, and none where layouts agree."""

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P, rl
from shardfn.models import gpt
from shardfn.testing import distributed
from tests.rl.test_sample import CONFIG, LENGTH, PROMPTS, SAMPLING, engine_of


@pytest.mark.day("3")
@pytest.mark.parametrize("stage", [0, 3])
@distributed(world=2)
def test_leaves_that_zero_cuts_are_gathered_once(world: int, stage: int) -> None:
    mesh, params, specs = sf.make_mesh({"tp": world}), gpt.init(CONFIG, sf.key(0)), gpt.specs(CONFIG, tp="tp")

    def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return gpt.apply(CONFIG, params, batch, axis="tp").square().mean()

    how: dict[str, Any] = {"specs": specs, "batch": P(), "zero": sf.Zero(stage=stage, axis="tp", persist_elements=0)}
    state = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, **how).init(params)
    engine = engine_of(CONFIG, state.params, tp="tp", mesh=mesh)
    with sf.count_traffic() as traffic:
        engine.update_weights(state.params)
    pairs = zip(sf.tree_leaves(params), sf.tree_leaves(specs), strict=True)
    whole = sum(4 * x.numel() for x, spec in pairs if not spec.axes)  # all others have the engine's layout
    assert traffic.bytes == (whole * (world - 1) // world if stage == 3 else 0) and whole > 0
    alone = engine_of(CONFIG, params, mesh=sf.make_mesh(alone=True))
    found, wanted = (rl.sample(one, PROMPTS, SAMPLING, key=sf.key(1), length=LENGTH) for one in (engine, alone))
    assert torch.equal(found.logprobs, wanted.logprobs) and torch.equal(found.ids, wanted.ids)
