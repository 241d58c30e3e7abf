"""Files of models, read so that a message names a damaged or wrong file."""

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object of a file of JSON.

    Raises:
        ValueError: the file is not JSON, or not an object. The message names the file.
    """
    with name_file_in_errors(path, "its JSON"):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} has a {type(found).__name__}; it must have an object of JSON.")
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
