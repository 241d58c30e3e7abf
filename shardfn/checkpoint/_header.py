"""The header of a safetensors file, so that other tools can open a checkpoint's files.

    8 bytes: N, little-endian    N bytes: JSON, padded with spaces    data

`{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, offsets from the end of the header on, without gaps.
Restores go by the manifest, which says more; `verify` compares the two.
https://github.com/huggingface/safetensors
"""

import json
import struct
from collections.abc import Sequence
from typing import Any

import torch

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def header(entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The header of a file that has these tensors, one after another. Of other dtypes than the format's, bytes.

    Example:
        >>> header([("w", torch.float32, (2, 3))])[8:].decode().rstrip()
        '{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    """
    out: dict[str, Any] = {}
    at = 0
    for name, dtype, shape in entries:
        size = torch.Size(shape).numel() * dtype.itemsize
        told = list(shape) if dtype in _NAMES else [*shape, dtype.itemsize]
        out[name] = {"dtype": _NAMES.get(dtype, "U8"), "shape": told, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(out, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
