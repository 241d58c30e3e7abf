"""Covers shardfn/data/_permute.py: digests of data sets, by which a position recognises them."""

from typing import Any

import numpy as np
import pytest
import torch

from shardfn.data._permute import digest_examples, sampled_rows


def test_rows_are_sampled_at_equal_distances() -> None:
    for count in (0, 1, 63, 64, 65, 10**9):
        rows = sampled_rows(count)
        assert len(rows) == min(count, 64) and rows == sorted(set(rows))
        assert not count or (rows[0], rows[-1]) == (0, count - 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([[1, 2]], [[1, 3]]),
        ([[1, 2], [3]], [[1], [2, 3]]),
        (["1"], [1]),
        ([{"a": 1, "b": 2}], [{"a": 2, "b": 1}]),
        ([b"a", b""], [b"", b"a"]),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        (np.zeros(2, np.int32), np.zeros(2, np.int64)),
    ],
    ids=["value", "lengths", "type", "names", "order", "shape", "bfloat16", "dtype"],
)
def test_other_rows_have_another_digest(one: Any, other: Any) -> None:
    assert digest_examples(one) is not None
    assert digest_examples(one) != digest_examples(other)
    assert digest_examples(one) == digest_examples(one)


def test_the_order_of_names_does_not_count() -> None:
    assert digest_examples([{"a": 1, "b": 2}]) == digest_examples([{"b": 2, "a": 1}])


def test_rows_that_are_not_plain_have_no_digest() -> None:
    assert digest_examples([object()]) is None
    assert digest_examples([[1, {"a": object()}]]) is None
