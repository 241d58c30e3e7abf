"""The one place that chooses which implementation of a kernel runs.

Tensors on the CPU are computed by the `cpu` file of an op's folder; tensors elsewhere by `triton` where that package is
installed, else by `reference`, which is the definition and runs wherever torch does.
"""

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

Kind = Literal["reference", "cpu", "triton"]

_ASKED: list[Kind] = []


@contextlib.contextmanager
def implemented_by(kind: Kind) -> Iterator[None]:
    """Within it, kernels run in the implementation asked for, whatever the device: for tests and benchmarks.

    Triton's kernels take tensors of a CPU where its interpreter is on: `TRITON_INTERPRET=1` before triton is imported.

    Args:
        kind: "reference", "cpu" or "triton".

    Raises:
        ValueError: for another kind.

    Example:
        >>> from shardfn.kernels import pack_signs
        >>> with implemented_by("reference"):
        ...     pack_signs(torch.tensor([[1.0, -1, 1, 1, -1, -1, -1, 1]]))
        tensor([[177]], dtype=torch.uint8)
    """
    if kind not in ("reference", "cpu", "triton"):
        raise ValueError(f"kernels are implemented by 'reference', 'cpu' and 'triton', not by {kind!r}")
    _ASKED.append(kind)
    try:
        yield
    finally:
        _ASKED.pop()


def implementation(folder: str, name: str, device: torch.device) -> Callable[..., Any]:
    """The function `name` of an op's folder that serves tensors on a device."""
    return _find(folder, name, _ASKED[-1] if _ASKED else _serving(device.type))


@functools.cache
def _serving(device: str) -> Kind:
    if device == "cpu":
        return "cpu"
    return "triton" if importlib.util.find_spec("triton") else "reference"


@functools.cache
def _find(folder: str, name: str, kind: Kind) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"shardfn.kernels.{folder}._{kind}"), name)
