"""Covers shardfn/engine/_profiled.py: which leaf is gathered stands in torch's profiler."""

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import shardfn as sf
from shardfn.testing import distributed


def _loss(params: Any, batch: Any) -> torch.Tensor:
    return ((batch @ params["first"]).tanh() @ params["second"]).square().mean()


@distributed(world=2)
def test_gathers_are_named_by_leaf_and_change_nothing() -> None:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    zero = sf.Zero(stage=3, persist_elements=0)
    step = sf.sharded_step(_loss, sf.optim.sgd(0.1), mesh=mesh, zero=zero, donate=False)
    state, batch = step.init({"first": torch.ones(8, 4) / 9, "second": torch.ones(4, 6) / 7}), torch.ones(2, 8)
    plain, _ = step(state, batch)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        profiled, _ = step(state, batch)
    names = {event.name for event in found.events() or [] if event.name.startswith("shardfn ")}
    assert {"shardfn gather params['first']", "shardfn gather params['second']"} <= names
    for a, b in zip(sf.unshard(plain.params).values(), sf.unshard(profiled.params).values(), strict=True):
        assert torch.equal(a, b)
