"""Covers `inference/_pool.py`: counts, the order in which content is forgotten, and keys."""

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shardfn.inference import BlockPool
from shardfn.inference import _pool as pool_file
from shardfn.inference._pool import BlockContent, PrefixScope, extend_contents, root_key

SCOPE = PrefixScope(0, b"", "float32", b"")


def contents(tokens: list[int], num: int, scope: PrefixScope = SCOPE) -> list[BlockContent]:
    found: list[BlockContent] = []
    extend_contents(found, array("q", tokens), 2, num, scope)
    return found


def filled(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks of a sequence that has been computed and has left."""
    known = contents(tokens, len(tokens) // 2)
    blocks = [pool.take() for _ in known]
    for block, content in zip(blocks, known, strict=True):
        pool.record(block, content)
    pool.release(blocks)
    return blocks


def test_a_prefix_is_found_up_to_its_first_other_block() -> None:
    pool = BlockPool(8)
    blocks = filled(pool, [1, 2, 3, 4, 5, 6])
    assert pool.find(contents([1, 2, 3, 4, 9, 9], 3)) == blocks[:2]
    assert pool.find(contents([9, 2, 3, 4], 2)) == []
    assert pool.counts() == {"free": 4, "held": 0, "cached": 3}


def test_the_least_recently_used_end_is_forgotten_first() -> None:
    pool = BlockPool(6)
    old, new = filled(pool, [1, 2, 3, 4]), filled(pool, [5, 6, 7, 8])
    pool.hold(old)
    pool.release(old)  # used again
    taken = [pool.take() for _ in range(3)]
    assert taken[1:] == [new[1], new[0]]
    assert pool.find(contents([1, 2, 3, 4], 2)) == old and pool.find(contents([5, 6], 1)) == []


def test_content_that_is_known_twice_is_kept_once() -> None:
    pool = BlockPool(6)
    first = filled(pool, [1, 2])
    second = pool.take()
    pool.record(second, contents([1, 2], 1)[0])
    pool.release([second])
    assert pool.find(contents([1, 2], 1)) == first and pool.counts()["cached"] == 1


def test_blocks_that_are_released_twice_are_a_mistake() -> None:
    pool = BlockPool(4)
    block = pool.take()
    pool.release([block])
    with pytest.raises(AssertionError):
        pool.release([block])


@pytest.mark.parametrize(
    "other",
    [
        PrefixScope(1, b"", "float32", b""),
        PrefixScope(0, b"a", "float32", b""),
        PrefixScope(0, b"", "bf", b""),
        PrefixScope(0, b"", "float32", b"a"),
    ],
)
def test_each_part_of_the_scope_is_in_the_key(other: PrefixScope) -> None:
    assert root_key(other) != root_key(SCOPE)
    pool = BlockPool(4)
    filled(pool, [1, 2])
    assert pool.find(contents([1, 2], 1, other)) == []


@given(st.binary(max_size=3), st.binary(max_size=3), st.binary(max_size=3), st.binary(max_size=3))
@settings(max_examples=20, derandomize=True, database=None, deadline=None)
def test_fields_do_not_run_together(a: bytes, b: bytes, c: bytes, d: bytes) -> None:
    one, other = PrefixScope(0, a, "float32", b), PrefixScope(0, c, "float32", d)
    assert (root_key(one) == root_key(other)) == (one == other)


def test_tokens_and_scopes_are_compared_where_keys_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_file, "_make_key", lambda fields: bytes(16))
    pool = BlockPool(4)
    (block,) = filled(pool, [1, 2])
    assert pool.find(contents([1, 2], 1)) == [block]
    assert pool.find(contents([3, 4], 1)) == []
    assert pool.find(contents([1, 2], 1, SCOPE._replace(salt=b"x"))) == []


@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "release", "record"]), st.integers(0, 99)), max_size=60))
@settings(max_examples=30, derandomize=True, database=None, deadline=None)
def test_counts_always_add_up(steps: list[tuple[str, int]]) -> None:
    pool, held, fresh = BlockPool(7), list[int](), 0
    for verb, at in steps:
        if verb == "take" and pool.available:
            held.append(pool.take())
        elif held and verb == "hold":
            pool.hold([held[at % len(held)]])
            held.append(held[at % len(held)])
        elif held and verb == "release":
            pool.release([held.pop(at % len(held))])
        elif held and verb == "record" and held[at % len(held)] not in pool.contents:
            fresh += at % 2
            pool.record(held[at % len(held)], contents([fresh, 0], 1)[0])
        counts = pool.counts()
        assert sum(counts.values()) == 6 and counts["held"] == len(set(held))
    copied = pool.copy()
    pool.release(held)
    assert pool.counts()["held"] == 0 and copied.counts()["held"] == len(set(held))
