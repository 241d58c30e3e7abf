"""`Sink`: a place for the rows of a run, and delivery to the place. A sink that fails does not stop the run."""

import importlib
import logging
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from shardfn.core import a_kind, raise_all

_LOG = logging.getLogger("shardfn.metrics")
# After a failure rows wait for 1, 2, 4, ... further writes, up to this many, so that a slow failure costs little.
_LONGEST_WAIT = 256


class Sink(Protocol):
    """Place for the rows of a run, such as a file or a tracking service. Any object with these three methods is a sink.

    `Logger` only calls a sink on the first rank. An error of `open` stops the run before the first step. An error of
    `write` or `close` does not: the row is passed again later.

    Example:
        >>> class Printer:
        ...     def open(self, folder, start):
        ...         pass
        ...     def write(self, step, row):
        ...         print(step, row)
        ...     def close(self):
        ...         pass
        >>> import tempfile
        >>> from shardfn.metrics import Logger
        >>> with Logger(tempfile.mkdtemp(), sinks=[Printer()]) as logger:
        ...     _ = logger.write(1, {"loss": 0.5})
        1 {'loss': 0.5}
    """

    def open(self, folder: pathlib.Path, start: int) -> None:
        """Begins.

        Args:
            folder: folder of the logger. The folder exists.
            start: step from which a run resumes, and 0 for a new run. Rows of later steps will come again.
        """
        ...

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Takes the metrics of a step. A step may have several rows."""
        ...

    def close(self) -> None:
        """Ends. No row comes afterwards."""
        ...


class Delivery:
    """Passes the rows of a list to a sink, in order. Rows that the sink refuses are passed again later.

    Args:
        sink: sink, open.
        done: number of rows that the sink already has.
    """

    def __init__(self, sink: Sink, done: int) -> None:
        self._sink, self._done = sink, done
        # No attempt is made before the list has this many rows.
        self._next, self._wait, self._warned = 0, 1, False

    def send(self, rows: Sequence[Mapping[str, float]], *, now: bool = False) -> None:
        """Passes all rows that the sink lacks. `now`: also shortly after a failure."""
        if len(rows) < self._next and not now:
            return
        try:
            while self._done < len(rows):
                row = dict(rows[self._done])
                self._sink.write(int(row.pop("step")), row)
                self._done += 1
            self._wait = 1
        except Exception as error:
            self._next, self._wait = len(rows) + self._wait, min(2 * self._wait, _LONGEST_WAIT)
            self._note_failure(f"could not write step {rows[self._done]['step']}", error)

    def close(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Passes the remaining rows, and closes the sink."""
        self.send(rows, now=True)
        if self._done < len(rows):
            _LOG.error("%s lacks the last %d rows", type(self._sink).__name__, len(rows) - self._done)
        try:
            self._sink.close()
        except Exception as error:
            self._note_failure("could not be closed", error)

    def _note_failure(self, event: str, error: Exception) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"Logger: {type(self._sink).__name__} {event} ({type(error).__name__}: {error}). Training goes on, other"
            " sinks are not affected, and the row is given to it again later. This is its only warning.",
            stacklevel=4,
        )


def check_sinks(sinks: Sequence[Any]) -> None:
    """Raises if a value is no sink. The message lists all such values.

    Raises:
        TypeError: a value is no sink. The message has the remedy.
    """
    problems = []
    for i, sink in enumerate(sinks):
        lacks = [name for name in ("open", "write", "close") if not callable(getattr(sink, name, None))]
        if isinstance(sink, type):
            problems.append(f"sinks[{i}] is the class {sink.__name__}; make one: {sink.__name__}()")
        elif lacks:
            problems.append(f"sinks[{i}], {a_kind(sink)}, lacks {', '.join(lacks)}")
    raise_all(
        TypeError, "Logger(sinks=) takes objects with open(folder, start), write(step, row) and close():", problems
    )


def package(name: str, needs: str, *parts: str) -> list[ModuleType]:
    """Imports modules of a package that is not required.

    Args:
        name: name for pip.
        needs: user's call that needs the package.
        *parts: modules. Without any, the package.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    try:
        return [importlib.import_module(part) for part in parts or (name,)]
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{needs} needs the package {name}, which cannot be imported ({error}): pip install {name}, or"
            " leave the sink out. metrics.jsonl is written anyway."
        ) from error
