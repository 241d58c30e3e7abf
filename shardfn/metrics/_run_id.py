"""The id of a tracking service's run, in a file, so that a run that resumes goes on with it."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator


@dataclasses.dataclass
class RunId:
    """An id. None until there is one."""

    value: str | None


@contextlib.contextmanager
def stored_id(path: pathlib.Path, start: int) -> Iterator[RunId]:
    """The id that a file has, for a run that resumes. When the body ends, the file has the id that it was given."""
    had = path.read_text(encoding="utf-8").strip() if start and path.exists() else ""
    known = RunId(had or None)
    yield known
    if known.value is not None and known.value != had:
        path.write_text(f"{known.value}\n", encoding="utf-8")
