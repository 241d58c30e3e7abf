"""Writes and reads the header of safetensors files, of checkpoints and of other tools.

    8 bytes: N, little-endian    N bytes: JSON, padded with spaces    data

`{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, offsets from the end of the header on, without gaps.
Restores of checkpoints use the manifest instead. `verify` compares the header with the digest there.
https://github.com/huggingface/safetensors
"""

import json
import math
import os
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardfn.core import raise_all
from shardfn.memory import DamagedError

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
# The limit of the format's own reader.
_MAX_HEADER = 100 << 20


class SafetensorsEntry(NamedTuple):
    """A tensor in a safetensors file.

    Attributes:
        file: path of the file.
        dtype: dtype of its elements.
        shape: shape of the tensor.
        start: first byte in the file.
    """

    file: pathlib.Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Returns the number of bytes, stored contiguously."""
        return math.prod(self.shape) * self.dtype.itemsize


def safetensors_header(
    entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Returns the header of a file that has these tensors, in sequence.

    Dtypes outside the format are declared as bytes.

    Args:
        entries: name, dtype and shape of each tensor.
        metadata: strings by name, for the entry `__metadata__`.

    Example:
        >>> safetensors_header([("w", torch.float32, (2, 3))])[8:].decode().rstrip()
        '{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    """
    out: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape in entries:
        size = math.prod(shape) * dtype.itemsize
        sizes = list(shape) if dtype in _CODES else [*shape, dtype.itemsize]
        out[name] = {"dtype": _CODES.get(dtype, "U8"), "shape": sizes, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(out, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def safetensors_entries(path: str | os.PathLike[str]) -> dict[str, SafetensorsEntry]:
    """Returns the tensors of a file, from the header. The whole header is checked.

    Offsets must match shapes, dtypes and the size of the file. For example, a float32 tensor of shape [2, 3] needs 24
    bytes.

    Args:
        path: path of the file.

    Raises:
        OSError: the file cannot be read.
        DamagedError: the file is not a safetensors file or is truncated, or tensors overlap or leave gaps.

    Example:
        >>> import tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.safetensors")
        >>> _ = path.write_bytes(safetensors_header([("w", torch.float32, (2,))]) + bytes(8))
        >>> safetensors_entries(path)["w"].shape
        (2,)
    """
    path = pathlib.Path(path)
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        (length,) = struct.unpack("<Q", f.read(8)) if size >= 8 else (size,)
        if length > min(size - 8, _MAX_HEADER):
            raise DamagedError(
                f"{path} is not a safetensors file, or was cut short: the header would have {length} bytes."
            )
        try:
            table: dict[str, Any] = json.loads(f.read(length))
            table.pop("__metadata__", None)
            ranges = {name: _parse_range(about) for name, about in table.items()}
            out = {name: _parse_entry(path, about, 8 + length) for name, about in table.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise DamagedError(f"{path}: its header cannot be understood ({problem}).") from problem
    data = size - 8 - length
    beyond = [f"{name} ends at byte {end} of its data" for name, (_, end) in ranges.items() if end > data]
    raise_all(DamagedError, f"{path} has {data} bytes of data, and was cut short:", beyond)
    at = 0
    for name, (begin, end) in sorted(ranges.items(), key=lambda x: x[1]):
        if begin != at:
            raise DamagedError(f"{path}: {name} begins at byte {begin}, where byte {at} is to be next: tensors"
                               " overlap or leave bytes out.")  # fmt: skip
        at = end
    if at != data:
        raise DamagedError(f"{path} has {data} bytes of data, and its tensors have {at} of them.")
    return out


def _parse_range(about: dict[str, Any]) -> tuple[int, int]:
    begin, end = about["data_offsets"]
    return _parse_count(begin), _parse_count(end)


def _parse_entry(path: pathlib.Path, about: dict[str, Any], data: int) -> SafetensorsEntry:
    begin, end = _parse_range(about)
    out = SafetensorsEntry(
        path, SAFETENSORS_DTYPES[about["dtype"]], tuple(map(_parse_count, about["shape"])), data + begin
    )
    if end - begin != out.nbytes:
        raise ValueError(f"{str(about)[:200]} contradicts itself")
    return out


def _parse_count(x: Any) -> int:
    """Returns a valid size or offset: an integer that is not negative."""
    if type(x) is not int or not 0 <= x < 1 << 62:
        raise ValueError(f"{str(x)[:40]} is not a number of bytes or elements")
    return x
