"""Covers `inference/_draft_model.py`: its proposals, its blocks, and the steps in which it proposes nothing."""

from dataclasses import replace
from typing import Any

import pytest

from shardfn.inference import Completion, DraftModel, Engine, Limits, Runner, Sampling, StepPlan
from tests.inference.stories import Model, model
from tests.inference.test_speculation import SIZES, draft_model, runner
from tests.inference.test_stories import KINDS

GREEDY = Sampling(max_tokens=18, temperature=0.0)
HOT = Sampling(max_tokens=18, temperature=1.5, seed=5, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.2)


def engine(drafter: DraftModel | None = None, **changes: Any) -> Engine:
    one = _large()
    graphs = None if "drafts" in changes else runner()
    return Engine(one.decoder, one.params[0], limits=replace(SIZES, **changes), runner=graphs, drafter=drafter)


def _large() -> Model:
    return model(**KINDS["gpt2"][0])


def own(engine: Engine) -> DraftModel:
    """The engine's copy of its drafter."""
    drafter = engine.core._state.drafter
    assert isinstance(drafter, DraftModel)
    return drafter


@pytest.mark.nightly
@pytest.mark.parametrize("how", [GREEDY, HOT])
def test_the_same_model_is_always_right(how: Sampling) -> None:
    """Also where tokens are sampled, as both use one uniform number, and with penalties."""
    guessing = engine(draft_model(0))
    assert guessing.generate([[1, 2, 0]], how) == engine().generate([[1, 2, 0]], how)
    assert guessing.stats.speculation.accepted == guessing.stats.speculation.drafted > 10


@pytest.mark.nightly
def test_several_sequences_share_its_steps_and_few_blocks() -> None:
    """The small model has 11 blocks; five sequences need 35, so that they take them from one another."""
    prompts = [[1, 2, i] * 3 for i in range(5)]
    guessing, plans = engine(draft_model(0)), watched(own_runner := draft_model(0)._runner)
    try:
        assert guessing.generate(prompts, GREEDY) == engine().generate(prompts, GREEDY)
    finally:
        del own_runner.run
    assert guessing.stats.speculation.accepted > 20
    assert max(len({*plan.sequences[: plan.num_tokens]}) for plan in plans) > 1
    pool = own(guessing)._pool
    assert pool.counts()["held"] == 0 and not own(guessing)._own


def watched(runner: Runner) -> list[StepPlan]:
    """The plans that a runner has run since; `del runner.run` ends it."""
    plans, run = list[StepPlan](), runner.run

    def keep(weights: Any, cache: Any, plan: StepPlan, *args: Any, **more: Any) -> Any:
        plans.append(plan)
        return run(weights, cache, plan, *args, **more)

    runner.run = keep  # pyright: ignore[reportAttributeAccessIssue]
    return plans


@pytest.mark.nightly
def test_a_prompt_that_it_knows_is_not_computed_again() -> None:
    guessing, plans = engine(draft_model(0)), watched(own_runner := draft_model(0)._runner)
    try:
        [first] = guessing.generate([[1, 2] * 8], replace(GREEDY, max_tokens=4))
        begun = sum(plan.num_tokens for plan in plans)
        [again] = guessing.generate([[1, 2] * 8], replace(GREEDY, max_tokens=4))
        assert sum(plan.num_tokens for plan in plans) - begun == begun - 12
        guessing.add([1, 2] * 8, replace(GREEDY, max_tokens=4), salt=b"other")
        before = sum(plan.num_tokens for plan in plans)
        while not guessing.idle:
            guessing.step()
        assert sum(plan.num_tokens for plan in plans) - before == begun
    finally:
        del own_runner.run
    assert isinstance(first, Completion) and first == again


def test_a_sequence_beyond_its_context_has_no_drafts() -> None:
    one = model(**KINDS["gpt2"][0])
    short = Limits(vocab=13, context=12, blocks=12, block=4, buckets=(2, 9), running=3)
    guessing = engine(DraftModel(one.decoder, one.params[0], limits=short))
    assert guessing.generate([[1, 2, 0]], GREEDY) == engine().generate([[1, 2, 0]], GREEDY)
    assert 0 < guessing.stats.speculation.drafted <= 12 - 3


@pytest.mark.nightly
def test_it_proposes_nothing_where_drafts_would_only_fill_padding() -> None:
    """Four sequences leave one row of five to drafts, six of twelve are padding, and proposals take time."""
    prompts = [[1, 2, i] for i in range(5)]
    guessing = engine(draft_model(0), drafts=4)
    assert guessing.generate(prompts, GREEDY) == engine().generate(prompts, GREEDY)
    assert guessing.stats.speculation.drafted == 0
    assert guessing.generate([[1, 2, 0]], GREEDY) == engine().generate([[1, 2, 0]], GREEDY)
    assert guessing.stats.speculation.drafted > 0


def test_a_copy_is_apart() -> None:
    guessing, given = engine(draft_model(0)), draft_model(0)
    guessing.add([1, 2, 0], GREEDY)
    for _ in range(4):
        guessing.step()
    drafter = own(guessing)
    other = drafter.copy()
    assert other.digest() == drafter.digest() != given.digest()
    context = next(iter(guessing.core._state.sequences.values())).context
    found = drafter.propose(context, 3)
    assert len(found) == 3 and other.propose(context, 3) == found == given.copy().propose(context, 3)
    other.end(context)
    assert other.digest() != drafter.digest() and drafter.propose(context, 3) == found


def test_it_needs_the_same_vocabulary() -> None:
    small = model(vocab_size=11, num_layers=1)
    with pytest.raises(ValueError, match=r"its model has 11 tokens, and the engine's has 13. Use a small model with"):
        engine(DraftModel(small.decoder, small.params[0]))


@pytest.mark.nightly
def test_warm_up_captures_its_graphs() -> None:
    one = model(**KINDS["gpt2"][0])
    drafter = DraftModel(one.decoder, one.params[0], limits=draft_model(0).limits)
    engine(drafter).warm_up(penalties=True)
    assert len(drafter._runner._bound) == 4 and drafter.memory().total > 0
