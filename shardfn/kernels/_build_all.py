"""Builds all C++ of the package ahead, for the processor at hand, several files at a time."""

import pathlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

from shardfn.waits import waiting

from . import _sources
from ._build import NoCompilerError, built_file, cache_file, generation


class Built(NamedTuple):
    """C++ file that was built, or could not be built.

    Attributes:
        name: name of the op or part.
        state: "shipped" with the package, "was there" in the cache, "built" now, or the message of an error.
        path: path of the library, or None after an error.
    """

    name: str
    state: str
    path: pathlib.Path | None


def build_all() -> Iterator[Built]:
    """Builds the C++ of all ops, on all processors available to the process, and yields each file when ready."""
    with (
        waiting("building all C++", total=len(_sources.FLAGS)) as wait,
        ThreadPoolExecutor(_sources.num_processors(), "shardfn-build") as threads,
    ):
        for done in as_completed([threads.submit(_build_forms, source) for source in _sources.FLAGS]):
            wait.update()
            yield done.result()


def _build_forms(source: str) -> Built:
    name, form = _sources.name_of(source), generation()
    try:
        shipped = _sources.SHIPPED / _sources.file_of(source, form)
        if shipped.exists():
            return Built(name, "shipped", shipped)
        state = "was there" if cache_file(source, form).exists() else "built"
        return Built(name, state, built_file(source, form))
    except (NoCompilerError, OSError, subprocess.SubprocessError) as error:
        return Built(name, (getattr(error, "stderr", None) or str(error)).strip(), None)
