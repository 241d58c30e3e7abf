"""Builds C++ when it is first used, if there is a compiler: the sources of this room, and those of other rooms.

The sources include only the headers of the language, so that a build takes about a second. The result is kept in the
user's cache, under a name made of sources and flags. Where processes start together, one of them builds a file, and the
others wait, but no longer than a compiler may take. The system frees its lock when it ends. Files are renamed into
their place, so that no process loads half a file.
"""

import contextlib
import ctypes
import functools
import hashlib
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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ROOM = pathlib.Path(__file__).parent
_SHARED = "_native.cpp"
_POOL = "_pool.cpp"
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
# Sources that need not match the reference's bits use threads, and fused multiply-adds. They mark the loops to unroll,
# so -O2 suffices, and builds in a third of the time of -O3. A short loop that is not aligned may take a tenth longer.
_FAST = ("-O2", "-falign-loops=64", "-ffp-contract=fast", "-pthread", "-Wno-psabi")
# Those that match the reference's bits: all operations but the fused multiply-adds that they name are rounded alone.
_EXACT = ("-O2", "-pthread", "-Wno-psabi")
# GCC must not take apart the chains of operations that these write side by side.
_CHAINED = ("-fno-tree-ter", "-pthread", "-Wno-psabi")
_FLAGS_OF = {
    _SHARED: (),
    _POOL: ("-pthread",),
    **dict.fromkeys((f"{name}/_native.cpp" for name in ("ragged_attention", "pointwise", "row_norm")), _EXACT),
    # Loops without vectors of their own, which -O3 alone makes.
    "gather_rows/_native.cpp": ("-pthread",),
    **dict.fromkeys((f"{name}/_native.cpp" for name in ("draw", "penalise")), _CHAINED),
}

_PATIENCE = 120.0  # seconds that a compiler may take, and that a process waits for another one's
_PERIOD = 0.02
_BUILDING = "building-"  # begins the names of temporary folders


class NoCompilerError(Exception):
    """C++ cannot be built here: there is no compiler, or the sources are not written for this system."""


@functools.cache
def library(source: str = _SHARED) -> ctypes.CDLL | None:
    """The functions of a C++ file; None without a compiler, and, with a warning, if the compiler fails."""
    try:
        headers = () if source == _SHARED else sorted({*_ROOM.glob("*.h"), *(_ROOM / source).parent.glob("*.h")})
        return _sharing(build("kernels", _ROOM / source, *headers, flags=_FLAGS_OF.get(source, _FAST)))
    except NoCompilerError:
        return None
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"{cxx_compiler()} did not build shardfn's kernels, which run on numpy instead:\n{said}", stacklevel=2
        )
        return None


@contextlib.contextmanager
def building(device: torch.device, folders: Sequence[str]) -> Iterator[None]:
    """A context that builds and loads the C++ of ops beside its body, several files at a time; it ends after them.

    Calls of these ops in the body wait for their own files alone.

    Args:
        device: of the tensors; nothing is built for other devices than CPUs.
        folders: of the ops; files that take long come first.

    Example:
        >>> with building(torch.device("cpu"), ["row_norm"]):
        ...     x = torch.ones(2, 3)
    """
    # The shared source is the default of `library`, whose cache has it under no argument.
    asked = [*((f"{folder}/_native.cpp",) for folder in folders), (), (_POOL,)] if device.type == "cpu" else []
    with ThreadPoolExecutor(os.cpu_count(), "shardfn-build") as threads:
        made = [threads.submit(library, *args) for args in asked]
        yield
    for one in made:
        one.result()  # raises where warnings are errors


def build(name: str, source: pathlib.Path, *included: pathlib.Path, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Builds a C++ source and loads it as a library.

    Args:
        name: of the file in the cache.
        source: the file to build.
        included: the files that it includes.
        flags: for the compiler, added to those that all sources get.

    Raises:
        NoCompilerError: there is no compiler, or the sources are not written for this system.
        OSError: the built file cannot be written or loaded.
        subprocess.SubprocessError: the compiler failed.
    """
    compiler = cxx_compiler()
    if compiler is None or os.name != "posix" or sys.byteorder != "little":
        raise NoCompilerError("there is no C++ compiler (c++, g++ or clang++)")
    return ctypes.CDLL(str(_built(name, compiler, (source, *included), (*_FLAGS, *flags))))


def _sharing(found: ctypes.CDLL) -> ctypes.CDLL:
    """A library that works with the pool of this process, if it shares work."""
    if hasattr(found, "use_pool") and (pool := library(_POOL)) is not None:
        found.use_pool(ctypes.cast(pool.share_work, ctypes.c_void_p))
    return found


def cxx_compiler() -> str | None:
    """The path of the C++ compiler that `build` uses; None without a compiler."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def call(name: str, *args: Any, source: str = _SHARED) -> None:
    """Calls a function: tensors and arrays pass as pointers, ints as int64, floats as fp32, None as null."""
    found = library(source)
    assert found is not None
    getattr(found, name)(*map(_passed, args))


@functools.cache
def function(source: str, name: str, kinds: str, *, returns: bool = False) -> Any:
    """A function of a C++ file with the types of its arguments, which keeps short calls cheap; None without a compiler.

    Args:
        source: the file.
        name: of the function.
        kinds: of its arguments, a letter each: p is an address, i an int64, f a float.
        returns: whether it returns an int64, else nothing.
    """
    found = library(source)
    if found is None:
        return None
    run = getattr(found, name)
    run.argtypes, run.restype = [_KINDS[kind] for kind in kinds], ctypes.c_int64 if returns else None
    return run


_KINDS: dict[str, Any] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


def total(lanes: Tensor) -> Tensor:
    """Sums float64 [spans, LANES] by halving, as in `_sums.py`. Overwrites its argument; returns a view of it, []."""
    call("sum_lanes", lanes, lanes.shape[0])
    return lanes.view(-1)[0] if lanes.numel() else lanes.sum()


def _passed(arg: Any) -> Any:
    if arg is None:
        return None
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, np.ndarray):
        return ctypes.c_void_p(arg.ctypes.data)
    return ctypes.c_float(arg) if isinstance(arg, float) else ctypes.c_int64(arg)


def _built(name: str, compiler: str, sources: tuple[pathlib.Path, ...], flags: tuple[str, ...]) -> pathlib.Path:
    # Everything that determines the machine code: a library built otherwise has another name.
    texts = [source.read_text() for source in sources]
    key = "\0".join([*texts, compiler, *flags, platform.machine(), *platform.libc_ver()])
    path = _folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    with _turn(path):
        if not path.exists():
            with _own_folder(path.parent) as folder:
                fresh = folder / path.name
                run = [compiler, *flags, "-o", str(fresh), str(sources[0])]
                subprocess.run(run, check=True, capture_output=True, text=True, timeout=_PATIENCE)
                fresh.replace(path)
    return path


@contextlib.contextmanager
def _own_folder(cache: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary folder for a build; removes those of builders that are dead.

    A builder holds the lock of its folder's `lock` as long as it lives. The file has this name only once it is locked.
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
def _turn(path: pathlib.Path) -> Iterator[None]:
    """Waits until a file exists, or is this process's to build; or for as long as another one's compiler may take."""
    if path.exists():
        yield
        return
    import fcntl  # only POSIX has it

    end, place = time.monotonic() + _PATIENCE, path.with_suffix(".lock")
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
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process forked meanwhile has the file, too
    if path.exists():  # a process that locks another file of this name finds the result
        place.unlink(missing_ok=True)


def _folder() -> pathlib.Path:
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "shardfn"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
