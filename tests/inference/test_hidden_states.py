"""Covers hidden states that drafters see: the states of one forward of the sequence, bit for bit, in any company."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardfn import make_mesh
from shardfn.inference import Engine, Runner, Sampling
from shardfn.inference._cache import make_single_bodies
from shardfn.models import gpt
from shardfn.testing import distributed
from tests.inference.drafters import Seeing
from tests.inference.stories import Model, model
from tests.inference.test_speculation import SIZES
from tests.inference.test_stories import KINDS

HOW = Sampling(max_tokens=9, temperature=0.7, seed=2)
# The second is in the first, and the third shares a block with the first.
PROMPTS = [[1, 2, 0, 1, 2, 0, 2, 1, 1, 0, 2, 2, 0, 1], [1, 2, 0, 1], [1, 2, 0, 1, 2, 2, 2], [2]]


def states_of(one: Model, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
    """The states of the last token of one forward."""
    packed, at_T = gpt.pack(one.config, one.params[0]), torch.arange(len(tokens), dtype=torch.int32)
    with torch.no_grad():
        bodies = make_single_bodies(one.decoder.cache, len(tokens))
        found = gpt.decode(one.config, packed, torch.tensor(tokens), at_T, at_T[-1:], bodies)
    return torch.cat([found.state_after(x)[0] for x in layers])


def check_states(one: Model, runner: Runner, layers: tuple[int, ...]) -> None:
    """Runs sequences in a pool so small that some lose their blocks, and compares all states that a drafter saw."""
    limits = replace(runner.limits, blocks=12)
    drafter = Seeing(13, layers, hidden_window=3)
    engine = Engine(one.decoder, one.params[0], limits=limits, runner=runner, drafter=drafter)
    engine.generate(PROMPTS, HOW)
    assert engine.stats.cache.preemptions > 0 and engine.stats.cache.hits > 0 and len(drafter.seen) > 8
    assert {1, 3} <= {len(states) for _, states in drafter.seen} <= {1, 2, 3}
    for tokens, states in drafter.seen:
        for i, hidden in enumerate(reversed(states)):
            assert torch.equal(hidden, states_of(one, tokens[: -1 - i], layers))


def test_states_are_those_of_one_forward() -> None:
    one = model(**KINDS["gpt2"][0])
    check_states(one, Runner(one.decoder, replace(SIZES, buckets=(12,))), (2, 0))


@pytest.mark.nightly
@distributed(world=2)
def test_states_on_ranks() -> None:
    one = model("tp", **KINDS["gpt2"][0])
    check_states(one, Runner(one.decoder, SIZES, mesh=make_mesh({"tp": 2})), (0, 1, 2))


def test_layers_that_a_model_does_not_have_are_refused() -> None:
    one = model(**KINDS["gpt2"][0])
    with pytest.raises(ValueError, match=r"wants hidden states after \[3\] layers, and this decoder has .*\[0, 1, 2\]"):
        Engine(one.decoder, one.params[0], limits=SIZES, drafter=Seeing(13, (1, 3)))
