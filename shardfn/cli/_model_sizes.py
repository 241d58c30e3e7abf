"""Sizes and other numbers in a model's settings, checked before anything is made of them."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

from shardfn.core import raise_all

# Under the names of all families; a field that is missing or null has a default.
_SIZES = ("vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head")
_SIZES += ("num_key_value_heads", "intermediate_size", "n_inner", "head_dim", "max_position_embeddings", "n_positions")
_SIZES += ("seq_length",)
_NUMBERS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta")


def check_sizes(path: pathlib.Path, settings: Mapping[str, Any]) -> None:
    """Refuses sizes and other numbers that no model has.

    Args:
        path: of the file, for the message.
        settings: as in `config.json`.

    Raises:
        ValueError: lists the sizes that are not integers of 1 or more, and the numbers that are not above 0.
    """
    rope = settings.get("rope_parameters")
    given = {**settings, **rope} if isinstance(rope, Mapping) else dict(settings)
    found = {name: given[name] for name in (*_SIZES, *_NUMBERS) if given.get(name) is not None}
    wrong = [
        f"{name} is {x!r:.60}; it must be {'an integer of 1 or more' if name in _SIZES else 'a number above 0'}"
        for name, x in found.items()
        if isinstance(x, bool) or not isinstance(x, int if name in _SIZES else int | float) or not 0 < x < math.inf
    ]
    raise_all(ValueError, f"{path} has numbers that no model has; copy the file from the model again:", wrong)
