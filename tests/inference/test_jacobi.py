"""Covers `inference/_jacobi.py`: draws behind a wrong draft are the next drafts, and tokens are those without."""

from array import array
from dataclasses import replace
from typing import Any

import pytest

from shardfn.inference import Context, Engine, Jacobi, Runner, Sampling
from tests.inference.stories import model
from tests.inference.test_speculation import SIZES
from tests.inference.test_stories import KINDS

GREEDY = Sampling(max_tokens=12, temperature=0.0)


def test_tokens_are_those_without_and_drafts_those_of_the_last_step() -> None:
    """Of several sequences. A right guess is accepted, so that steps are saved."""
    one, seen = model(**KINDS["gpt2"][0]), list[tuple[int, list[int], list[int]]]()
    runner = Runner(one.decoder, replace(SIZES, buckets=(12,)))
    parts: dict[str, Any] = {"limits": runner.limits, "runner": runner}

    class Watching(Jacobi):
        def take_rejected(self, context: Context, drawn: Any) -> None:
            seen.append((context.serial, context.tokens.tolist(), [*drawn]))
            super().take_rejected(context, drawn)

        def copy(self) -> "Watching":
            return self

    engine = Engine(one.decoder, one.params[0], drafter=Watching(3), **parts)
    plain = Engine(one.decoder, one.params[0], **parts)
    assert engine.generate([[1, 2, 0], [2, 2]], GREEDY) == plain.generate([[1, 2, 0], [2, 2]], GREEDY)
    assert engine.stats.speculation.accepted > 0 and len(seen) > 4
    assert {len(drawn) for _, _, drawn in seen} <= {0, 1, 2, 3} and any(len(drawn) == 3 for _, _, drawn in seen)


def test_guesses_are_of_one_place_only() -> None:
    drafter, tokens = Jacobi(3), array("q", [5, 6, 7])
    context = Context(0, "a", 0, tokens, 3)
    drafter.take_rejected(context, [8, -1, 9])
    before = drafter.digest()
    assert drafter.propose(context, 9) == [8, 5, 6] and drafter.copy().propose(context, 2) == [8, 5]
    tokens.append(4)  # a token came in another way
    assert drafter.propose(context, 9) == [5, 6, 7]
    drafter.end(context)
    assert drafter.digest() != before and drafter.digest() == Jacobi(3).digest() != Jacobi(4).digest()


def test_blocks_that_do_not_fit_are_refused() -> None:
    one = model(**KINDS["gpt2"][0])
    with pytest.raises(ValueError, match=r"Jacobi: block must be an integer of at least 1, got 0"):
        Jacobi(0)
    with pytest.raises(ValueError, match=r"the drafter has blocks of 9 drafts, and limits.drafts is 8"):
        Engine(one.decoder, one.params[0], limits=SIZES, drafter=Jacobi(9))
