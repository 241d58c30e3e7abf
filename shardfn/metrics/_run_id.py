"""Id of a tracking service's run, in a file, so that a run that resumes goes on with the same id."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator


@dataclasses.dataclass
class RunId:
    """Id of a run, None before a run begins."""

    value: str | None


@contextlib.contextmanager
def stored_id(path: pathlib.Path, start: int) -> Iterator[RunId]:
    """Yields the id in a file, for a run that resumes. When the body ends, the new id is in the file."""
    had = path.read_text(encoding="utf-8").strip() if start and path.exists() else ""
    known = RunId(had or None)
    yield known
    if known.value is not None and known.value != had:
        path.write_text(f"{known.value}\n", encoding="utf-8")
