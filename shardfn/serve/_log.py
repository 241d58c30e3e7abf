"""Lines for the user that never hold a server up: one thread writes lines, and surplus lines are left out."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

_WAITING = 1000  # lines that wait for a slow reader
_SECONDS, _RECORDS = 10.0, 10  # in this time at most this number of records of other packages
_LAST = 1.0  # seconds in which the last lines are written


class Log:
    """Writer of lines in a thread, in order. A reader that stops, or a full disk, loses only lines.

    Args:
        write: function that writes a line. The function may wait, and may fail.

    Example:
        >>> lines = []
        >>> log = Log(lines.append)
        >>> log("ready")
        >>> log.close()
        >>> lines
        ['ready']
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._left_out = write, 0
        self._lines = queue.Queue[str | None](_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="shardfn-serve-log", daemon=True)
        self._thread.start()

    def __call__(self, line: str) -> None:
        """Queues a line of the log, or drops the line if too many lines wait."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._left_out += 1

    def close(self) -> None:
        """Waits until all lines are written, for a second at most."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(_LAST)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            left_out, self._left_out = self._left_out, 0
            if left_out:
                line = f"{left_out} lines were left out, as nothing read them\n{line}"
            with contextlib.suppress(Exception):
                self._write(line)


class _RecordReporter(logging.Handler):
    """Reporter of other packages' records, a bounded number in a time: clients can cause any number."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report, self._begin, self._num, self._left_out = report, -_SECONDS, 0, 0

    def emit(self, record: logging.LogRecord) -> None:
        """Reports a record, or only counts the record."""
        now = time.monotonic()
        if now - self._begin >= _SECONDS:
            if self._left_out:
                self._report(f"shardfn serve: {self._left_out} more messages were left out")
            self._begin, self._num, self._left_out = now, 0, 0
        self._num += 1
        if self._num > _RECORDS:
            self._left_out += 1
        else:
            self._report(f"shardfn serve: {self.format(record)}")


@contextlib.contextmanager
def reporting_records(report: Callable[[str], None]) -> Iterator[None]:
    """Reports records of packages such as uvicorn. Such packages would write to stderr and wait there."""
    handler = _RecordReporter(report)
    loggers = [logging.getLogger(name) for name in ("uvicorn", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
