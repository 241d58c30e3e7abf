"""The manifest of a checkpoint: each leaf by path, as chunks of a logical tensor in safetensors files.

A manifest that `decoded` has accepted is consistent. The chunks of a leaf cover the leaf without overlap. Byte ranges
are inside the file, and have the sizes of the shapes. So a reader never asks for more bytes than the files have. A
file's name is one component without a slash, so no name leads out of the directory.

A caller's values as JSON. Infinities and NaN, which JSON lacks, become for example `{"$float": "inf"}`.

A dict with the only key "$float" is wrapped in another dict, so that every value is restored exactly.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from shardfn import core
from shardfn.memory import DamagedError

_FLOAT = "$float"


def as_json(x: Any, name: str = "user") -> Any:
    """Returns a value of JSON's types, of Python's numbers and containers.

    Args:
        x: dicts, lists and tuples of strings, numbers, bools and None.
        name: name in messages.

    Raises:
        TypeError: entries are of other types. The message lists them by path.

    Example:
        >>> as_json({"best": math.inf, "next": [1, 2.5]})
        {'best': {'$float': 'inf'}, 'next': [1, 2.5]}
    """
    problems: list[str] = []
    out = _encode_value(x, name, problems)
    remedy = "a tensor of one element has .item(), and of more .tolist()"
    core.raise_all(TypeError, f"checkpoints keep JSON values beside a tree; {remedy}:", problems)
    return out


def from_json(x: Any) -> Any:
    """Returns the inverse of `as_json`.

    Raises:
        ValueError: `x` is not a result of `as_json`.

    Example:
        >>> from_json({"best": {"$float": "inf"}, "next": [1, 2.5]})
        {'best': inf, 'next': [1, 2.5]}
    """
    if isinstance(x, list):
        return [from_json(y) for y in x]
    if not isinstance(x, dict):
        return x
    inner = x[_FLOAT] if x.keys() == {_FLOAT} else None
    if isinstance(inner, str):
        return float(inner)
    plain = inner if isinstance(inner, dict) and inner.keys() == {_FLOAT} else x
    return {k: from_json(y) for k, y in plain.items()}


def _encode_value(x: Any, path: str, problems: list[str]) -> Any:
    if isinstance(x, dict):
        out = {k: _encode_value(y, f"{path}[{k!r}]", problems) for k, y in x.items()}
        problems += [
            f"{path} has the key {k!r}, {core.a_kind(k)}, which is not JSON serializable"
            for k in x
            if not isinstance(k, str | int | float | None)
        ]
        return {_FLOAT: out} if out.keys() == {_FLOAT} else out
    if isinstance(x, list | tuple):
        return [_encode_value(y, f"{path}[{i}]", problems) for i, y in enumerate(x)]
    if isinstance(x, float) and not math.isfinite(x):
        return {_FLOAT: str(float(x))}
    if not isinstance(x, str | int | float | bool | None):
        problems.append(f"{path}, {core.a_kind(x)}, is not JSON serializable")
    return x


FORMAT = 1
_KIND = "shardfn.checkpoint"
# A file's name is one component of a path, of letters without a special meaning to shells and file systems.
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,120}\.safetensors", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_DIMS = 64

DTYPES: dict[str, torch.dtype] = {
    core.dtype_name(d): d
    for d in vars(torch).values()
    if isinstance(d, torch.dtype) and not str(d).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1"))
} | {"int16": torch.int16, "uint16": torch.uint16}


class StoredChunk(NamedTuple):
    """A box of a leaf, row-major in a range of a file.

    Attributes:
        offset: index of the first element in the leaf, along each dim.
        shape: shape of the box.
        file: name of the file, in the checkpoint's directory.
        start: first byte in the file.
        sha256: digest of the bytes.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    sha256: str


class StoredLeaf(NamedTuple):
    """Logical tensor: a leaf of the tree, assembled from all ranks.

    Attributes:
        shape: global shape.
        dtype: torch's name of the dtype, such as "bfloat16".
        spec: mesh axes that cut each dim in the saving run. Readers use only the chunks.
        chunks: boxes that cover the leaf.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]
    chunks: tuple[StoredChunk, ...]

    @property
    def itemsize(self) -> int:
        """Returns the bytes of an element."""
        return DTYPES[self.dtype].itemsize


class File(NamedTuple):
    """Safetensors file: total bytes, bytes of the header, and digest of the header."""

    bytes: int
    header: int
    sha256: str


class Manifest(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
        step: number of the checkpoint.
        user: the caller's values, of JSON's types, or floats that JSON lacks.
        mesh: axes and sizes of the saving mesh, for example {"dp": 4, "tp": 2}.
        leaves: leaves by path.
        files: files by name.
        metrics: values by which checkpoints are compared, by name.
    """

    step: int
    user: Any
    mesh: dict[str, int]
    leaves: dict[str, StoredLeaf]
    files: dict[str, File]
    metrics: Mapping[str, float] = MappingProxyType({})


def encoded(manifest: Manifest) -> str:
    """Returns the text of a manifest: JSON with a digest of all other entries at the end.

    Raises:
        TypeError: `user` is not a JSON value.
    """
    body = {
        "kind": _KIND,
        "format": FORMAT,
        "step": manifest.step,
        "user": as_json(manifest.user),
        "mesh": manifest.mesh,
        "leaves": {p: x._asdict() | {"chunks": [c._asdict() for c in x.chunks]} for p, x in manifest.leaves.items()},
        "files": {name: f._asdict() for name, f in manifest.files.items()},
    }
    if manifest.metrics:
        body["metrics"] = as_json(dict(manifest.metrics), "metrics")
    return _seal_body(body)


def decoded(text: str, where: str) -> Manifest:
    """Parses a manifest from an untrusted text.

    Args:
        text: contents of the file.
        where: name of the file, for errors.

    Raises:
        DamagedError: the text has changed since the save, or contradicts itself. The message lists the contradictions.
        ValueError: the manifest is of a newer version.
    """
    try:
        body = json.loads(text)
        if not isinstance(body, dict) or body.get("kind") != _KIND:
            raise DamagedError(f"{where} is not a manifest of a checkpoint.")
        number = body.get("format")
        if isinstance(number, int) and number > FORMAT:
            raise ValueError(
                f"{where} has format {number}, and this version of shardfn reads up to {FORMAT}. Install a newer one."
            )
        seal = body.pop("sha256", None)
        # The text too: a byte that JSON reads as the same thing has changed all the same.
        intact = isinstance(seal, str) and _seal_body(body) == text
    except (json.JSONDecodeError, RecursionError, TypeError, UnicodeError) as problem:
        raise DamagedError(
            f"{where} differs from the data that was written ({problem}). Use another checkpoint."
        ) from None
    if not intact:
        raise DamagedError(f"{where} has changed since it was written. Use another checkpoint.")
    try:
        manifest = Manifest(
            _parse_count(body["step"]),
            from_json(body["user"]),
            {_parse_axis(axis): _parse_count(size) for axis, size in body["mesh"].items()},
            {p: _parse_leaf(x) for p, x in body["leaves"].items()},
            _parse_files(body["files"]),
            _parse_metrics(body.get("metrics", {})),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as problem:
        raise DamagedError(f"{where} is not in the form of format {FORMAT}: {problem!r}.") from None
    problems = [*_find_misplaced(manifest), *_find_clashes(manifest)]
    if problems:
        raise DamagedError("\n".join([f"{where} contradicts itself:", *(f"  - {p}" for p in problems[:20])]))
    return manifest


def nbytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Returns the bytes of a tensor."""
    return math.prod(shape) * itemsize


def _seal_body(body: dict[str, Any]) -> str:
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text[:-1]},"sha256":"{digest}"}}\n'


def _parse_leaf(x: Any) -> StoredLeaf:
    if x["dtype"] not in DTYPES:
        raise ValueError(f"dtype must be a dtype of torch, got {x['dtype']!r}, which is not known")
    spec = tuple(tuple(_parse_axis(axis) for axis in axes) for axes in x["spec"])
    return StoredLeaf(_parse_shape(x["shape"]), x["dtype"], spec, tuple(_parse_chunk(c) for c in x["chunks"]))


def _parse_chunk(x: Any) -> StoredChunk:
    return StoredChunk(
        _parse_shape(x["offset"]),
        _parse_shape(x["shape"]),
        _parse_name(x["file"]),
        _parse_count(x["start"]),
        _parse_digest(x["sha256"]),
    )


def _parse_files(x: Any) -> dict[str, File]:
    return {
        _parse_name(n): File(_parse_count(f["bytes"]), _parse_count(f["header"]), _parse_digest(f["sha256"]))
        for n, f in x.items()
    }


def _parse_metrics(x: Any) -> dict[str, float]:
    found = from_json(x)
    if not isinstance(found, dict) or not all(isinstance(value, float) for value in found.values()):
        raise ValueError(f"metrics must be numbers by name, got {str(x)[:80]}")
    return found


def _parse_count(x: Any) -> int:
    if type(x) is not int or not 0 <= x < 1 << 63:
        raise ValueError(f"a count must be an integer from 0 to 2^63 - 1, got {x!r}")
    return x


def _parse_shape(x: Any) -> tuple[int, ...]:
    if not isinstance(x, list) or len(x) > _MAX_DIMS:
        raise ValueError(f"a shape must be a list of counts, got {str(x)[:80]}")
    return tuple(map(_parse_count, x))


def _parse_axis(x: Any) -> str:
    if not isinstance(x, str):
        raise ValueError(f"an axis must be a string, got {str(x)[:80]}")
    return x


def _parse_name(x: Any) -> str:
    if not isinstance(x, str) or not _FILE.fullmatch(x):
        raise ValueError(f"{str(x)[:80]!r} is not the name of a checkpoint file")
    return x


def _parse_digest(x: Any) -> str:
    if not isinstance(x, str) or not _DIGEST.fullmatch(x):
        raise ValueError(f"{str(x)[:80]!r} is not a digest")
    return x


def _find_misplaced(manifest: Manifest) -> list[str]:
    """Returns the chunks outside of a leaf or file, and the leaves that chunks do not cover exactly once."""
    out: list[str] = []
    for path, leaf in manifest.leaves.items():
        before = len(out)
        for c in leaf.chunks:
            if len(c.offset) != len(leaf.shape) or len(c.shape) != len(leaf.shape):
                out.append(f"{path} of shape {leaf.shape} has a chunk at {c.offset} of shape {c.shape}")
            elif any(o + n > size for o, n, size in zip(c.offset, c.shape, leaf.shape, strict=True)):
                out.append(f"{path} of shape {leaf.shape}: the chunk at {c.offset} of shape {c.shape} is outside")
            elif c.file not in manifest.files:
                out.append(f"{path}: {c.file} is not among the files")
            elif not _is_inside(c, leaf.itemsize, manifest.files[c.file]):
                out.append(f"{path}: bytes from {c.start} on are outside of {c.file}")
        if len(out) == before and not _is_covered(leaf):
            out.append(f"{path} of shape {leaf.shape}: its chunks overlap or leave a part out")
    return out


def _is_inside(chunk: StoredChunk, itemsize: int, file: File) -> bool:
    return file.header <= chunk.start and chunk.start + nbytes(chunk.shape, itemsize) <= file.bytes


def _is_covered(leaf: StoredLeaf) -> bool:
    """Returns whether the chunks cover the leaf without overlap."""
    if sum(math.prod(c.shape) for c in leaf.chunks) != math.prod(leaf.shape):
        return False
    full = [c for c in leaf.chunks if math.prod(c.shape)]
    if len(full) < 2:
        return True
    starts = np.array([c.offset for c in full], dtype=np.int64)
    stops = starts + np.array([c.shape for c in full], dtype=np.int64)
    for i in range(len(full) - 1):
        if ((starts[i + 1 :] < stops[i]) & (starts[i] < stops[i + 1 :])).all(1).any():
            return False
    return True


def _find_clashes(manifest: Manifest) -> list[str]:
    """Returns ranges of a file that overlap, and bytes without a leaf. Tied leaves may share a range."""
    spans: dict[str, set[tuple[int, int]]] = {name: set() for name in manifest.files}
    for leaf in manifest.leaves.values():
        for c in leaf.chunks:
            if c.file in spans:
                spans[c.file].add((c.start, c.start + nbytes(c.shape, leaf.itemsize)))
    out = []
    for name, ranges in spans.items():
        at, file = manifest.files[name].header, manifest.files[name]
        for lo, hi in sorted(ranges):
            if lo != at:
                out.append(f"{name}: bytes {min(lo, at)} to {max(lo, at)} are in two ranges or in none")
            at = max(hi, at)
        if at != file.bytes:
            out.append(f"{name}: bytes {at} to {file.bytes} belong to no leaf")
    return out
