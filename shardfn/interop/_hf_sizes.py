"""Checks sizes and other numbers in a `config.json`, before any use."""

import sys
from collections.abc import Mapping
from typing import Any

from shardfn.core import raise_all

# Under the names of all families. A missing field, or null, has a default. Layers are made one by one.
_MOST = 2**31 - 1
_SIZES = dict.fromkeys(("num_hidden_layers", "n_layer"), 10_000)
_SIZES |= dict.fromkeys(("vocab_size", "hidden_size", "n_embd", "n_embed", "intermediate_size", "n_inner"), _MOST)
_SIZES |= dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), _MOST)
_SIZES |= dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "sliding_window"), _MOST)
_NUMBERS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta")


def check_sizes(told: Mapping[str, Any], where: object = "config.json") -> None:
    """Refuses sizes and other numbers that no model has.

    Args:
        told: contents of `config.json`.
        where: place of the contents, for the message.

    Raises:
        ValueError: sizes are not integers from 1 to 2**31 - 1 (layers: to 10,000), or numbers are not above 0, or not
            finite. Lists all.

    Example:
        >>> check_sizes({"hidden_size": 64, "num_hidden_layers": 2})
        >>> check_sizes({"hidden_size": 6.4})
        Traceback (most recent call last):
        ValueError: config.json has numbers that no model has. Copy the file from the model again:
          - hidden_size is 6.4; it must be an integer of 1 or more, and at most 2147483647
    """
    inside = [x for name in ("rope_scaling", "rope_parameters") if isinstance(x := told.get(name), Mapping)]
    given = {name: x for part in (told, *inside) for name, x in part.items()}
    wrong = [
        f"{name} is {x!r:.60}; it must be an integer of 1 or more, and at most {most}"
        for name, most in _SIZES.items()
        if (x := given.get(name)) is not None and (type(x) is not int or not 1 <= x <= most)
    ]
    wrong += [
        f"{name} is {x!r:.60}; it must be a finite number above 0"
        for name in _NUMBERS
        if (x := given.get(name)) is not None and (type(x) not in (int, float) or not 0 < x <= sys.float_info.max)
    ]
    raise_all(ValueError, f"{where} has numbers that no model has. Copy the file from the model again:", wrong)
