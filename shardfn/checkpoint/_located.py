"""Finds checkpoints by the caller's path or URL."""

import os
import re
from typing import Any

from ._directory import DirectoryStore
from ._objects import ObjectStore
from ._place import MANIFEST, Location, Store, read_manifest

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(::|://)")
_BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/[^/]")


def store_of(directory: str | os.PathLike[str]) -> Store:
    """Returns the checkpoints of a run.

    Args:
        directory: a path, or a URL that fsspec knows, as a string.

    Raises:
        TypeError: the value is neither a path nor a string.
        ValueError: a URL was converted to a path (a slash is lost), or the protocol is unknown.
        ImportError: the package for the protocol is missing.
    """
    check_directory(directory)
    text = os.fspath(directory)
    if not isinstance(directory, str) and _BROKEN_URL.match(text):
        raise ValueError(f"{directory!r} was a URL before it was made a path. Pass it as a string.")
    return ObjectStore(text) if _URL.match(text) else DirectoryStore(directory)


def check_directory(directory: Any) -> None:
    """Refuses a value that is neither a path nor a URL, such as a state in swapped arguments.

    Raises:
        TypeError: the value is neither. The message shows the correct order of the arguments.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(
            f"the directory of checkpoints must be a path or a URL, got a {type(directory).__name__}. The directory"
            " comes first: save(directory, state) and restore(directory, state)."
        )


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """Returns the steps of the complete checkpoints of a directory, or of a URL, in order.

    Example:
        >>> import tempfile
        >>> steps(tempfile.mkdtemp())
        []
    """
    return store_of(directory).steps()


def find_checkpoint(directory: str | os.PathLike[str], step: int | None = None) -> Location:
    """Returns the checkpoint at a directory, or in the directory.

    Args:
        directory: directory or URL of a single checkpoint, or of a run's checkpoints.
        step: step of the checkpoint. Default: the newest step.

    Raises:
        FileNotFoundError: no such checkpoint exists. The message lists the existing checkpoints.
        DamagedError: `step` is given for the directory of a single checkpoint, but the manifest with the number has
            changed.
    """
    store = store_of(directory)
    one = store.itself()
    if one.size(MANIFEST) >= 0:
        if step is not None and (own := read_manifest(one).step) != step:
            raise FileNotFoundError(
                f"{one} is the checkpoint of step {own}, not of step {step}. Pass the directory of the run, or leave"
                " the step out."
            )
        return one
    found = store.steps()
    if found and (step is None or step in found):
        return store.at(found[-1] if step is None else step)
    raise store.absent(step, found)
