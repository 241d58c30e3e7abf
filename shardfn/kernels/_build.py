"""Loads the C++ of the package: files that a wheel ships, or files built at the first use.

The sources include only the headers of the language. A file is built for the processor's generation of x86-64 (for
example v3, with AVX2), and kept in the user's cache, under a name made of sources and flags. Where processes start
together, a single process builds a file, and the rest wait, but no longer than a compiler may take. The system frees
the lock when the process ends. Files are renamed into their place, so that no process loads half a file.
"""

import contextlib
import ctypes
import functools
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardfn.waits import is_first, waiting

from . import _sources

_PERIOD = 0.02
_BUILDING = "building-"  # begins the names of temporary folders
SHARED, _POOL = "_shared.cpp", "_pool.cpp"
# The newest generation of x86-64 whose code may run, if the processor has the generation. Tests set older generations.
NEWEST = 4


class NoCompilerError(Exception):
    """C++ cannot be built here: there is no compiler, or the sources are not written for this system."""


def library(source: str = SHARED) -> ctypes.CDLL | None:
    """Returns the functions of a C++ file of the room.

    None, with a warning, without a compiler.

    Raises:
        RuntimeError: the compiler fails, or the built file cannot be written or loaded.
    """
    return _load_library(source, generation())


def generation() -> int:
    """Returns the newest generation of x86-64 that runs here, for example 3, or 0 on other processors."""
    return min(NEWEST, _sources.processor())


@functools.cache
def _load_library(source: str, generation: int) -> ctypes.CDLL | None:
    try:
        return _share_pool(load_library(f"kernels/{source}", generation))
    except NoCompilerError as error:
        _warn_once(str(error))
        return None
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise RuntimeError(
            f"{cxx_compiler()} must build shardfn's kernels, but did not build {source}. Repair the compiler, set"
            f" XDG_CACHE_HOME to a folder that can be written, or take the compiler off the PATH to run slow kernels of"
            f" plain torch. Got:\n{said}"
        ) from error


@functools.cache
def _warn_once(reason: str) -> None:
    if is_first():
        warnings.warn(
            f"{reason}, so shardfn's kernels run in plain torch, with the same results but more slowly. Install a"
            " compiler (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; conda: conda install"
            " cxx-compiler), or a wheel of shardfn that has the kernels built.",
            stacklevel=5,
        )


def load_library(source: str, generation: int | None = None) -> ctypes.CDLL:
    """Loads a C++ file of the package, and builds it before, unless it is shipped or built already.

    Args:
        source: path of the file, from the package on.
        generation: generation of x86-64 that the file is compiled for. Default: the processor's generation.

    Raises:
        NoCompilerError: there is no compiler, or the sources are not written for this system.
        OSError: the built file cannot be written or loaded.
        subprocess.SubprocessError: the compiler failed.
    """
    form = min(NEWEST, _sources.processor()) if generation is None else generation
    shipped = _sources.SHIPPED / _sources.file_of(source, form)
    if shipped.exists():
        with contextlib.suppress(OSError):  # the system is older than the wheel's
            return ctypes.CDLL(str(shipped))
    return ctypes.CDLL(str(built_file(source, form)))


def built_file(source: str, generation: int) -> pathlib.Path:
    """Builds a C++ file of the package, unless it is in the user's cache, and returns its path.

    Args:
        source: path of the file, from the package on.
        generation: generation of x86-64 that the file is compiled for.

    Raises:
        NoCompilerError: as `load_library`.
        OSError: as `load_library`.
        subprocess.SubprocessError: as `load_library`.
    """
    path, flags = cache_file(source, generation), _sources.flags_of(source, generation)
    return _compile_source(_sources.name_of(source), path.name, _sources.PACKAGE / source, flags)


def cache_file(source: str, generation: int) -> pathlib.Path:
    """Returns the path in the user's cache of a C++ file of the package, built or not.

    Raises:
        NoCompilerError: as `load_library`.
    """
    return _cache_folder() / _sources.file_of(source, generation, *_describe_compiler())


def _describe_compiler() -> tuple[str, ...]:
    """Returns the compiler and the system: with sources and flags these determine the machine code."""
    compiler = cxx_compiler()
    if os.name != "posix" or sys.byteorder != "little":
        raise NoCompilerError(
            f"the C++ of shardfn needs a POSIX system and little-endian numbers, got {os.name!r} and {sys.byteorder!r}"
        )
    if compiler is None:
        raise NoCompilerError("there is no C++ compiler (c++, g++ or clang++)")
    return compiler, platform.machine(), *platform.libc_ver()


@contextlib.contextmanager
def building(device: torch.device, names: Sequence[str]) -> Iterator[None]:
    """Returns a context that builds and loads the C++ of kernels during the body, several files at a time.

    The context ends after the builds. Calls of kernels in the body wait only for the file of the called kernel.

    Args:
        device: device of the tensors. Nothing is built for other devices than CPUs.
        names: names of the C++ files, for example "row_norm". Files that take long come first.

    Example:
        >>> with building(torch.device("cpu"), ["row_norm"]):
        ...     x = torch.ones(2, 3)
    """
    asked = [*(f"_{name}.cpp" for name in names), SHARED, _POOL] if device.type == "cpu" else []
    with ThreadPoolExecutor(_sources.num_processors(), "shardfn-build") as threads:
        made = [threads.submit(library, source) for source in asked]
        yield
    for future in made:
        future.result()  # raises the error of a build, and warnings that are errors


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


def build(name: str, source: pathlib.Path, *included: pathlib.Path, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Builds a C++ source of any program and loads it as a library.

    Args:
        name: name of the file in the cache.
        source: the file to build.
        included: files that the source includes by paths not relative to the source.
        flags: flags for the compiler, added to the flags of all sources.

    Raises:
        NoCompilerError: there is no compiler, or the sources are not written for this system.
        OSError: the built file cannot be written or loaded.
        subprocess.SubprocessError: the compiler failed.
    """
    flags = (*_sources.COMMON, *flags)
    key = _sources.digest(source, flags, *_describe_compiler(), *(path.read_text() for path in included))
    return ctypes.CDLL(str(_compile_source(name, f"{name}-{key}.so", source, flags)))


def _share_pool(found: ctypes.CDLL) -> ctypes.CDLL:
    """Returns a library that works with the thread pool of the process, if the library shares work."""
    if hasattr(found, "use_pool") and (pool := library(_POOL)) is not None:
        found.use_pool(ctypes.cast(pool.share_work, ctypes.c_void_p))
    return found


def cxx_compiler() -> str | None:
    """Returns the path of the C++ compiler that `build` uses, or None without a compiler."""
    return _sources.compiler()


def call(name: str, *args: Any, source: str = SHARED) -> None:
    """Calls a function: tensors and arrays pass as pointers, ints as int64, floats as fp32, None as null."""
    getattr(library(source), name)(*map(_convert_argument, args))


def function(source: str, name: str, kinds: str, *, returns: bool = False) -> Any:
    """Returns a function of a C++ file with the types of the arguments, so that short calls are cheap.

    Kernels are only called where the file is built.

    Args:
        source: the file.
        name: name of the function.
        kinds: kinds of the arguments, a letter each: p is an address, i an int64, f a float. For example "pif".
        returns: whether the function returns an int64, else nothing.
    """
    return _load_function(source, name, kinds, returns, generation())


@functools.cache
def _load_function(source: str, name: str, kinds: str, returns: bool, generation: int) -> Any:
    run = getattr(_load_library(source, generation), name)
    run.argtypes, run.restype = [_KINDS[kind] for kind in kinds], ctypes.c_int64 if returns else None
    return run


_KINDS: dict[str, Any] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


def sum_lanes(lanes: Tensor) -> Tensor:
    """Sums float64 [spans, LANES] by halving, as in `_sums.py`.

    Overwrites the argument, and returns a view of the argument, [].
    """
    call("sum_lanes", lanes, lanes.shape[0])
    return lanes.view(-1)[0] if lanes.numel() else lanes.sum()


def _convert_argument(arg: Any) -> Any:
    if arg is None:
        return None
    if isinstance(arg, Tensor):
        assert arg.is_contiguous()
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, np.ndarray):
        return ctypes.c_void_p(arg.ctypes.data)
    return ctypes.c_float(arg) if isinstance(arg, float) else ctypes.c_int64(arg)


def _compile_source(shown: str, name: str, source: pathlib.Path, flags: tuple[str, ...]) -> pathlib.Path:
    path = _cache_folder() / name
    if path.exists():
        return path
    with waiting("building C++ for this processor, once:", shown, at_once=True), _wait_for_turn(path):
        if not path.exists():
            with _make_build_folder(path.parent) as folder:
                fresh = folder / path.name
                _sources.compile_source(source, flags, fresh)
                fresh.replace(path)
    return path


@contextlib.contextmanager
def _make_build_folder(cache: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes a temporary folder for a build, and removes the folders of dead builders.

    A builder holds the lock of the file `lock` in the folder as long as the builder lives. The file has the name only
    once locked.
    """
    import fcntl  # only POSIX has it

    for old in cache.glob(f"{_BUILDING}*/lock"):
        with contextlib.suppress(OSError), old.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=cache) as name:
        folder = pathlib.Path(name)
        with (folder / "unlocked").open("w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: no other process removes the folder
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / "unlocked").rename(folder / "lock")
            yield folder


@contextlib.contextmanager
def _wait_for_turn(path: pathlib.Path) -> Iterator[None]:
    """Waits until a file exists, or the turn comes to build the file, or the time limit of a compiler has passed."""
    if path.exists():
        yield
        return
    import fcntl  # only POSIX has it

    end, place = time.monotonic() + _sources.PATIENCE, path.with_suffix(".lock")
    with place.open("w") as lock:
        while not path.exists() and time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_PERIOD)
            except OSError:  # a file system without locks: each process builds
                break
        yield
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process forked in the meantime has the file, too
    if path.exists():  # a process that locks another file of the name finds the result
        place.unlink(missing_ok=True)


def _cache_folder() -> pathlib.Path:
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "shardfn"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
