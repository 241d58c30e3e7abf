"""Engines on several ranks: equal tokens for each number of ranks, and errors where ranks disagree."""

from typing import Any

import pytest
import torch

from shardfn import RankError, make_mesh
from shardfn.inference import Engine, Runner, Sampling
from shardfn.testing import distributed
from tests.inference.stories import check, model, run
from tests.inference.test_stories import KINDS, drawn_stories


def tell(world: int, kind: str, number: int, **more: Any) -> None:
    """Runs stories on all ranks of a world in lockstep; each holds them against its own forward on one device."""
    changes, limits = KINDS[kind]
    one = model("tp", **changes, **more)
    runner = Runner(one.decoder, limits, mesh=make_mesh({"tp": world}))
    for story in drawn_stories(limits, number):
        told, _ = run(story, one, runner, limits)
        check(story, told, one)


@distributed(world=[2, pytest.param(4, marks=pytest.mark.nightly)])
def test_stories(world: int) -> None:
    tell(world, "gpt2", 6)


@pytest.mark.nightly
@distributed(world=2)
def test_stories_of_grouped_heads() -> None:
    tell(2, "llama", 30)


@pytest.mark.nightly
@distributed(world=3)
def test_stories_on_three_ranks() -> None:
    tell(3, "llama", 20, d_model=48, num_heads=6, num_kv_heads=3, d_ff=96, chunks=24)


@distributed(world=2)
def test_a_different_request_on_a_rank_is_an_error_within_one_step() -> None:
    torch.manual_seed(0)
    changes, limits = KINDS["gpt2"]
    one, mesh = model("tp", **changes), make_mesh({"tp": 2})
    engine = Engine(one.decoder, one.params[0], mesh=mesh, limits=limits)
    engine.add([1, 2, 3], Sampling(max_tokens=3))
    engine.step()
    engine.add([1, 2, 3 + mesh.rank])
    with pytest.raises(RankError, match=r"ranks 0 and 1 differ in sequences\[r1"):
        engine.step()
    with pytest.raises(RuntimeError, match="make another engine"):
        engine.step()
