"""Embeddings: the plain forward's hidden states, pooled, beside any other requests."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import make_mesh
from shardfn.inference import Engine, Runner, Sampling, hf_decoder
from shardfn.models import _gpt_forward
from shardfn.testing import distributed
from tests.inference.hf_models import MODELS
from tests.inference.stories import model
from tests.inference.test_hf import LIMITS as HF_LIMITS
from tests.inference.test_hf import PROMPTS as HF_PROMPTS
from tests.inference.test_stories import KINDS, runner

PROMPTS = [[1, 2, 0], [5], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [1, 2, 0, 7, 7, 7, 7, 7, 7]]


def pooled(states_TD: Tensor, pooling: str, normalize: bool = False) -> Tensor:
    """The definition, from the states of one sequence."""
    wide = states_TD.double()
    made = wide[-1]
    if pooling == "mean":
        made = wide[0]
        for state in wide[1:]:
            made = made + state
        made = made / len(wide)
    return (made / made.square().sum().sqrt() if normalize else made).float()


def plain(kind: str, prompt: Sequence[int]) -> Tensor:
    """The states of one forward."""
    one = model(**KINDS[kind][0])
    with torch.no_grad():
        return _gpt_forward.compute_hidden(one.config, one.params[0], {"tokens": torch.tensor([prompt])})[0][0]  # pyright: ignore


def engine(kind: str, blocks: int | None = None, **more: Any) -> Engine:
    changes, limits = KINDS[kind]
    limits = limits if blocks is None else dataclasses.replace(limits, blocks=blocks)
    one = model(**changes)
    return Engine(one.decoder, one.params[0], runner=runner(kind), limits=limits, **more)


@pytest.mark.day("gpt2-mean", "llama-mean")
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_they_are_pooled_states_of_the_plain_forward(kind: str, pooling: str) -> None:
    one = engine(kind, KINDS[kind][1].width + 1)  # so few blocks that sequences lose theirs
    stream = one.stream([4, 4, 2], Sampling(max_tokens=9, temperature=0.0))
    next(stream)
    made = one.embed(PROMPTS, pooling)
    assert torch.equal(made, torch.stack([pooled(plain(kind, prompt), pooling) for prompt in PROMPTS]))
    for prompt, row in zip(PROMPTS, made, strict=True):
        assert torch.equal(one.embed([prompt], pooling)[0], row)
    [alone] = engine(kind).generate([[4, 4, 2]], Sampling(max_tokens=9, temperature=0.0))
    assert [t.token for t in stream] == alone.tokens[1:] and one.idle and one.stats.counts["held"] == 0


def test_a_length_of_one() -> None:
    made = engine("gpt2").embed(PROMPTS, "mean", normalize=True)
    want = torch.stack([pooled(plain("gpt2", prompt), "mean", True) for prompt in PROMPTS])
    torch.testing.assert_close(made, want, rtol=1e-6, atol=0)
    assert torch.allclose(made.norm(dim=1), torch.ones(4))


@pytest.mark.day("llama")
@pytest.mark.parametrize("kind", ["gpt2", "llama", pytest.param("gemma2", marks=pytest.mark.nightly)])
def test_models_of_transformers(kind: str) -> None:
    module = MODELS[kind]()
    made, params = hf_decoder(module, batch_invariant=True)
    one = Engine(made, params, limits=HF_LIMITS)
    for pooling in ("last", "mean"):
        rows = one.embed(HF_PROMPTS, pooling)
        for prompt, row in zip(HF_PROMPTS, rows, strict=True):
            assert torch.equal(one.embed([prompt], pooling)[0], row)
            with torch.no_grad():
                states = module.base_model(torch.tensor([prompt])).last_hidden_state[0]
            torch.testing.assert_close(row, pooled(states, pooling), rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_have_the_bits_of_one_device(world: int) -> None:
    changes, limits = KINDS["gpt2"]
    one = model("tp", **changes)
    runner = Runner(one.decoder, limits, mesh=make_mesh({"tp": world}))
    made = Engine(one.decoder, one.params[0], runner=runner, limits=limits).embed(PROMPTS, "mean")
    assert torch.equal(made, torch.stack([pooled(plain("gpt2", prompt), "mean") for prompt in PROMPTS]))


def test_a_name_is_taken_until_its_embedding_is() -> None:
    one = engine("gpt2")
    name = one.add([4, 4, 2], name="request-0", pooling="last")
    while not one.idle:
        one.step()
    with pytest.raises(ValueError, match="the embedding of a request named 'request-0' was not taken"):
        one.add([4, 2], name=name)
    assert one.add([4, 2]) == "request-1"
    while not one.idle:
        one.step()
    assert torch.equal(one.embedding(name), pooled(plain("gpt2", [4, 4, 2]), "last"))
    assert one.add([4, 2], name=name) == name


def test_refusals() -> None:
    one = engine("gpt2")
    for arguments, told in [
        (([[1]], "max"), "pooling must be one of 'last', 'mean'.*got 'max'"),
        (([],), "0 prompts"),
        (([[1], []],), "prompt must have from 1 to 27 tokens, got 0"),
        (([[1] * 28],), "prompt must have from 1 to 27 tokens, got 28"),
    ]:
        with pytest.raises(ValueError, match=told):
            one.embed(*arguments)
    with pytest.raises(ValueError, match=r"normalize must be True or False.*got 1"):
        one.embed([[1]], normalize=1)  # pyright: ignore
    assert one.idle
    inexact, params = hf_decoder(MODELS["llama"](), batch_invariant=False)
    with pytest.raises(ValueError, match=r"does not give its hidden states. Use a batch-invariant one"):
        Engine(inexact, params, limits=HF_LIMITS).embed([[1]])
