"""Covers `speculators/_owl.py` and `_hybrid.py`: states of [SPEC] tokens, what the drafter sees, and both in a tree."""

import functools
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import core
from shardfn.inference import Context, Decoder, DraftTree, Engine, Runner, Sampling, Suffix, decoder
from shardfn.inference._cache import make_single_bodies
from shardfn.models import gpt
from shardfn.speculators import (
    Hybrid,
    RecurrentConfig,
    Speculator,
    add_spec_token,
    compute_spec_states,
    config_of,
    init,
    loss,
    owl_loss,
)
from tests.inference.drafters import Seeing
from tests.inference.test_hidden_states import HOW, PROMPTS
from tests.inference.test_speculation import SIZES
from tests.speculators.trained import GREEDY, large

BASE: dict[str, Any] = {"vocab_size": 13, "num_layers": 2, "d_model": 8, "num_heads": 2, "max_len": 24}
MODELS = {
    "learned": gpt.Config(**BASE),
    "rope": gpt.Config(**BASE, position="rope", norm="rms", mlp="swiglu", bias=False, num_kv_heads=1),
    "window": gpt.Config(**BASE, position="rope", window=3),
    "windows": gpt.Config(**BASE, position="rope", window=(4, None), embedding_scale=3.0),
}


def double(tree: Any) -> Any:
    return core.tree_map(lambda x: x.double() * 4, tree)


@pytest.mark.parametrize("kind", list(MODELS))
def test_states_are_those_of_a_token_at_the_end_of_each_text(kind: str) -> None:
    """A model with the [SPEC] token as a 14th word runs on each beginning of the row."""
    model = MODELS[kind]
    params, spec = double(gpt.init(model, core.key(0))), torch.linspace(-1, 1, 8).double()
    tokens = torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(0))
    found = compute_spec_states(model, params, spec, tokens)
    word = spec / (model.embedding_scale or 1)
    wide = params | {"embed": torch.cat([params["embed"], word[None]])}
    for t in range(9):
        text = torch.cat([tokens[:, : t + 1], torch.full((2, 1), 13)], 1)
        _, states = gpt.apply_and_hidden(replace(model, vocab_size=14, tie_embeddings=True), wide, text)
        torch.testing.assert_close(found[:, t], states[:, -1], rtol=1e-12, atol=1e-12)


def test_the_loss_reaches_the_spec_token() -> None:
    """Against `loss` on the states, and by finite differences in float64."""
    model, config = MODELS["rope"], RecurrentConfig("owl", 13, d_model=8, num_layers=2, d_inner=6)
    target, params = double(gpt.init(model, core.key(0))), double(init(config, core.key(1)))
    batch = {"tokens": torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(0))}
    hidden = compute_spec_states(model, target, params["spec"], batch["tokens"])
    assert owl_loss(model, config, target, params, batch) == loss(config, params, batch | {"hidden": hidden})

    def of_spec(spec: Tensor) -> Tensor:
        return owl_loss(model, config, target, params | {"spec": spec}, batch).total

    spec, direction = params["spec"].clone().requires_grad_(), torch.linspace(-1, 1, 8).double()
    [grad] = torch.autograd.grad(of_spec(spec), spec)
    with torch.no_grad():
        ahead, behind = (of_spec(spec + step * direction) for step in (1e-5, -1e-5))
    assert float((grad * direction).sum()) == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-6)


@dataclass(frozen=True)
class SeeingSpec(Seeing):
    """Keeps the states of [SPEC] tokens that it has seen, and proposes true tokens with some wrong last tokens."""

    wants_spec_token: bool = True
    truth: dict[tuple[int, ...], list[int]] = field(default_factory=dict, hash=False)

    def propose(self, context: Context, most: int) -> list[int]:
        super().propose(context, most)
        num = len(context.tokens)
        found = self.truth[tuple(context.tokens[: context.prompt])][num : num + most] if context.states else []
        return [*found[:-1], (found[-1] + num % 2) % 13] if found else []


@functools.cache
def with_spec() -> tuple[Decoder, Any]:
    return add_spec_token(large().decoder, large().params[0], torch.linspace(-2, 2, 24))


def test_states_in_an_engine_are_those_of_one_forward() -> None:
    """Bit for bit, of sequences that lose their blocks and share a prefix, after accepted and rejected drafts."""
    made, params = with_spec()
    runner = Runner(made, replace(SIZES, buckets=(24,), drafts=20))
    limits = replace(runner.limits, blocks=12)
    plain = Engine(large().decoder, large().params[0], limits=limits).generate(PROMPTS, HOW)
    truth = {tuple(p): [*p, *found.tokens] for p, found in zip(PROMPTS, plain, strict=True)}
    drafter = SeeingSpec(3, truth=truth)
    engine = Engine(made, params, limits=limits, runner=runner, drafter=drafter)
    assert engine.generate(PROMPTS, HOW) == plain == engine.generate(PROMPTS, HOW)
    assert engine.stats.cache.preemptions > 0 and engine.stats.cache.hits > 0 and len(drafter.seen) > 8
    assert 0 < engine.stats.speculation.accepted < engine.stats.speculation.drafted
    weights = made.pack(params)
    for tokens, states in drafter.seen:
        ids, at_T = torch.tensor([*tokens[:-1], 13]).int(), torch.arange(len(tokens), dtype=torch.int32)
        with torch.no_grad():
            outputs = made.outputs(weights, ids, at_T, at_T[-1:], make_single_bodies(made.cache, len(tokens)))
        found = outputs.state_after(2)
        assert found is not None and torch.equal(states[-1], found[0])


def test_keys_of_spec_tokens_are_in_no_shared_block() -> None:
    """A later prompt that begins with all tokens of a request reads the request's blocks, with the tokens as before."""
    made, params = with_spec()
    config = config_of(large().decoder, "owl")
    own = init(config, core.key(0)) | {"spec": params["spec"]}
    engine = Engine(made, params, limits=SIZES, drafter=Speculator(config, own))
    [first] = engine.generate([[1, 2, 0, 1]], replace(GREEDY, max_tokens=13))
    hits = engine.stats.cache.hits
    longer, how = [1, 2, 0, 1, *first.tokens], replace(GREEDY, max_tokens=6)
    plain = Engine(large().decoder, large().params[0], limits=SIZES)
    assert engine.generate([longer], how) == plain.generate([longer], how)
    assert engine.stats.cache.hits - hits >= 12


def test_neither_inputs_nor_products_see_the_length() -> None:
    """Texts of 64 and of 4,096 tokens have equal inputs, so equal drafts, and one program for both."""
    model = decoder(replace(MODELS["rope"], max_len=8192, batch_invariant=True))
    config = config_of(model, "owl")
    drafter, state = Speculator(config, init(config, core.key(0))), torch.linspace(-1, 1, 8)
    texts = [array("q", [i % 7 for i in range(num)] + [5]) for num in (64, 4096)]
    contexts = [Context(0, "a", 0, text, 1, sampling=GREEDY, states=(state,)) for text in texts]
    inputs = [drafter._make_inputs([context], 1) for context in contexts]
    for name, short, long in zip(inputs[0]._fields, *inputs, strict=True):
        assert name == "places" or torch.equal(short, long), name
    assert drafter.propose(contexts[0], 4) == drafter.propose(contexts[1], 4)
    assert len(drafter._bound) == 1
    costs = [drafter._program.lower(drafter._held, x).cost_analysis() for x in inputs]
    assert costs[0] == costs[1] and costs[0].flops > 0


def test_a_hybrid_has_the_better_proposal_first() -> None:
    config = config_of(large().decoder, "lstm", num_drafts=3)
    speculator, state = Speculator(config, init(config, core.key(0))), torch.linspace(-1, 1, 24)
    text = array("q", [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4])
    context = Context(0, "a", 0, text, 1, sampling=GREEDY, states=(state,))
    [chain], tree = speculator.guess_all([(context, 6)]), Suffix().guess(context, 6)
    assert 0 < chain.score < len(chain.tree) < tree.score
    hybrid = Hybrid(speculator)
    found = hybrid.propose(context, 8)
    tree = Suffix().guess(context, 8)
    assert found.first(len(tree.tree)) == tree.tree == found
    longer = tree.tree.merge(chain.tree, 11)
    assert longer.branch(10) == list(chain.tree.tokens) and longer.first(8) == tree.tree
    assert hybrid.propose(context._replace(states=()), 8) == tree.tree
    before = hybrid.digest()
    hybrid.copy().end(context)
    assert hybrid.digest() == before
    hybrid.end(context)
    assert hybrid.digest() != before
    assert DraftTree.chain([1, 2]).merge(DraftTree((1, 3, 2, 4), (-1, 0, 0, 2)), 9) == DraftTree(
        (1, 2, 3, 4), (-1, 0, 0, 1)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_those_without_a_drafter(temperature: float) -> None:
    one, prompts = large(), [[1, 2, 0], [2, 2], [0]]
    config = config_of(one.decoder, "owl", num_drafts=3)
    drafter, how = Speculator(config, init(config, core.key(3))), Sampling(16, temperature=temperature, seed=4)
    engine = Engine(*drafter.prepare(one.decoder, one.params[0]), limits=SIZES, drafter=Hybrid(drafter))
    assert engine.generate(prompts, how) == Engine(one.decoder, one.params[0], limits=SIZES).generate(prompts, how)
    assert engine.stats.speculation.drafted > 3


def test_models_without_a_spec_token_are_refused() -> None:
    one, config = large(), config_of(large().decoder, "owl")
    drafter = Speculator(config, init(config, core.key(0)))
    with pytest.raises(ValueError, match=r"reads the state of a \[SPEC\] token, so the decoder must have one, got"):
        Engine(one.decoder, one.params[0], limits=SIZES, drafter=drafter)
    with pytest.raises(ValueError, match=r"of its width 24, got \(23,\)"):
        add_spec_token(one.decoder, one.params[0], torch.ones(23))
    with pytest.raises(ValueError, match=r"\[SPEC\] tokens need the decoder of a models.gpt"):
        config_of(replace(one.decoder, config=None), "owl")
    with pytest.raises(ValueError, match=r"fewer tokens than max_len=24, got 24"):
        compute_spec_states(MODELS["rope"], {}, torch.ones(8), torch.zeros(1, 24, dtype=torch.int64))
    alibi = replace(MODELS["rope"], position="alibi")
    with pytest.raises(ValueError, match=r"the biases of alibi are of places in the row"):
        compute_spec_states(alibi, gpt.init(alibi, core.key(0)), torch.ones(8), torch.zeros(1, 4, dtype=torch.int64))
