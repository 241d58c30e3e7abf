"""The engine that moves the bytes of all channels of this process, in C++ (`_memory.cpp`)."""

import ctypes
import functools
import os
import subprocess
from typing import Any

from shardfn.kernels import NoCompilerError, load_library

from ._segment import NotSharedError

_ADDRESSES = ("engine_new", "channel_new", "start", "message")
_NUMBERS = ("segment_bytes", "op_state", "op_wait", "why")


class TransportEngine:
    """Functions of `_memory.cpp`, and the thread that drives all lanes of this process. Never ended.

    Attributes:
        bell: the number of the pipe that wakes the thread when another process writes.

    Raises:
        NotSharedError: the library cannot be built, no more files may be open, or no thread can be started.
    """

    def __init__(self) -> None:
        built = _load_library()
        if isinstance(built, str):
            raise NotSharedError(f"its C++ part cannot be built: {built}")
        self._library = built
        try:
            # The thread sleeps until another rank, or this program, writes a byte.
            reading, self.bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise NotSharedError(f"this process cannot make the pipe that wakes it: {error.strerror}") from error
        made: int | None = built.engine_new(ctypes.c_int64(reading), ctypes.c_int64(self.bell))
        if made is None:
            for end in (reading, self.bell):
                os.close(end)
            raise NotSharedError("this process cannot start a thread: its limit on processes or memory is reached")
        self._address = made

    def call(self, name: str, *args: Any) -> Any:
        """Calls a function on the engine."""
        return getattr(self._library, name)(ctypes.c_void_p(self._address), *map(_pass_argument, args))

    def plain(self, name: str, *args: Any) -> Any:
        """Calls a function that takes no engine."""
        return getattr(self._library, name)(*map(_pass_argument, args))


class Address(int):
    """Memory address, passed to the engine as a pointer."""


def addresses(of: "list[int]") -> Any:
    """Returns an array of addresses."""
    return (ctypes.c_void_p * len(of))(*of)


def numbers(of: "list[int]") -> Any:
    """Returns an array of numbers."""
    return (ctypes.c_int64 * len(of))(*of)


def engine() -> TransportEngine:
    """Returns the engine of this process. A fork makes another engine, as threads do not survive a fork.

    Raises:
        NotSharedError: as `TransportEngine`.
    """
    return _engine_of(os.getpid())


@functools.cache
def _engine_of(process: int) -> TransportEngine:
    del process
    return TransportEngine()


@functools.cache
def _load_library() -> ctypes.CDLL | str:
    """Returns the compiled functions, or the reason for their absence.

    Cached, so that a compiler that fails runs once.
    """
    try:
        built = load_library("collectives/transport/_memory.cpp")
    except (NoCompilerError, OSError, subprocess.SubprocessError) as error:
        return (getattr(error, "stderr", None) or str(error)).strip()
    for name in _ADDRESSES:
        getattr(built, name).restype = ctypes.c_void_p
    for name in _NUMBERS:
        getattr(built, name).restype = ctypes.c_int64
    return built


def _pass_argument(arg: Any) -> Any:
    if isinstance(arg, Address):
        return ctypes.c_void_p(arg)
    return ctypes.c_int64(arg) if isinstance(arg, int) else arg
