"""Covers `inference/_suffix_drafter.py`: proposals, counts, bounds, and that equal calls leave equal drafters."""

import random
from array import array

import pytest

from shardfn.inference import Context, DraftTree, Suffix
from tests.inference.drafters import context


def ended(drafter: Suffix, *tokens: int, salt: bytes = b"", serial: int = 99) -> None:
    drafter.end(context(0, *tokens, serial=serial, salt=salt))


def test_the_most_frequent_token_follows() -> None:
    drafter = Suffix()
    for last in (7, 8, 7):
        ended(drafter, 4, 5, 6, last, 1)
    assert drafter.propose(context(3, 5, 6), 2) == DraftTree.chain([7, 1])
    assert drafter.propose(context(3, 5, 6), 4) == DraftTree((7, 1, 8, 1), (-1, 0, -1, 2))


def test_the_newest_of_equal_counts_follows() -> None:
    drafter = Suffix()
    for last in (7, 8):
        ended(drafter, 4, 5, 6, last, 1)
    assert drafter.propose(context(3, 5, 6), 1) == DraftTree.chain([8])
    assert drafter.propose(context(3, 5, 6), 3) == DraftTree((8, 7, 1), (-1, -1, 0))


def test_a_longer_suffix_is_better_and_gives_more() -> None:
    drafter = Suffix(factor=1.0)
    ended(drafter, 9, 5, 6, 7, 1, 2, 3, 4)
    ended(drafter, 5, 6, 8, 8, 8)
    assert drafter.propose(context(0, 9, 5, 6), 9) == DraftTree.chain([7, 1, 2])  # three tokens for a suffix of three


def test_the_own_text_repeats_itself() -> None:
    assert Suffix(factor=4.0).propose(context(1, 2, 3, 1, 2, 3, 1, 2), 7) == DraftTree.chain([3, 1, 2, 3, 1, 2, 3])
    assert Suffix().propose(context(1, 2, 3), 4) == DraftTree()
    assert Suffix().propose(context(1), 4) == DraftTree()


@pytest.mark.parametrize(
    ("least", "proposed"),
    [(0.3, DraftTree((1, 8, 2, 7), (-1, 0, 1, 0))), (0.6, DraftTree.chain([1, 8, 2])), (0.7, DraftTree.chain([1]))],
)
def test_a_branch_ends_where_it_is_improbable(least: float, proposed: DraftTree) -> None:
    drafter = Suffix(least=least)
    for last in (7, 8, 8):
        ended(drafter, 4, 5, 6, 1, last, 2)
    assert drafter.propose(context(3, 5, 6), 4) == proposed


def test_salts_are_kept_apart() -> None:
    drafter = Suffix()
    ended(drafter, 4, 5, 6, 7, salt=b"x")
    assert drafter.propose(context(3, 5, 6), 1) == DraftTree()
    assert drafter.propose(context(3, 5, 6, salt=b"x"), 1) == DraftTree.chain([7])


def test_the_oldest_texts_are_forgotten() -> None:
    drafter = Suffix(most_tokens=20)
    for i in range(50):
        ended(drafter, *range(10 * i, 10 * i + 4 + i % 5), salt=bytes([i % 3]))
        assert drafter._size == sum(len(text) for _, text in drafter._texts.values()) <= 20
        places = [
            (serial, end) for index in drafter._index.values() for ends in index._ends.values() for serial, end in ends
        ]
        assert sorted(places) == sorted(
            (serial, end) for serial, (_, text) in drafter._texts.items() for end in range(2, len(text) + 1)
        )
    none = Suffix(most_tokens=0)
    ended(none, 4, 5, 6, 7)
    assert none.propose(context(3, 5, 6), 1) == DraftTree() and not none._texts


def test_equal_calls_leave_equal_drafters_and_copies_are_apart() -> None:
    rng = random.Random(0)
    one, other = Suffix(most_tokens=60), Suffix(most_tokens=60)
    texts = {i: [rng.randrange(3)] for i in range(4)}
    for step in range(300):
        i = rng.randrange(4)
        texts[i] += [rng.randrange(3) for _ in range(rng.randint(1, 3))]
        mine = Context(i, "a", 0, array("q", texts[i]), 1)
        if step % 7 == 0:
            other = other.copy()
        if step % 11 == 0:
            apart = one.copy()
            ended(apart, 1, 1, 1, 1)
            assert apart.digest() != one.digest()
        assert one.propose(mine, 5) == other.propose(mine, 5)
        assert all(0 <= token < 3 for token in one.propose(mine, 5).tokens) and len(one.propose(mine, 2)) <= 2
        if len(texts[i]) > 20:
            one.end(mine)
            other.end(mine)
            texts[i] = [rng.randrange(3)]
        assert one.digest() == other.digest()


def test_settings_are_in_the_digest() -> None:
    assert Suffix().digest() != Suffix(depth=32).digest()


@pytest.mark.parametrize(
    ("name", "value"), [("depth", 1), ("places", 0), ("most_tokens", -1), ("factor", 0.0), ("least", 2.0)]
)
def test_bad_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}.* must be.* got.*{value}|least from 0 to 1, got .*{value}"):
        Suffix(**{name: value})  # pyright: ignore[reportArgumentType]
