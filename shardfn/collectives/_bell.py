"""The pipe that wakes a process: its thread sleeps until another rank, or its own program, writes a byte."""

import contextlib
import os

from ._segment import NotSharedError


def bell() -> tuple[int, int]:
    """Its two ends, for reading and for writing; neither ever waits.

    Raises:
        NotSharedError: no more files may be open.
    """
    try:
        return os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotSharedError(f"this process cannot make the pipe that wakes it: {error.strerror}") from error


def ring(pipe: int) -> None:
    """Wakes whoever sleeps at the other end; a full pipe wakes as well."""
    with contextlib.suppress(OSError):
        os.write(pipe, b"\0")


def silence(pipe: int) -> None:
    """Takes out all that has been written."""
    with contextlib.suppress(OSError):
        while len(os.read(pipe, 4096)) == 4096:
            pass
