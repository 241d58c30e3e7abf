"""Weights in safetensors files, one or several with an index, as Hugging Face keeps them: read and written in parts.

A file: 8 bytes with the length of the header; the header, JSON `{name: {"dtype", "shape", "data_offsets"}}`; the data,
row-major. Of a tensor only the bytes of the box that is asked for are read, with what lies between runs that are less
than a page apart.
https://github.com/huggingface/safetensors
"""

import itertools
import json
import math
import os
import pathlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.core import raise_all
from shardfn.memory import DamagedError, as_bytes

Box = Sequence[tuple[int, int]]

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_CODES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100 << 20
_PAGE = 4096
_PIECE = 8 << 20
INDEX = ".safetensors.index.json"


class Kept(NamedTuple):
    """A tensor in a file: `start` is its first byte."""

    file: pathlib.Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class Archive(Mapping[str, Kept]):
    """The tensors of `directory/stem.safetensors`, or of the files that `stem.safetensors.index.json` names.

    Args:
        directory: where they are.
        stem: what their names begin with.

    Attributes:
        read_bytes: that were read so far of tensors.

    Raises:
        FileNotFoundError: there are none.
        DamagedError: a header is not one, or the index names what no file has.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> with ArchiveWriter(directory, {"w": (torch.float32, (2, 3))}) as out:
        ...     out.put("w", torch.arange(6.0).view(2, 3))
        >>> archive = Archive(directory)
        >>> archive.box("w", [(0, 2), (1, 2)])
        tensor([[1.],
                [4.]])
    """

    def __init__(self, directory: str | os.PathLike[str], stem: str = "model") -> None:
        self.directory, self.read_bytes = pathlib.Path(directory), 0
        self._kept: dict[str, Kept] = {}
        one, index = self.directory / f"{stem}.safetensors", self.directory / (stem + INDEX)
        if not one.exists() and not index.exists():
            found = sorted(p.name for p in self.directory.glob("*")) if self.directory.is_dir() else []
            raise FileNotFoundError(f"{self.directory} has neither {one.name} nor {index.name}; it has {found}.")
        if one.exists():
            self._kept = header_of(one)
            return
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        if odd := sorted({f for f in names.values() if pathlib.PurePath(f).name != f}):
            raise DamagedError(f"{index} names files outside of its directory: {odd}.")
        files = {f: header_of(self.directory / f) for f in sorted(set(names.values()))}
        lost = [f"{name} is not in {f}" for name, f in names.items() if name not in files[f]]
        raise_all(DamagedError, f"{index} does not fit its files:", lost)
        self._kept = {name: files[f][name] for name, f in names.items()}

    def __getitem__(self, name: str) -> Kept:
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def box(self, name: str, box: Box, shape: Sequence[int] | None = None) -> Tensor:
        """A box of a tensor.

        Args:
            name: of the tensor.
            box: start and stop in each dim.
            shape: the dims in which `box` counts; of as many elements as the tensor's own, the default.

        Returns:
            The box, in the file's dtype.

        Raises:
            DamagedError: the file is shorter than it was.
        """
        kept = self._kept[name]
        dims, itemsize = tuple(kept.shape if shape is None else shape), kept.dtype.itemsize
        assert math.prod(dims) == math.prod(kept.shape)
        out = torch.empty([hi - lo for lo, hi in box], dtype=kept.dtype, device="cpu")
        if out.numel() == 0:
            return out
        # Dims from `cut` on are read whole; of dim `cut - 1` a range, of those before it row by row.
        cut, row = _cut(dims, box, itemsize)
        if cut == 0:  # a scalar
            dims, box, cut, row = (1,), [(0, 1)], 1, itemsize
        rows = out.view(1) if out.ndim == 0 else out
        fd = os.open(kept.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            first, last = box[cut - 1]
            for at in itertools.product(*(range(lo, hi) for lo, hi in box[: cut - 1])):
                begin = 0
                for i, size in zip((*at, first), dims[:cut], strict=True):
                    begin = begin * size + i
                target = rows[tuple(i - lo for i, (lo, _) in zip(at, box, strict=False))]
                step = max(1, _PIECE // max(row, 1))
                for lo in range(0, last - first, step):
                    at_row = (begin + lo) * (row // itemsize)
                    self._band(fd, kept, at_row, target[lo : lo + step], dims[cut:], box[cut:])
        finally:
            os.close(fd)
        return out

    def _band(self, fd: int, kept: Kept, begin: int, target: Tensor, dims: Sequence[int], box: Box) -> None:
        if all((lo, hi) == (0, n) for (lo, hi), n in zip(box, dims, strict=True)) and target.is_contiguous():
            return self._read(fd, kept, begin, target)
        part = torch.empty((len(target), *dims), dtype=kept.dtype, device="cpu")
        self._read(fd, kept, begin, part)
        target.copy_(part[(slice(None), *_slices(box))])

    def _read(self, fd: int, kept: Kept, begin: int, into: Tensor) -> None:
        data, start = as_bytes(into), kept.start + begin * kept.dtype.itemsize
        for lo in range(0, len(data), _PIECE):
            piece, done = data[lo : lo + _PIECE], 0
            while done < len(piece):
                got = os.preadv(fd, [piece[done:].data], start + lo + done)
                if not got:
                    raise DamagedError(f"{kept.file} ends before its tensors do; fetch it again.")
                done += got
        self.read_bytes += len(data)


class ArchiveWriter:
    """Writes tensors one by one, in any order, to as many files as it takes; they get their names on leaving.

    Args:
        directory: where to.
        entries: name -> dtype and shape.
        stem: what names of files begin with.
        file_bytes: from when on another file begins.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        stem: str = "model",
        file_bytes: int = 5 << 30,
    ) -> None:
        self.directory, self._stem = pathlib.Path(directory), stem
        self.directory.mkdir(parents=True, exist_ok=True)
        wrong = [f"{name} is {dtype}" for name, (dtype, _) in entries.items() if dtype not in _CODES]
        raise_all(TypeError, "safetensors files have no such dtype; convert first:", wrong)
        sizes = {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in entries.items()}
        self.total, groups = sum(sizes.values()), _grouped(sizes, file_bytes)
        many = len(groups) > 1
        self._names = [
            f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors" if many else f"{stem}.safetensors"
            for i in range(len(groups))
        ]
        self._at: dict[str, tuple[int, Kept]] = {}
        for i, group in enumerate(groups):
            path = self.directory / f"{self._names[i]}.tmp"
            text = _header({name: entries[name] for name in group})
            with open(path, "wb") as f:
                f.write(text)
                f.truncate(len(text) + sum(sizes[name] for name in group))
            at = len(text)
            for name in group:
                self._at[name] = i, Kept(path, *entries[name], at)
                at += sizes[name]
        self._left = set(entries)

    def put(self, name: str, x: Tensor) -> None:
        """Writes a tensor of the dtype and shape that were told."""
        kept = self._at[name][1]
        assert (x.dtype, tuple(x.shape)) == (kept.dtype, tuple(kept.shape)) and name in self._left
        data = as_bytes(x.detach().cpu().contiguous())
        with open(kept.file, "r+b") as f:
            f.seek(kept.start)
            f.write(data.data)
        self._left.remove(name)

    def __enter__(self) -> "ArchiveWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        paths = [self.directory / f"{name}.tmp" for name in self._names]
        if kind is not None:
            for path in paths:
                path.unlink(missing_ok=True)
            return
        assert not self._left, f"not written: {sorted(self._left)}"
        for path in paths:
            with open(path, "rb") as f:
                os.fsync(f.fileno())
            path.rename(path.with_suffix(""))
        one, index = self.directory / f"{self._stem}.safetensors", self.directory / (self._stem + INDEX)
        if len(paths) > 1:
            weights = {name: self._names[i] for name, (i, _) in self._at.items()}
            told = {"metadata": {"total_size": self.total}, "weight_map": weights}
            index.write_text(json.dumps(told, indent=2) + "\n")
            one.unlink(missing_ok=True)
        else:
            index.unlink(missing_ok=True)


def header_of(path: pathlib.Path) -> dict[str, Kept]:
    """The tensors of one file.

    Raises:
        DamagedError: the header is none, or speaks of bytes that the file does not have.
    """
    size = path.stat().st_size
    with open(path, "rb") as f:
        (length,) = struct.unpack("<Q", f.read(8)) if size >= 8 else (size,)
        if length > min(size - 8, _MAX_HEADER):
            raise DamagedError(
                f"{path} is no safetensors file, or was cut short: its header would have {length} bytes."
            )
        try:
            table: dict[str, Any] = json.loads(f.read(length))
            table.pop("__metadata__", None)
            out = {name: _kept(path, about, 8 + length) for name, about in table.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise DamagedError(f"{path}: its header cannot be understood ({problem}).") from problem
    ends = {name: x.start + math.prod(x.shape) * x.dtype.itemsize for name, x in out.items()}
    if beyond := [name for name, end in ends.items() if end > size]:
        raise DamagedError(f"{path} has {size} bytes and was cut short: it does not have all of {beyond}.")
    return out


def _kept(path: pathlib.Path, about: dict[str, Any], data: int) -> Kept:
    shape, (begin, end) = tuple(about["shape"]), about["data_offsets"]
    dtype = DTYPES[about["dtype"]]
    if min((*shape, begin), default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{about} contradicts itself")
    return Kept(path, dtype, shape, data + begin)


def _header(entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    out: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in entries.items():
        end = at + math.prod(shape) * dtype.itemsize
        out[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(out, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _grouped(sizes: Mapping[str, int], file_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if groups[-1] and held + size > file_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def _cut(dims: Sequence[int], box: Box, itemsize: int) -> tuple[int, int]:
    """Dims from which on rows are read whole, as little is left out of them; and bytes of such a row."""
    cut, row = len(dims), itemsize
    while cut and (dims[cut - 1] - (box[cut - 1][1] - box[cut - 1][0])) * row <= _PAGE:
        row *= dims[cut - 1]
        cut -= 1
    if cut == 0 and dims:  # of the first dim a range, even so
        cut, row = 1, row // max(dims[0], 1)
    return cut, row


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)
