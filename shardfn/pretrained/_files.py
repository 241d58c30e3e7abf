"""Files of models, read so that a message names a damaged or wrong file.

`generation_config.json` of a model: values of sampling recommended by the authors, where a user gives none.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from shardfn.inference import Limits, Request, Sampling, check_request


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
        ValueError: the file is not JSON, or not an object. The message names the file.
    """
    with name_file_in_errors(path, "its JSON"):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} must contain a JSON object, got a {type(found).__name__}.")
    return found


@contextlib.contextmanager
def name_file_in_errors(path: pathlib.Path, part: str) -> Iterator[None]:
    """Turns errors of packages that read a model's files into refusals that name the files.

    Args:
        path: path of the model.
        part: words for the part to read.

    Raises:
        ValueError: has the path, the part and the error.
    """
    try:
        yield
    except (OSError, ImportError):
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        text = " ".join(str(error).split())
        raise ValueError(f"{path}: {part} cannot be read: {kind}{text}") from error


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
            f"{path}: {str(error).removesuffix('.')}. Correct the file, or pass --generation-config none."
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
