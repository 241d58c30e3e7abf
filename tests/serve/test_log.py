"""Covers lines for the user: nothing waits for their reader, their number is bounded, and those of ranks are kept."""

import asyncio
import logging
import sys
import threading

import pytest

from shardfn.serve import _log
from shardfn.serve._ipc import WorkerProcesses
from shardfn.serve._log import Log, reporting_records


def test_a_reader_that_stops_loses_lines_and_nothing_else() -> None:
    waits, reads, lines = threading.Event(), threading.Event(), list[str]()

    def write(line: str) -> None:
        waits.set()
        assert reads.wait(20)
        lines.append(line)

    log = Log(write)
    log("first")
    assert waits.wait(20)
    for i in range(3000):
        log(str(i))  # never waits
    log.close()
    assert not lines
    reads.set()
    log.close()
    assert lines[:2] == ["first", "2000 lines were left out, as nothing read them\n0"]
    assert lines[2:] == [str(i) for i in range(1, 1000)]


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    lines = list[str]()

    def write(line: str) -> None:
        if line == "full":
            raise OSError(28, "No space left on device")
        lines.append(line)

    log = Log(write)
    for line in ("one", "full", "two"):
        log(line)
    log.close()
    assert lines == ["one", "two"]


def test_records_that_clients_cause_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, logger = list[str](), logging.getLogger("uvicorn.error")
    with reporting_records(lines.append):
        for i in range(2000):
            logger.warning("Invalid HTTP request received: %d", i)
        assert len(lines) == 10 and lines[0] == "shardfn serve: Invalid HTTP request received: 0"
        monkeypatch.setattr(_log, "_SECONDS", 0.0)
        logger.warning("another")
    assert lines[10:] == ["shardfn serve: 1990 more messages were left out", "shardfn serve: another"]
    logger.warning("after the end")
    assert len(lines) == 12


def test_lines_of_ranks_are_reported_however_many_they_are() -> None:
    program = (
        "import os, sys; os.write(2, b'bar 1\\rbar 2\\n' + b'x' * 99 + b'\\n');"
        "os.write(2, b'y\\n' * 200_000 + b'no end \\xff')"
    )
    lines = list[str]()

    async def main() -> None:
        ranks = WorkerProcesses(lambda end: [sys.executable, "-c", program], 1, report=lines.append)
        await ranks.start()
        assert await ranks.first_end() == (0, 0)  # it was never held up
        await ranks.end()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert lines[:3] == ["bar 2", "x" * 99, "y"] and len(lines) == 200_003 and lines[-1] == "no end \ufffd"
