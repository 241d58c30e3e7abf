"""Sizes of config.json that are not integers, such as 1e12, are refused by name."""

import re

import pytest

from shardfn.interop import gpt_config

TOLD = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 64}


@pytest.mark.parametrize("name", ["vocab_size", "num_hidden_layers", "intermediate_size"])
@pytest.mark.parametrize("size", [1e12, 64.0, True])
def test_a_size_that_is_not_an_integer_is_refused(name: str, size: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name} is {size}; it must be an integer of 1 or more")):
        gpt_config({**TOLD, "intermediate_size": 64, name: size})
