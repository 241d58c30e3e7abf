"""Sizes in a model's settings, checked before anything is made of them."""

import pathlib
from collections.abc import Mapping
from typing import Any

from shardfn.core import raise_all

# Under the names of all families; a field that is missing or null has a default.
_SIZES = ("vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head")
_SIZES += ("num_key_value_heads", "intermediate_size", "n_inner", "head_dim", "max_position_embeddings", "n_positions")
_SIZES += ("seq_length",)


def check_sizes(path: pathlib.Path, settings: Mapping[str, Any]) -> None:
    """Refuses sizes that no model has.

    Args:
        path: of the file, for the message.
        settings: as in `config.json`.

    Raises:
        ValueError: lists the fields that are not integers of 1 or more.
    """
    given = {name: settings[name] for name in _SIZES if settings.get(name) is not None}
    wrong = [
        f"{name} is {x!r:.60}; it must be an integer of 1 or more"
        for name, x in given.items()
        if not isinstance(x, int) or isinstance(x, bool) or x < 1
    ]
    raise_all(ValueError, f"{path} has sizes that no model has; copy the file from the model again:", wrong)
