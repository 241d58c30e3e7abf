"""The room's C++, built when a kernel on a CPU first runs, where there is a compiler.

It needs no headers but the language's own, so that it builds in about a second. What is built is kept in the user's
cache and found again by what it was built from. Ranks that start together may each build it, and the last to finish
puts its file in place of the others', its equals: nobody waits for the lock of a process that has died.
"""

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
import warnings
from typing import Any

import numpy as np
from torch import Tensor

_ROOM = pathlib.Path(__file__).parent
_SHARED = "_native.cpp"
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# What is not held to the reference's bits has threads, and products and sums in one.
_MORE = {_SHARED: ("-ffp-contract=off",)}
_FAST = ("-ffp-contract=fast", "-pthread", "-Wno-psabi")


@functools.cache
def library(source: str = _SHARED) -> ctypes.CDLL | None:
    """The functions of a file of C++; None where there is no compiler, and, with a warning, where it fails."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None or os.name != "posix" or sys.byteorder != "little":
        return None
    try:
        return ctypes.CDLL(str(_built(compiler, source)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        warnings.warn(f"{compiler} did not build shardfn's kernels, which run on numpy instead:\n{said}", stacklevel=2)
        return None


def call(name: str, *args: Any, source: str = _SHARED) -> None:
    """Calls a function: tensors and arrays pass as pointers, ints as int64, floats as fp32, None as null."""
    found = library(source)
    assert found is not None
    getattr(found, name)(*map(_passed, args))


def total(lanes: Tensor) -> Tensor:
    """The sum of float64 [spans, LANES], by halving as in `_sums.py`: [], in the first place of what it overwrites."""
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


def _built(compiler: str, source: str) -> pathlib.Path:
    # All that decides the machine code: a library built otherwise has another name.
    path, flags = _ROOM / source, (*_FLAGS, *_MORE.get(source, _FAST))
    key = "\0".join([path.read_text(), compiler, *flags, platform.machine(), *platform.libc_ver()])
    out = _folder() / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not out.exists():
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            fresh = pathlib.Path(folder) / out.name
            run = [compiler, *flags, "-o", str(fresh), str(path)]
            subprocess.run(run, check=True, capture_output=True, text=True, timeout=120)
            # In one go: other ranks build, too, and must never load half a file.
            fresh.replace(out)
    return out


def _folder() -> pathlib.Path:
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "shardfn"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
