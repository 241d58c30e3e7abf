"""Covers `inference/_digest.py`: an altered field changes the digest and is named, and then the chain."""

from collections.abc import Callable

import pytest

from shardfn.inference import (
    Add,
    Limits,
    Request,
    Sampling,
    State,
    advance,
    digest,
    field_digests,
    first_difference,
    start,
)

LIMITS = Limits(vocab=50, context=24, blocks=20, block=4, buckets=(2, 4, 8), running=2)


def busy() -> State:
    """Two sequences run, one waits, and one block has known content."""
    requests = [Request(tuple(range(i, i + 6)), Sampling(max_tokens=8), priority=i % 2) for i in range(3)]
    state, plan, _ = advance(start(LIMITS), [Add(i, f"r{i}", r) for i, r in enumerate(requests)])
    for _ in range(3):
        assert plan is not None
        state, plan, _ = advance(state, (), [7] * plan.num_rows)
    return state


def alter(change: Callable[[State], object]) -> Callable[[State], object]:
    return change


ALTERED = {
    "time": alter(lambda s: setattr(s, "time", 3)),
    "waiting[0]": alter(lambda s: s.waiting[0].insert(0, 9)),
    "running": alter(lambda s: s.running.reverse()),
    "sequences[r0.0].computed": alter(lambda s: setattr(s.sequences[0], "computed", 2)),
    "sequences[r0.0].tokens": alter(lambda s: s.sequences[0].tokens.append(3)),
    "sequences[r0.0].blocks": alter(lambda s: s.sequences[0].blocks.reverse()),
    "sequences[r2.0].arrived": alter(lambda s: setattr(s.sequences[2], "arrived", 1)),
    "pool.free": alter(lambda s: s.pool.free.reverse()),
    "pool.references": alter(lambda s: s.pool.references.__setitem__(1, 5)),
    "pool.cached": alter(lambda s: s.pool.cached.update({5: None})),
    "pool.contents": alter(lambda s: s.pool.contents.popitem()),
    "speculation": alter(lambda s: setattr(s, "speculation", s.speculation.add(2, 1))),
    "sequences[r0.0].draft_length": alter(
        lambda s: setattr(s.sequences[0], "draft_length", s.sequences[0].draft_length._replace(width=1))
    ),
    "flight": alter(lambda s: s.flight.pop()),
    "moves": alter(lambda s: s.moves.append((5, 4))),
    "chain": alter(lambda s: setattr(s, "chain", b"12345678")),
}


@pytest.mark.parametrize("field", ALTERED)
def test_an_altered_field_is_named(field: str) -> None:
    one, other = busy(), busy()
    assert digest(one) == digest(other) and first_difference(field_digests(one), field_digests(other)) is None
    ALTERED[field](other)
    assert digest(one) != digest(other)
    assert first_difference(field_digests(one), field_digests(other)) == field


def test_a_field_of_one_side_alone_is_named() -> None:
    one, other = busy(), busy()
    del other.sequences[2]
    assert first_difference(field_digests(one), field_digests(other)) == "sequences[r2.0].request"
    assert first_difference(field_digests(other), field_digests(one)) == "sequences[r2.0].request"


def test_the_chain_differs_in_the_step_of_the_first_effect() -> None:
    one, other = busy(), busy()
    other.pool.free.reverse()
    for _ in range(8):
        rows = sum(len(c.positions) for c in one.flight)
        one, plan, _ = advance(one, (), [7] * rows)
        other, theirs, _ = advance(other, (), [7] * rows)
        assert plan is not None and theirs is not None
        if plan.tables != theirs.tables:
            assert one.chain != other.chain
            return
        assert one.chain == other.chain
    raise AssertionError("no block was taken")
