"""Covers policies of codes: the first pattern that fits counts, and wrong ones are named."""

import pytest

from shardfn.core import check_policy, find_quantization

NAMES = ["embed", "blocks.0.wq", "blocks.1.wq"]


def test_the_first_pattern_counts() -> None:
    policy = {"embed": "int8", r"blocks\.1": None, "": "int4"}
    assert [find_quantization(policy, name) for name in NAMES] == ["int8", "int4", None]
    assert find_quantization({"embed": "int8"}, "blocks.0.wq") is None
    assert find_quantization("int4", "embed") == "int4" and find_quantization(None, "embed") is None
    for right in (policy, "int8", None):
        check_policy(right, NAMES, "pack")


def test_wrong_policies_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"pack: quantization= does not fit:\n  - quantization='int5': 'int8' or 'int4'"
    ):
        check_policy("int5", NAMES, "pack")
    words = r"(?s)quantization='int2' of 'embed'.*the pattern 'head' of quantization= matches no name of a linear"
    with pytest.raises(ValueError, match=words):
        check_policy({"embed": "int2", "head": "int8"}, NAMES, "pack")
