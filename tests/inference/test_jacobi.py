"""Covers `inference/_jacobi.py`: draws behind a wrong draft are the next drafts, and tokens are those without."""

from array import array
from dataclasses import replace
from typing import Any

import pytest

from shardfn.inference import Context, DraftTree, Engine, Jacobi, MultiBlockJacobi, Runner, Sampling
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


def test_blocks_begin_in_time_and_rejected_draws_are_branches() -> None:
    drafter, tokens = MultiBlockJacobi(4, pool=2), array("q", [5, 6])
    context = Context(0, "a", 0, tokens, 2)
    assert [len(drafter.propose(context, 8))] == [4]
    for token, num in ((7, 3), (8, 2), (9, 1), (5, 4)):  # ceil(0.85 * 4) = 4: the next block begins with this one's end
        tokens.append(token)
        assert len(drafter.propose(context, 8)) == num
    early = MultiBlockJacobi(4, spawn=0.5)
    tokens.extend([6, 6])
    assert len(early.propose(context, 8)) == 6 and early.block == 8
    for drawn in ([1, 2], [6, 3, 4], [6, 9, 9, 9]):
        drafter.take_rejected(context, drawn)
    tree = drafter.propose(context, 8)
    assert tree.branch(1) == [6, 9] and tree.branch(4) == [9, 9, 9] and tree.branch(6) == [3, 4] and len(tree) == 7
    assert drafter.propose(context, 4) == tree.first(4) and drafter.copy().propose(context, 8) == tree
    before = drafter.digest()
    drafter.end(context)
    assert drafter.digest() == MultiBlockJacobi(4, pool=2).digest() != before


def test_draws_behind_a_wrong_draft_follow_the_first_branch() -> None:
    tree = DraftTree((5, 6, 7, 8, 9), (-1, 0, 1, 0, 3))  # 5 6 7 and 5 8 9
    assert tree.find_rejected([5, 0, 11, 12, 13, 14]) == [11, 12]
    assert tree.find_rejected([5, 8, 1, 1, 3, 4]) == [4]
    assert tree.find_rejected([4, 8, 7, 1, 3, 4]) == [8, 7, 1]


def test_bad_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)spawn must be from 0 to 1, got 1.5.*size must be .* got 0"):
        MultiBlockJacobi(0, spawn=1.5)
