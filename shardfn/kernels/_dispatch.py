"""The only place that chooses the implementation of a kernel.

Tensors on the CPU are computed by the `native` file of an op's folder, if the file and a C++ compiler exist, else by
the `cpu` file: the bits are the same. Tensors elsewhere are computed by `triton`, where the package `triton` is
installed, else by `reference`. The reference is the definition, and runs wherever torch runs. Exact rows in float64 are
computed by `reference` everywhere.
"""

import contextlib
import functools
import importlib
import importlib.util
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._build import library

_KINDS = ("reference", "cpu", "native", "triton")

_ASKED: list[str] = []


@contextlib.contextmanager
def implemented_by(kind: str) -> Iterator[None]:
    """Returns a context in which all kernels run in the same implementation, on any device: for tests and benchmarks.

    Triton's kernels take CPU tensors only under its interpreter: set `TRITON_INTERPRET=1` before triton is imported.

    Args:
        kind: "reference", "cpu", "native" (C++; an op without C++ runs as "cpu") or "triton".

    Raises:
        ValueError: for another kind, and for "native" where there is no compiler.

    Example:
        >>> from shardfn.kernels import pack_signs
        >>> with implemented_by("reference"):
        ...     pack_signs(torch.tensor([[1.0, -1, 1, 1, -1, -1, -1, 1]]))
        tensor([[177]], dtype=torch.uint8)
    """
    if kind not in _KINDS:
        raise ValueError(f"kernels are implemented by {', '.join(map(repr, _KINDS))}, not by {kind!r}")
    if kind == "native" and library() is None:
        raise ValueError("there is no C++ compiler for 'native' kernels. Ask for 'cpu'")
    # For all threads: a backward may run on another thread.
    _ASKED.append(kind)
    try:
        yield
    finally:
        _ASKED.pop()


def is_native(folder: str) -> bool:
    """Returns whether an op runs in C++ on CPU tensors here: the op's C++ was built, or can be built.

    Args:
        folder: folder of the op.

    Example:
        >>> is_native("no_such_op")
        False
    """
    source = f"{folder}/_native.cpp"
    return (pathlib.Path(__file__).parent / source).exists() and library(source) is not None


def is_asked() -> bool:
    """Returns whether an implementation was asked for by `implemented_by`."""
    return bool(_ASKED)


def implementation_of_rows(folder: str, name: str, x: torch.Tensor) -> Callable[..., Any]:
    """Returns `implementation` for a tensor of exact rows. For float64 this is the slow definition, on every device."""
    return (
        _find_function(folder, name, "reference")
        if x.dtype == torch.float64
        else implementation(folder, name, x.device)
    )


def implementation(folder: str, name: str, device: torch.device) -> Callable[..., Any]:
    """Returns the function `name` of an op's folder, of the implementation for tensors on a device."""
    return _find_function(folder, name, _ASKED[-1] if _ASKED else _choose_kind(device.type))


@functools.cache
def _choose_kind(device: str) -> str:
    if device == "cpu":
        return "native" if library() else "cpu"
    return "triton" if importlib.util.find_spec("triton") else "reference"


@functools.cache
def _find_function(folder: str, name: str, kind: str) -> Callable[..., Any]:
    module = f"shardfn.kernels.{folder}._{kind}"
    if kind == "native" and not importlib.util.find_spec(module):
        return _find_function(folder, name, "cpu")
    return getattr(importlib.import_module(module), name)
