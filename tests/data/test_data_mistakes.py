"""Covers mistakes with examples that are collated into a batch."""

from typing import Any

import pytest

from shardfn.data import pad
from tests.mistakes import Mistake, cases, check


def _collated(*examples: Any) -> Any:
    return pad(4)(list(examples))


MISTAKES = [
    Mistake("the examples are texts", lambda: _collated("a b", "c"),
            TypeError, "example 0 of the batch is a text ... example 1 of the batch is a text",
            "tokenizer(text)['input_ids']"),
    Mistake("the tokens have another name", lambda: _collated({"input_ids": [1, 2]}),
            TypeError, "example 0 of the batch has ['input_ids']", "write {'tokens': example['input_ids']}"),
    Mistake("an example is too long", lambda: _collated([1] * 9),
            ValueError, "a row of 4 tokens: example 0 of the batch has 9 tokens", "cut it, or take length=9"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", cases(MISTAKES))
def test_a_mistake_is_refused_with_its_remedy(mistake: Mistake) -> None:
    check(mistake)
