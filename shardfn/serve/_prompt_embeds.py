"""Prompts by their embeddings: tensors in files of `torch.save`, in base64, read without running a pickle.

A file is an archive with a pickle of the tensor's shape, and the numbers. The reader permits only the names that
`torch.save` writes for a single dense tensor, so that no other function runs. Numbers are stored without compression
and read once, and no object is changed after it was made, so that a tensor is never larger than its text.
"""

import base64
import binascii
import collections
import io
import math
import pickle
import pickletools
import zipfile
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import REBUILD_TENSOR

_DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}
_MOST_PICKLE = 1 << 12  # bytes of a pickle of a single tensor, usually some 150


def read_embeddings(text: str) -> Tensor:
    """Returns the tensor of a base64 text of `torch.save(tensor, file)`, of a floating dtype.

    Raises:
        ValueError: the text is not of this form. The message says why.

    Example:
        >>> file = io.BytesIO()
        >>> torch.save(torch.tensor([[1.0, 2.0]]), file)
        >>> read_embeddings(base64.b64encode(file.getvalue()).decode())
        tensor([[1., 2.]])
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"must be base64 ({error})") from error
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read_archive(archive)
    except zipfile.BadZipFile as error:
        raise ValueError("must be a file of torch.save with a tensor; other pickles are refused") from error
    except (pickle.UnpicklingError, KeyError, EOFError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise ValueError(f"must be a file of torch.save with a single tensor, and nothing else ({error})") from error


def _read_archive(archive: zipfile.ZipFile) -> Tensor:
    entries = {name.partition("/")[2]: archive.getinfo(name) for name in archive.namelist()}
    if packed := [name for name, entry in entries.items() if entry.compress_type != zipfile.ZIP_STORED]:
        raise ValueError(f"must be a file of torch.save without compression, got {packed[0][:40]!r}")
    if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
        raise ValueError("must have numbers in little-endian order")
    made = _TensorUnpickler(archive, entries).load()
    if not isinstance(made, Tensor):
        raise ValueError(f"must be a tensor, got a {type(made).__name__}")
    return made


class _TensorUnpickler(pickle.Unpickler):
    """Reader of a pickle with a single dense tensor."""

    def __init__(self, archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo]) -> None:
        data = archive.read(entries["data.pkl"])
        if len(data) > _MOST_PICKLE:
            raise pickle.UnpicklingError(f"its pickle has {len(data)} bytes, more than {_MOST_PICKLE}")
        # A tensor's __setstate__ would make any size, and a function would keep what is written to it.
        if any(op.name == "BUILD" for op, *_ in pickletools.genops(data)):
            raise pickle.UnpicklingError("an object is changed after it was made")
        super().__init__(io.BytesIO(data))
        self._archive, self._entries, self._is_read = archive, entries, False

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == REBUILD_TENSOR:
            return _make_tensor
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"{module[:40]}.{name[:40]} is not permitted")

    def persistent_load(self, pid: Any) -> Tensor:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError("only float tensors are permitted")
        if self._is_read:
            raise pickle.UnpicklingError("it has numbers of several tensors")
        self._is_read = True
        data = bytearray(self._archive.read(self._entries[f"data/{key}"]))
        return torch.frombuffer(data, dtype=dtype) if data else torch.zeros(0, dtype=dtype)


def _make_tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Tensor:
    """Returns a view of a storage that has each of its numbers at most once."""
    del rest  # whether it needs a gradient, and hooks
    if not isinstance(storage, Tensor) or type(offset) is not int or offset < 0:
        raise pickle.UnpicklingError("the tensor has no storage")
    if not all(type(x) is int and x >= 0 for x in (*size, *stride)) or math.prod(size) > len(storage):
        raise pickle.UnpicklingError("the tensor has more elements than the file has numbers")
    return storage.as_strided(size, stride, offset)
