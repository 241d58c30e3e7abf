"""Covers `inference/_requests.py` and `_limits.py`: each value out of range is refused by its name, value and range."""

import dataclasses
import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shardfn.inference import Add, Limits, Request, Sampling, advance, check_request, start

LIMITS = Limits(vocab=10, context=16, blocks=4, block=4, buckets=(4, 8), running=2)

SAMPLING: list[tuple[str, Any, str]] = [
    ("temperature", math.nan, "temperature must be a number from 0 to 100.*got nan"),
    ("temperature", math.inf, "temperature must be .*got inf"),
    ("temperature", -0.1, "temperature must be .*got -0.1"),
    ("temperature", "1", "temperature must be a number.*got '1'"),
    ("top_p", 0.0, "top_p must be a number above 0 and at most 1.*got 0.0"),
    ("top_p", 1.5, "top_p must be .*got 1.5"),
    ("top_k", -1, "top_k must be an integer from 0.*got -1"),
    ("min_p", 1.1, "min_p must be .*got 1.1"),
    ("n", 10**9, "n must be an integer from 1 to 128.*got 1000000000"),
    ("n", 0, "n must be .*got 0"),
    ("n", True, "n must be .*got True"),
    ("max_tokens", -1, "max_tokens must be an integer from 0.*got -1"),
    ("max_tokens", 1.0, "max_tokens must be .*got 1.0"),
    ("presence_penalty", 3, "presence_penalty must be a number from -2 to 2.*got 3"),
    ("frequency_penalty", math.nan, "frequency_penalty must be .*got nan"),
    ("repetition_penalty", 0, "repetition_penalty must be a number from 0.01 to 100.*got 0"),
    ("seed", -1, "seed must be an integer from 0.*got -1"),
    ("seed", 2**64, "seed must be .*got 18446744073709551616"),
    ("stop_tokens", (10,), r"stop_tokens\[0\] must be an integer from 0 to 9.*got 10"),
    ("prompt_logprobs", 1, "prompt_logprobs must be True or False.*got 1"),
]
REQUEST: list[tuple[str, Any, str]] = [
    ("priority", 101, "priority must be an integer from -100 to 100.*got 101"),
    ("prompt", (), "prompt must have from 1 to 15 tokens, got 0"),
    ("prompt", (1, 10), r"prompt\[1\] must be an integer from 0 to 9.*got 10"),
    ("prompt", (1, -1), r"prompt\[1\] must be .*got -1"),
    ("prompt", (1, 2.0), r"prompt\[1\] must be .*got 2.0"),
    ("prompt", [1, 2], "prompt must be a tuple.*got a list"),
    ("prompt", (1,) * 16, "prompt must have from 1 to 15 tokens, got 16: the context has 16"),
    ("prompt", (1,) * 15, "prompt and max_tokens must fit together in the context of 16 tokens, got 15 \\+ 2 = 17"),
    ("prompt", (1,) * 12, "must need at most 3 blocks of 4 tokens, .* got 4 for 12 \\+ 2 tokens"),
    ("deadline", 1.5, "deadline must be an integer.*got 1.5"),
    ("salt", "x", "salt must be bytes.*got 'x'"),
]


@pytest.mark.parametrize(("field", "value", "words"), SAMPLING)
def test_sampling_out_of_range(field: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_request(Request((1,), Sampling(**{"max_tokens": 2, field: value})), LIMITS)


@pytest.mark.parametrize(("field", "value", "words"), REQUEST)
def test_requests_out_of_range(field: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_request(Request(**{"prompt": (1,), "sampling": Sampling(max_tokens=2), field: value}), LIMITS)


def test_the_largest_request_that_fits_is_admitted() -> None:
    check_request(Request((1,) * 11, Sampling(max_tokens=2)), LIMITS)  # the last drawn token needs no place


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=2), st.binary(max_size=2))


@given(st.sampled_from([f.name for f in dataclasses.fields(Sampling)]), VALUES)
@settings(max_examples=100, derandomize=True, database=None, deadline=None)
def test_any_value_is_refused_or_served(field: str, value: object) -> None:
    request = Request((1, 2), Sampling(**{"max_tokens": 2, field: value}))  # pyright: ignore[reportArgumentType]
    try:
        check_request(request, LIMITS)
    except ValueError as error:
        assert field in str(error) or "max_tokens" in str(error)
        return
    state, plan, _ = advance(start(LIMITS), [Add(0, "a", request)])
    for _ in range(300):
        if plan is None:
            break
        state, plan, _ = advance(state, (), [0] * plan.num_rows)
    assert state.idle


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"blocks": 1}, "blocks must be an integer of at least 2.*got 1"),
        ({"buckets": ()}, "buckets must be"),
        ({"buckets": (4, 4)}, r"buckets must be positive integers and ascend.*got \(4, 4\)"),
        ({"running": 8}, "one row more than running=8.*got 8 rows"),
        ({"context": 1.0}, "context must be .*got 1.0"),
    ],
)
def test_sizes_that_make_no_sense(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(LIMITS, **fields)
