"""`generation_config.json` of a model: values of sampling recommended by the authors, where a user gives none."""

import argparse
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from shardfn.inference import Limits, Request, Sampling, check_request

from ._generate_files import object_of

NAME = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MANY = 1 << 40
_ANYTHING = Limits(vocab=_MANY, context=_MANY, blocks=_MANY)


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the option that ignores the file."""
    text = f"auto: {', '.join(FIELDS)} and tokens that end a text are those of MODEL's {NAME}, unless they are given;"
    text += " none: the file is ignored (default %(default)s)"
    parser.add_argument("--generation-config", choices=("auto", "none"), default="auto", help=text)


def read_sampling(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the values of `Sampling` in a model's directory, or an empty dict without the file.

    Raises:
        ValueError: a value is out of range. The message names the file, the value and the remedy.
    """
    path = folder / NAME
    given = object_of(path) if path.is_file() else {}
    found = {name: given[name] for name in FIELDS if given.get(name) is not None}
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
    return f"sampling of {NAME}, where none is given: {values}"
