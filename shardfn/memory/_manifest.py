"""The manifest: a JSON file that lists the values of a directory, replaced atomically."""

import base64
import json
import os
import pathlib
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardfn.core import dtype_name

from ._disk import DiskTensor
from ._host import as_bytes, host_empty
from ._lock import DamagedError
from ._slots import FULL, no_room

NAME = "manifest.json"
# The previous commit, if kept.
BEFORE = "manifest.before.json"
_FORMAT = 1


def prepare(
    directory: pathlib.Path, step: int, entries: dict[str, Any], *, durable: bool, about: dict[str, Any] | None = None
) -> pathlib.Path:
    """Writes a manifest next to the current manifest, for `publish`."""
    body = json.dumps({"format": _FORMAT, "step": step, "values": entries, "about": about or {}})
    text = json.dumps({"crc32": zlib.crc32(body.encode()), "body": body})
    new = directory / f"{NAME}.new"
    try:
        new.write_text(text)
        if durable:
            sync(new)
    except OSError as problem:
        new.unlink(missing_ok=True)
        if problem.errno in FULL:
            raise no_room(directory, len(text), problem) from problem
        raise
    return new


def publish(directory: pathlib.Path, new: pathlib.Path, *, durable: bool, keep_before: bool = False) -> None:
    """Renames a prepared manifest over the current manifest, which can be kept under another name.

    After an error either manifest may be current.
    """
    path = directory / NAME
    # Between the two renames only the previous commit exists, and `commits` finds the file.
    if keep_before and path.exists():
        os.replace(path, directory / BEFORE)
    os.replace(new, path)
    if not keep_before:
        forget_before(directory)
    if durable:
        sync(directory)


def forget_before(directory: pathlib.Path) -> None:
    """Drops the commit before the last."""
    (directory / BEFORE).unlink(missing_ok=True)


def commits(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the manifests that are there, the last commit first."""
    return [directory / name for name in (NAME, BEFORE) if (directory / name).exists()]


def settle(directory: pathlib.Path, path: pathlib.Path) -> None:
    """Removes all manifests but one."""
    os.replace(path, directory / NAME)
    forget_before(directory)


def load(directory: pathlib.Path) -> tuple[int, dict[str, Any]]:
    """Returns the step and the entries of the last commit.

    Raises:
        FileNotFoundError: nothing was committed.
        DamagedError: the file differs from the written file.
    """
    found = commits(directory)
    if not found:
        raise FileNotFoundError(
            f"{directory} has no {NAME}: nothing was committed there. `Pool(directory)` starts anew."
        )
    return read(found[0])


def read(path: pathlib.Path) -> tuple[int, dict[str, Any]]:
    """Returns the step and the entries of one manifest.

    Raises:
        DamagedError: the file differs from the written file.
    """
    content = _read_content(path)
    return content["step"], content["values"]


def about(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the `about` of the last commit, empty without a commit or without `about`."""
    found = commits(directory)
    return _read_content(found[0]).get("about", {}) if found else {}


def _read_content(path: pathlib.Path) -> dict[str, Any]:
    try:
        outer = json.loads(path.read_text())
        body = outer["body"]
        intact = zlib.crc32(body.encode()) == outer["crc32"]
        content = json.loads(body) if intact else None
    except (ValueError, KeyError, TypeError):
        content = None
    if content is None:
        raise DamagedError(f"{path} has changed since it was written. Start from a checkpoint in an empty directory.")
    if content["format"] != _FORMAT:
        raise DamagedError(f"{path} has format {content['format']}. This version reads {_FORMAT}.")
    return content


def stored_entry(x: DiskTensor) -> dict[str, Any]:
    """Returns the entry of a value that has a file, or no elements."""
    sums = base64.b64encode(x.sums.crcs.tobytes()).decode() if x.sums is not None else None
    file = {"file": x.slot.path.name, "capacity": x.slot.capacity} if x.slot else {"file": None}
    return {**_meta_tensor(x.shape, x.dtype), **file, "grain": x.grain, "crc32": sums}


def inline_entry(x: Tensor) -> dict[str, Any]:
    """Returns the entry of a small tensor, with its bytes."""
    return {**_meta_tensor(x.shape, x.dtype), "bytes": base64.b64encode(as_bytes(x.contiguous()).tobytes()).decode()}


def inline_value(entry: dict[str, Any]) -> Tensor:
    """Returns the tensor of an `inline_entry`."""
    x = host_empty(tuple(entry["shape"]), dtype_of(entry))
    as_bytes(x)[:] = np.frombuffer(base64.b64decode(entry["bytes"]), np.uint8)
    return x


def crcs_of(entry: dict[str, Any]) -> np.ndarray | None:
    """Returns the checksums of a `stored_entry`, or None."""
    text = entry["crc32"]
    return None if text is None else np.frombuffer(base64.b64decode(text), np.uint32)


def dtype_of(entry: dict[str, Any]) -> torch.dtype:
    """Returns the dtype of an entry."""
    return getattr(torch, entry["dtype"])


def sync(path: pathlib.Path) -> None:
    """Waits until a file, or a directory's names, would survive a loss of power."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _meta_tensor(shape: torch.Size, dtype: torch.dtype) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype_name(dtype)}
