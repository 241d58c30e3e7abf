"""Covers `inference/_requests.py` and `_limits.py`: each value out of range is refused by its name, value and range."""

import dataclasses
import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shardfn.inference import Add, Limits, Request, Sampling, advance, check_request, digest, start

LIMITS = Limits(vocab=10, context=16, blocks=4, block=4, buckets=(4, 8), running=2)

SAMPLING: list[tuple[str, Any, str]] = [
    ("temperature", math.nan, "temperature is nan; it must be a number from 0 to 100"),
    ("temperature", math.inf, "temperature is inf"),
    ("temperature", -0.1, "temperature is -0.1"),
    ("temperature", "1", "temperature is '1'; it must be a number"),
    ("top_p", 0.0, "top_p is 0.0; it must be a number above 0 and at most 1"),
    ("top_p", 1.5, "top_p is 1.5"),
    ("top_k", -1, "top_k is -1; it must be an integer from 0"),
    ("min_p", 1.1, "min_p is 1.1"),
    ("n", 10**9, "n is 1000000000; it must be an integer from 1 to 128"),
    ("n", 0, "n is 0"),
    ("n", True, "n is True"),
    ("max_tokens", 0, "max_tokens is 0; it must be an integer from 1"),
    ("max_tokens", 1.0, "max_tokens is 1.0"),
    ("presence_penalty", 3, "presence_penalty is 3; it must be a number from -2 to 2"),
    ("frequency_penalty", math.nan, "frequency_penalty is nan"),
    ("repetition_penalty", 0, "repetition_penalty is 0; it must be a number from 0.01 to 100"),
    ("seed", -1, "seed is -1; it must be an integer from 0"),
    ("seed", 2**64, "seed is 18446744073709551616"),
    ("stop_tokens", (10,), r"stop_tokens\[0\] is 10; it must be an integer from 0 to 9"),
    ("prompt_logprobs", 1, "prompt_logprobs is 1; it must be True or False"),
]
REQUEST: list[tuple[str, Any, str]] = [
    ("priority", 101, "priority is 101; it must be an integer from -100 to 100"),
    ("prompt", (), "prompt has 0 tokens; it must have from 1 to 15"),
    ("prompt", (1, 10), r"prompt\[1\] is 10; it must be an integer from 0 to 9"),
    ("prompt", (1, -1), r"prompt\[1\] is -1"),
    ("prompt", (1, 2.0), r"prompt\[1\] is 2.0"),
    ("prompt", [1, 2], "prompt is a list; it must be a tuple"),
    ("prompt", (1,) * 16, "prompt has 16 tokens; it must have from 1 to 15: the context has 16"),
    ("prompt", (1,) * 15, "prompt has 15 tokens and max_tokens is 2, together 17; they must be at most 16"),
    ("prompt", (1,) * 12, "prompt has 12 tokens and max_tokens is 2: they need 4 blocks of 4; they must be at most 3"),
    ("deadline", 1.5, "deadline is 1.5; it must be an integer"),
    ("salt", "x", "salt is 'x'; it must be bytes"),
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
    state = start(LIMITS)
    before = digest(state)
    try:
        state, plan, _ = advance(state, [Add(0, "a", request)])
    except ValueError as error:
        assert field in str(error) or "max_tokens" in str(error)
        assert digest(state) == before
        return
    for _ in range(300):
        if plan is None:
            break
        state, plan, _ = advance(state, (), [0] * plan.num_rows)
    assert state.idle


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"blocks": 1}, "blocks is 1; it must be an integer of at least 2"),
        ({"buckets": ()}, "buckets are"),
        ({"buckets": (4, 4)}, r"buckets are \(4, 4\); they must be positive integers and ascend"),
        ({"running": 8}, "running is 8, but the largest bucket has 8 rows"),
        ({"context": 1.0}, "context is 1.0"),
    ],
)
def test_sizes_that_make_no_sense(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(LIMITS, **fields)
