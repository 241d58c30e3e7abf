"""The C++ part of the way through memory: what drives the lanes of all channels of this process."""

import ctypes
import functools
import os
import pathlib
import subprocess
from typing import Any

from shardfn.kernels import NoCompilerError, build

from ._segment import NotSharedError

_ADDRESSES = ("engine_new", "channel_new", "start", "message")
_NUMBERS = ("segment_bytes", "op_state", "op_wait", "why")


class Engine:
    """Its functions and what drives all lanes of this process. Never ended: its thread may wake at any time.

    Attributes:
        bell: the number of the pipe into which others write to wake it.

    Raises:
        NotSharedError: there is none, for want of a compiler, of files that may be open, or of a thread.
    """

    def __init__(self) -> None:
        source = pathlib.Path(__file__).with_name("_memory.cpp")
        headers = [source.with_name(name) for name in ("_lanes.h", "_blocks.h", "_sum_rows.h")]
        try:
            self._library = build("memory", source, *headers, flags=("-pthread",))
        except (NoCompilerError, OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise NotSharedError(f"its C++ part cannot be built: {said}") from error
        for name in _ADDRESSES:
            getattr(self._library, name).restype = ctypes.c_void_p
        for name in _NUMBERS:
            getattr(self._library, name).restype = ctypes.c_int64
        try:
            reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise NotSharedError(f"this process cannot make the pipe that wakes it: {error.strerror}") from error
        self.bell = writing
        made: int | None = self._library.engine_new(ctypes.c_int64(reading), ctypes.c_int64(writing))
        if made is None:
            for end in (reading, writing):
                os.close(end)
            raise NotSharedError("this process cannot start a thread: its limit on processes or memory is reached")
        self._address = made

    def call(self, name: str, *args: Any) -> Any:
        """Calls a function on the engine."""
        return getattr(self._library, name)(ctypes.c_void_p(self._address), *map(_passed, args))

    def plain(self, name: str, *args: Any) -> Any:
        """Calls a function that takes no engine."""
        return getattr(self._library, name)(*map(_passed, args))


class Address(int):
    """Of memory, not a number."""


def addresses(of: "list[int]") -> Any:
    """An array of addresses."""
    return (ctypes.c_void_p * len(of))(*of)


def numbers(of: "list[int]") -> Any:
    """An array of numbers."""
    return (ctypes.c_int64 * len(of))(*of)


def engine() -> Engine:
    """The engine of this process; a fork of it has none of its threads, and so another."""
    return _engine(os.getpid())


@functools.cache
def _engine(process: int) -> Engine:
    del process
    return Engine()


def _passed(arg: Any) -> Any:
    if isinstance(arg, Address):
        return ctypes.c_void_p(arg)
    return ctypes.c_int64(arg) if isinstance(arg, int) else arg
