"""Draws at temperatures other than 1: log probabilities are those of the sampled distribution, to the last bit."""

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt
from tests.rl.test_sample import CONFIG, LENGTH, PROMPTS, SAMPLING


def engine_at(temperature: float | None, params: Any) -> Engine:
    model = decoder(CONFIG) if temperature is None else rl.with_temperature(decoder(CONFIG), temperature)
    return Engine(model, params, limits=limits_of(model, running=8, buckets=(32,)))


def logprobs(params: Any, x: rl.Rollout, temperature: float) -> torch.Tensor:
    logits = gpt.apply(CONFIG, params, x.ids) / temperature
    return rl.completion_logprobs(logits, x.ids, x.spans)


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.3, marks=pytest.mark.nightly)])
def test_first_ratios_are_one(temperature: float) -> None:
    params = gpt.init(CONFIG, sf.key(0))
    x = rl.sample(engine_at(temperature, params), PROMPTS, SAMPLING, key=sf.key(7), length=LENGTH)
    assert torch.equal(logprobs(params, x, temperature), x.logprobs)
    assert not torch.equal(logprobs(params, x, 1.0), x.logprobs)  # of the full distribution
    rl.check_first_ratios(logprobs(params, x, temperature), x)
    with pytest.raises(ValueError, match="pass the temperature of the draws"):
        rl.check_first_ratios(logprobs(params, x, 1.0), x)


@pytest.mark.nightly
def test_tokens_are_those_of_the_temperature() -> None:
    params = gpt.init(CONFIG, sf.key(0))
    [found], [wanted] = (
        engine_at(own, params).generate([PROMPTS[0]], Sampling(max_tokens=7, temperature=drawn, seed=3))
        for own, drawn in ((0.5, 1.0), (None, 0.5))  # a power of two: the quotients are the same numbers
    )
    assert found.tokens == wanted.tokens and found.logprobs != wanted.logprobs


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_out_of_range_is_named(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature must be above 0 and finite, got {temperature}"):
        rl.with_temperature(decoder(CONFIG), temperature)
