"""Speculators of the small model of stories, trained on texts that the model draws."""

import functools
from dataclasses import replace
from typing import Any

import torch

from shardfn.inference import Engine, Sampling
from shardfn.speculators import HiddenRows, Speculator, SpeculatorConfig, config_of, hidden_states, owl_loss, train
from tests.inference.stories import Model, model
from tests.inference.test_stories import KINDS

GREEDY = Sampling(max_tokens=12, temperature=0.0)


@functools.cache
def large() -> Model:
    return model(**KINDS["gpt2"][0])


@functools.cache
def answers() -> list[tuple[tuple[int, ...], list[int]]]:
    """Prompts, and the model's greedy completions, in which each token follows from the token before."""
    one = large()
    prompts = [(a, b) for a in range(4) for b in range(4)]
    made = Engine(one.decoder, one.params[0]).generate(prompts, replace(GREEDY, max_tokens=24))
    return [(prompt, found.tokens) for prompt, found in zip(prompts, made, strict=True)]


def trained(kind: Any, branches: int = 1) -> tuple[Speculator, list[float]]:
    """A speculator, and the losses of its steps."""
    config, params, losses = trained_params(kind)
    return Speculator(config, params, branches=branches), losses


@functools.cache
def trained_params(kind: Any) -> tuple[SpeculatorConfig, Any, list[float]]:
    one, losses = large(), list[float]()
    rows = torch.tensor([(*prompt, *tokens) for prompt, tokens in answers()])
    config = config_of(one.decoder, kind, num_drafts=4)
    how: dict[str, Any] = {"learning_rate": 1e-2, "batch_size": 8, "report": lambda _, x: losses.append(x)}
    if kind == "owl":
        how["of_batch"] = functools.partial(owl_loss, one.config, config, one.params[0])
        return config, train(config, HiddenRows(None, rows), steps=150, **how), losses
    states = HiddenRows(torch.stack(list(hidden_states(one.decoder, one.params[0], rows, config.layers))), rows)
    return config, train(config, states, steps=150, **how), losses
