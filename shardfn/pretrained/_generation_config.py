"""`generation_config.json` of a model: values of sampling recommended by the authors, where a user gives none."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from shardfn.inference import Limits, Request, Sampling, check_request

from ._files import read_json_object

GENERATION_CONFIG = "generation_config.json"
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MANY = 1 << 40
_ANYTHING = Limits(vocab=_MANY, context=_MANY, blocks=_MANY)


def read_sampling(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the values of `Sampling` in a model's directory, or an empty dict without the file.

    Raises:
        ValueError: a value is out of range. The message names the file, the value and the remedy.
    """
    path = folder / GENERATION_CONFIG
    given = read_json_object(path) if path.is_file() else {}
    found = {name: given[name] for name in SAMPLING_FIELDS if given.get(name) is not None}
    if found.get("top_k") == -1:  # all tokens, in vLLM's words
        found["top_k"] = 0
    try:
        check_request(Request((0,), dataclasses.replace(Sampling(), **found)), _ANYTHING)
    except ValueError as error:
        raise ValueError(
            f"{path}: {str(error).removesuffix('.')}; mend it, or take --generation-config none."
        ) from error
    return found


def describe_sampling(found: Mapping[str, float]) -> str:
    """Returns the values in words, and the source.

    Example:
        >>> describe_sampling({"temperature": 0.6, "top_p": 0.95})
        'sampling of generation_config.json, where none is given: temperature 0.6, top_p 0.95'
    """
    values = ", ".join(f"{name} {value}" for name, value in found.items())
    return f"sampling of {GENERATION_CONFIG}, where none is given: {values}"
