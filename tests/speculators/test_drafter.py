"""Covers `speculators/_drafter.py`: drafts are those of the heads, the same in any company, and change no token."""

import functools
import itertools
import pathlib
from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardfn import core
from shardfn.inference import Context, Engine, Runner, decoder, hf_decoder, limits_of
from shardfn.speculators import (
    HiddenRows,
    RecurrentConfig,
    Speculator,
    apply,
    config_of,
    find_frequent_tokens,
    hidden_states,
    init,
    load,
    measure_acceptance,
    save,
    train,
)
from tests.inference.test_speculation import SIZES
from tests.speculators.trained import GREEDY, answers, large, trained


@functools.cache
def made(kind: Any, seed: int = 0) -> Speculator:
    config = config_of(large().decoder, kind, d_inner=20, num_drafts=4)
    return Speculator(config, init(config, core.key(seed)))


def contexts(num: int, **sampling: Any) -> list[Context]:
    drawn = torch.Generator().manual_seed(1)
    how = replace(GREEDY, **sampling)
    return [
        Context(
            i, "a", 0, array("q", [i, 2, i % 5]), 2, key=i, sampling=how, states=(torch.randn(24, generator=drawn),)
        )
        for i in range(num)
    ]


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_drafts_are_the_most_probable_tokens_of_the_heads(kind: str) -> None:
    drafter = made(kind)
    params = init(drafter.config, core.key(0))
    for context in contexts(3):
        assert context.hidden is not None
        known = [context.tokens[-1]]
        for i in range(4):
            tokens = torch.tensor([*known, *[0] * (4 - len(known))])
            logits = apply(drafter.config, params, context.hidden[None, None], tokens[None, None])
            known.append(int(logits[i].argmax()))
        assert list(drafter.propose(context, 9).tokens) == known[1:]
        assert list(drafter.propose(context, 2).tokens) == known[1:3]


def grow(config: Any, context: Context, branches: int, most: int) -> list[tuple[int, ...]]:
    """The chains of a tree, the most probable first, each logit by `apply` in float64."""
    params = {name: x.double() for name, x in init(config, core.key(0)).items()}
    hidden, n = torch.stack(context.states).double(), config.num_drafts
    known = context.tokens[-len(hidden) :].tolist()
    found, heads = list[tuple[float, tuple[int, ...]]](), [(0.0, tuple[int, ...]())]
    for i in range(n):
        longer = []
        for score, chain in heads:
            windows = torch.tensor([*known, *chain, *[0] * n])[: len(known) + n - 1].unfold(0, n, 1)
            logprobs = apply(config, params, hidden[None], windows[None])[i][0, -1].log_softmax(0)
            values, tokens = logprobs.topk(branches)
            longer += [(score + v, (*chain, t)) for v, t in zip(values.tolist(), tokens.tolist(), strict=True)]
        found += longer
        heads = sorted(longer, reverse=True)[:branches]
    return [chain for _, chain in sorted(found, reverse=True)[:most]]


@pytest.mark.day("eagle3")
@pytest.mark.parametrize("kind", ["mlp", "lstm", "owl", "eagle3", "mtp"])
def test_trees_have_the_most_probable_chains(kind: Any) -> None:
    """In company, with 1 to 3 states, and any part of a tree has the tree's first chains."""
    config = config_of(large().decoder, kind, num_drafts=3, window=2)
    drafter = Speculator(config, init(config, core.key(0)), branches=3)
    states, drawn = list[tuple[torch.Tensor, ...]](), torch.Generator().manual_seed(2)
    for num in (1, 2, 3, 1):
        size = min(num, drafter.hidden_window), 24 * len(config.layers)
        states.append(tuple(torch.randn(size, generator=drawn)))
    some = [one._replace(states=x) for one, x in zip(contexts(4), states, strict=True)]
    trees = drafter.propose_all([(context, 11) for context in some])
    for context, tree in zip(some, trees, strict=True):
        assert [tuple(tree.branch(i)) for i in range(len(tree))] == grow(config, context, 3, 11)
        assert drafter.propose(context, 4) == tree.first(4)
    assert any(tree.branches for tree in trees) and len({tree.parents for tree in trees}) > 1


def test_branches_of_a_draw_begin_with_the_drawn_chain_and_end_at_stop_tokens() -> None:
    config = made("lstm").config
    drafter = Speculator(config, init(config, core.key(0)), branches=2)
    for context in contexts(4, temperature=1.5):
        [chain], tree = made("lstm").propose_all([(context, 4)]), drafter.propose(context, 99)
        drawn = [tree.branch(i) for i in range(len(tree))]
        assert list(chain.tokens[:1]) in drawn and len({*map(tuple, drawn)}) == len(drawn)
        ends = context._replace(sampling=replace(context.sampling, stop_tokens=(tree.tokens[0],)))
        cut = drafter.propose(ends, 99)
        parents = {cut.tokens[x] for x in cut.parents if x >= 0}
        assert tree.tokens[0] in cut.tokens and tree.tokens[0] not in parents
    assert drafter.digest() != made("lstm").digest()
    with pytest.raises(ValueError, match=r"branches must be an integer from 1 to the vocabulary 13, got 0"):
        Speculator(config, init(config, core.key(0)), branches=0)


def test_drafts_do_not_depend_on_other_sequences() -> None:
    drafter = made("lstm")
    some = contexts(5, temperature=0.8, top_k=4)
    together = drafter.propose_all([(context, 4) for context in some])
    assert together == [drafter.propose(context, 4) for context in some]
    assert len({tree.tokens for tree in together}) > 1
    unseen = some[0]._replace(states=())
    assert drafter.propose_all([(unseen, 4), (some[1], 3)]) == [drafter.propose(unseen, 4), together[1].first(3)]
    assert len(drafter.propose(unseen, 4)) == 0
    first = together[1].tokens[0]
    ends = some[1]._replace(sampling=replace(some[1].sampling, stop_tokens=(first,)))
    assert drafter.propose(ends, 4).tokens == (first,)


def test_tokens_are_those_without_a_speculator() -> None:
    one, prompts = large(), [[1, 2, 0], [2, 2], [0]]
    runner = Runner(one.decoder, replace(SIZES, buckets=(12,)))
    parts: dict[str, Any] = {"limits": runner.limits, "runner": runner}
    for how in (GREEDY, replace(GREEDY, temperature=0.9, seed=4)):
        guessing = Engine(one.decoder, one.params[0], drafter=made("lstm"), **parts)
        assert guessing.generate(prompts, how) == Engine(one.decoder, one.params[0], **parts).generate(prompts, how)
        assert guessing.stats.speculation.drafted > 3


def test_states_of_training_are_those_of_the_engine() -> None:
    one = large()
    [states] = hidden_states(one.decoder, one.params[0], torch.tensor([[1, 2, 0, 1]]))
    assert torch.equal(Engine(one.decoder, one.params[0]).embed([[1, 2, 0, 1]])[0], states[-1])
    with pytest.raises(ValueError, match=r"rows have 29 tokens, and the model's longest sequence has 28"):
        hidden_states(one.decoder, one.params[0], torch.zeros(1, 29, dtype=torch.int64))


def test_a_speculator_of_another_model_is_refused() -> None:
    config, one = made("mlp").config, large()
    other = replace(config, vocab_size=11, d_model=32, num_layers=3)
    with pytest.raises(
        ValueError, match=r"(?s)vocab_size is 11, and the model has 13.*d_model is 32, and the model has"
    ):
        Engine(one.decoder, one.params[0], limits=SIZES, drafter=Speculator(other, init(other, core.key(0))))
    drafter = Speculator(config, init(config, core.key(0)), digest="0123")
    with pytest.raises(ValueError, match=rf"its model has the digest 0123, and this model {one.decoder.digest}"):
        Engine(one.decoder, one.params[0], limits=SIZES, drafter=drafter)
    bare = replace(decoder(one.config), hidden_layers=())
    with pytest.raises(ValueError, match=r"does not give its hidden states"):
        config_of(bare, "mlp")


def test_other_parameters_are_refused() -> None:
    config = RecurrentConfig("lstm", vocab_size=13, d_model=24, num_layers=2, d_inner=20)
    params = init(config, core.key(0))
    wrong = {name: x for name, x in params.items() if name != "cell_norm_b"} | {"extra": torch.ones(1)}
    wrong["head"] = torch.ones(13, 21)
    with pytest.raises(ValueError, match=r"(?s)cell_norm_b is missing.*extra is unknown.*head is \(13, 21\), and must"):
        Speculator(config, wrong)
    digests = [Speculator(config, init(config, core.key(i))).digest() for i in (0, 0, 1)]
    assert [a == b for a, b in itertools.pairwise(digests)] == [True, False]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["mlp", "lstm", "owl", "eagle3", "mtp"])
def test_a_trained_speculator_is_right_more_often(kind: Any) -> None:
    """On texts that the model draws, where each token follows from the token before."""
    one, (drafter, losses) = large(), trained(kind)
    fresh = Speculator(drafter.config, init(drafter.config, core.key(5)))
    prompts = [list(prompt) for prompt, _ in answers()]
    given = [each.prepare(one.decoder, one.params[0]) for each in (fresh, drafter)]
    engines = [Engine(*g, limits=SIZES, drafter=each) for g, each in zip(given, (fresh, drafter), strict=True)]
    found = [measure_acceptance(engine, prompts, GREEDY) for engine in engines]
    assert losses[-1] < 0.5 * losses[0] and found[1] > found[0] + 0.2


@pytest.mark.parametrize("kind", ["lstm", "eagle3"])
@pytest.mark.nightly
def test_a_vocabulary_for_drafts_is_trained_and_kept(kind: Any, tmp_path: pathlib.Path) -> None:
    one = large()
    rows = torch.tensor([(*prompt, *tokens) for prompt, tokens in answers()])
    config = config_of(one.decoder, kind, num_drafts=3, draft_vocab=5)
    states = HiddenRows(torch.stack(list(hidden_states(one.decoder, one.params[0], rows, config.layers))), rows)
    ids = find_frequent_tokens(rows, 5)
    assert all(
        (rows == ids[i]).sum() >= (rows == other).sum() for i in range(5) for other in {*range(9)} - {*ids.tolist()}
    )
    params = train(config, states, steps=3, batch_size=8, shared={"draft_tokens": ids})
    assert torch.equal(params["draft_tokens"], ids)
    save(tmp_path, config, params, one.decoder, one.params[0])
    drafter = load(tmp_path, one.decoder, one.params[0], branches=2)
    width = one.decoder.hidden_size * len(config.layers)
    states = tuple(torch.randn(4, width, generator=torch.Generator().manual_seed(0)))
    context = Context(0, "", 0, array("q", [1, 2, 3, 4, 5]), 1, states=states)
    assert {*drafter.propose(context, 9).tokens} <= {*ids.tolist()}
    engine = Engine(one.decoder, one.params[0], drafter=drafter)
    plain = Engine(one.decoder, one.params[0]).generate([(1, 2)], GREEDY)
    assert engine.generate([(1, 2)], GREEDY) == plain
    with pytest.raises(ValueError, match=r"draft_vocab must be None for 'mtp', whose head can be the model's, got 5"):
        config_of(one.decoder, "mtp", draft_vocab=5)


def test_training_refuses_too_few_rows() -> None:
    config, states = made("mlp").config, HiddenRows(torch.ones(2, 9, 24), torch.zeros(2, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"batch_size must be at most the 2 rows, got 3"):
        train(config, states, steps=1, batch_size=3)
    with pytest.raises(ValueError, match=r"steps must be an integer of at least 1, got 0"):
        train(config, states, steps=0)


@pytest.mark.nightly
def test_a_speculator_of_an_unmodified_model_of_transformers() -> None:
    """Its states are those that the model's head multiplies, and its tokens are those without a speculator."""
    pytest.importorskip("transformers")
    from tests.inference.hf_models import MODELS

    one, params = hf_decoder(MODELS["llama"]())
    [states] = hidden_states(one, params, torch.tensor([[1, 2, 0, 1]]))
    assert one.batch_invariant and states.shape == (4, one.hidden_size)
    config = config_of(one, "lstm", d_inner=12)
    drafter = Speculator(config, init(config, core.key(0)))
    limits = limits_of(one, context=24, drafts=8, running=3, buckets=(4, 12))
    parts: dict[str, Any] = {"limits": limits, "runner": Runner(one, limits)}
    guessing, plain = Engine(one, params, drafter=drafter, **parts), Engine(one, params, **parts)
    prompts = [[1, 2, 0], [2, 2]]
    for how in (GREEDY, replace(GREEDY, temperature=0.9, seed=4)):
        assert guessing.generate(prompts, how) == plain.generate(prompts, how)
    assert guessing.stats.speculation.drafted > 3
