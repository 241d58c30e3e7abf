"""Sizes of config.json that are not integers, such as 1e12, are refused by name."""

import pytest

from shardfn.interop import gpt_config

TOLD = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 64}


@pytest.mark.parametrize(
    ("name", "field"),
    [("vocab_size", "vocab_size"), ("num_hidden_layers", "num_layers"), ("intermediate_size", "d_ff")],
)
@pytest.mark.parametrize("size", [1e12, 64.0, True])
def test_a_size_that_is_not_an_integer_is_refused(name: str, field: str, size: object) -> None:
    with pytest.raises(ValueError, match=f"{field}={size}".replace("+", r"\+") + " is not an integer"):
        gpt_config({**TOLD, "intermediate_size": 64, name: size})
