"""What drives the lanes of all channels of this process: in C++, or in Python where there is no compiler."""

import ctypes
import functools
import os
import pathlib
import subprocess
import warnings
from collections.abc import Callable
from typing import Any

from shardfn.kernels import NoCompilerError, build

from ._bell import bell
from ._python_engine import PythonEngine
from ._segment import NotSharedError

_ADDRESSES = ("engine_new", "channel_new", "start", "message")
_NUMBERS = ("segment_bytes", "op_state", "op_wait", "why")


class CompiledEngine:
    """The functions of `_memory.cpp`, and what drives all lanes of this process. Never ended: it may wake at any time.

    Attributes:
        bell: the number of the pipe into which others write to wake it.

    Raises:
        NotSharedError: there are no files that may be open, or no thread, to be had.
        NoCompilerError, OSError, subprocess.SubprocessError: as `shardfn.kernels.build`.
    """

    def __init__(self) -> None:
        source = pathlib.Path(__file__).with_name("_memory.cpp")
        headers = [source.with_name(name) for name in ("_lanes.h", "_blocks.h", "_sum_rows.h")]
        self._library = build("memory", source, *headers, flags=("-pthread",))
        for name in _ADDRESSES:
            getattr(self._library, name).restype = ctypes.c_void_p
        for name in _NUMBERS:
            getattr(self._library, name).restype = ctypes.c_int64
        reading, self.bell = bell()
        made: int | None = self._library.engine_new(ctypes.c_int64(reading), ctypes.c_int64(self.bell))
        if made is None:
            for end in (reading, self.bell):
                os.close(end)
            raise NotSharedError("this process cannot start a thread: its limit on processes or memory is reached")
        self._address = made

    def call(self, name: str, *args: Any) -> Any:
        """Calls a function on the engine."""
        return getattr(self._library, name)(ctypes.c_void_p(self._address), *map(_passed, args))

    def plain(self, name: str, *args: Any) -> Any:
        """Calls a function that takes no engine."""
        return getattr(self._library, name)(*map(_passed, args))

    def defers(self, closing: Callable[[], object]) -> bool:
        """Its thread runs no Python, and so closes nothing."""
        del closing
        return False


Engine = CompiledEngine | PythonEngine


class Address(int):
    """Of memory, not a number."""


def addresses(of: "list[int]") -> Any:
    """An array of addresses."""
    return (ctypes.c_void_p * len(of))(*of)


def numbers(of: "list[int]") -> Any:
    """An array of numbers."""
    return (ctypes.c_int64 * len(of))(*of)


def engine() -> Engine:
    """The engine of this process; a fork of it has none of its threads, and so another.

    Raises:
        NotSharedError: it can have none.
    """
    return _engine(os.getpid())


@functools.cache
def _engine(process: int) -> Engine:
    del process
    return new_engine()


def new_engine() -> Engine:
    """In C++; without a compiler in Python, which writes the same memory. A compiler that fails is warned of.

    Raises:
        NotSharedError: neither can be had.
    """
    try:
        return CompiledEngine()
    except NoCompilerError as error:
        why = str(error)
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"shardfn's C++ part was not built, and ranks share memory by Python instead:\n{why}", stacklevel=2
        )
    try:
        return PythonEngine()
    except NotSharedError as error:
        raise NotSharedError(f"its C++ part cannot be built: {why}; {error}") from error


def _passed(arg: Any) -> Any:
    if isinstance(arg, Address):
        return ctypes.c_void_p(arg)
    return ctypes.c_int64(arg) if isinstance(arg, int) else arg
