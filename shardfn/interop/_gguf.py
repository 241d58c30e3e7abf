"""Reads GGUF files: settings and tensors in place, without a copy of the file in memory.

The format is that of ggml (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3, in the
order of bytes of x86 and ARM. A header is not trusted: each count, length and offset is compared with the size of the
file before it is used, so that a damaged file is an error with its place and never a crash or a huge allocation.
"""

import math
import mmap
import os
import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.core import first_of
from shardfn.memory import DamagedError

from ._gguf_blocks import BlockKind, decode_gguf_blocks, gguf_kind

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PACKED = {code: struct.Struct(f"<{code}") for code in _NUMBERS.values()}
_MAX_DIMS, _MAX_NESTING, _MAX_NAME = 4, 2, 65_535


class GGUFEntry(NamedTuple):
    """Place of a tensor in a GGUF file.

    Attributes:
        kind: kind of the tensor's blocks.
        shape: dims in torch's order. The last dim is contiguous in the file.
        start: offset of the first byte in the file.
        num_bytes: number of bytes.
    """

    kind: BlockKind
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class GGUFFile(Mapping[str, GGUFEntry]):
    """Settings and tensors of a GGUF file. The file is mapped, and a tensor's bytes are read at their use.

    Args:
        path: path of the file.

    Attributes:
        path: path of the file.
        fields: settings by name: numbers, texts, and lists of these.

    Raises:
        FileNotFoundError: the file is missing.
        DamagedError: the file is not a GGUF file, was cut short, or has a count, an offset or a kind of blocks that
            the format does not know. The message has the place.

    Example:
        >>> import pathlib, struct, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "tiny.gguf"
        >>> name = struct.pack("<Q", 1) + b"w"
        >>> tensor = name + struct.pack("<IQIQ", 1, 2, 0, 0)  # one dim of 2, of kind F32, at offset 0
        >>> head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor
        >>> _ = path.write_bytes(head.ljust(-len(head) % 32 + len(head), b"x") + struct.pack("<2f", 1.0, 2.0))
        >>> GGUFFile(path).load("w")
        tensor([1., 2.])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        with self.path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise DamagedError(f"{self.path} is empty, and no GGUF file.")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.fields, self._entries = _HeaderParser(self.path, self._data).parse()

    def __getitem__(self, name: str) -> GGUFEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def blocks(self, name: str) -> Tensor:
        """Returns the bytes of a tensor's rows, without change.

        Args:
            name: name of the tensor. A row has the tensor's last dim.

        Returns:
            Blocks of bytes, uint8, of shape (rows, bytes of a row).
        """
        entry = self._entries[name]
        rows = math.prod(entry.shape[:-1])
        size = entry.num_bytes // max(rows, 1)
        data = bytearray(self._data[entry.start : entry.start + rows * size])
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return flat.view(rows, size)

    def load(self, name: str) -> Tensor:
        """Returns a tensor, decoded to float32."""
        entry = self._entries[name]
        return decode_gguf_blocks(self.blocks(name), entry.kind).view(entry.shape)


class _HeaderParser:
    """Parser of a header. `_at` is the offset of the next byte."""

    def __init__(self, path: pathlib.Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size, self._at = path, data, len(data), 4

    def parse(self) -> tuple[dict[str, Any], dict[str, GGUFEntry]]:
        if self._data[:4] != _MAGIC:
            raise DamagedError(
                f"a GGUF file must begin with {_MAGIC!r}, but {self._path} begins with {self._data[:4]!r}."
            )
        self._take_version()
        num_tensors, num_fields = self._count("tensors", 24), self._count("settings", 13)
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._name("setting")
            if name in fields:
                self._fail(f"the setting {name!r} stands twice")
            fields[name] = self._value(self._number("I"), name, 0)
        return fields, self._parse_tensors(num_tensors, _alignment(self._path, fields))

    def _take_version(self) -> None:
        version = self._number("I")
        if version in (2 << 24, 3 << 24):
            raise DamagedError(f"{self._path} is written for processors with the other order of bytes. Convert it.")
        if version not in (2, 3):
            raise DamagedError(f"{self._path} has version {version} of GGUF. Versions 2 and 3 are known.")

    def _parse_tensors(self, num: int, alignment: int) -> dict[str, GGUFEntry]:
        told: list[tuple[str, BlockKind, tuple[int, ...], int]] = []
        for _ in range(num):
            name = self._name("tensor")
            num_dims = self._number("I")
            if not 1 <= num_dims <= _MAX_DIMS:
                self._fail(f"the tensor {name!r} has {num_dims} dims, and 1 to {_MAX_DIMS} are known")
            shape = tuple(reversed([self._number("Q") for _ in range(num_dims)]))
            told.append((name, self._kind(name), shape, self._number("Q")))
        begin = -(-self._at // alignment) * alignment
        entries: dict[str, GGUFEntry] = {}
        problems: list[str] = []
        for name, kind, shape, offset in told:
            if name in entries:
                problems.append(f"the tensor {name!r} stands twice")
            elif shape[-1] % kind.size:
                problems.append(
                    f"{name!r} has rows of {shape[-1]}, and blocks of {kind.name} have {kind.size} elements"
                )
            elif offset % alignment:
                problems.append(f"{name!r} begins at offset {offset}, which {alignment} does not divide")
            else:
                num_bytes = math.prod(shape) // kind.size * kind.bytes
                if begin + offset + num_bytes > self._size:
                    end = begin + offset + num_bytes
                    problems.append(f"{name!r} ends at byte {end}, and the file has {self._size} bytes")
                entries[name] = GGUFEntry(kind, shape, begin + offset, num_bytes)
        if problems:
            raise DamagedError("\n".join([f"{self._path} is damaged, or was cut short:", *first_of(problems, 20)]))
        return entries

    def _kind(self, name: str) -> BlockKind:
        number = self._number("I")
        try:
            return gguf_kind(number)
        except ValueError as error:
            raise DamagedError(f"{self._path}: the tensor {name!r} {error}") from None

    def _value(self, kind: int, name: str, depth: int) -> Any:
        if kind != _ARRAY:
            if kind != _STRING and kind not in _NUMBERS:
                self._fail(f"the setting {name!r} is of kind {kind}, which the format does not know")
            return self._text() if kind == _STRING else self._number(_NUMBERS[kind])
        if depth >= _MAX_NESTING:
            self._fail(f"the setting {name!r} has lists in lists in lists")
        inner = self._number("I")
        size = 8 if inner == _STRING else 12 if inner == _ARRAY else struct.calcsize(_NUMBERS.get(inner, "B"))
        num = self._count(f"elements of {name!r}", size)
        if inner in _NUMBERS:
            code = f"<{num}{_NUMBERS[inner]}"
            self._need(struct.calcsize(code))
            values = struct.unpack_from(code, self._data, self._at)
            self._at += struct.calcsize(code)
            return list(values)
        return self._texts(num) if inner == _STRING else [self._value(inner, name, depth + 1) for _ in range(num)]

    def _texts(self, num: int) -> list[str]:
        """Returns texts, in a loop without calls of methods, as vocabularies have 100,000 tokens."""
        data, at, size, unpack = self._data, self._at, self._size, _PACKED["Q"].unpack_from
        found = []
        for _ in range(num):
            length = unpack(data, at)[0] if at + 8 <= size else size
            if length > size - at - 8:
                self._at = at
                self._need(8)
                self._at = at + 8
                self._need(length)
            found.append(data[at + 8 : at + 8 + length].decode("utf-8", "replace"))
            at += 8 + length
        self._at = at
        return found

    def _count(self, what: str, least: int) -> int:
        num = self._number("Q")
        if num * least > self._size - self._at:
            self._fail(f"the file has {num} {what}, by its header, and {self._size - self._at} bytes are left")
        return num

    def _name(self, what: str) -> str:
        at, text = self._at, self._text()
        if len(text) > _MAX_NAME or not text:
            self._at = at
            self._fail(f"the name of a {what} has {len(text)} characters")
        return text

    def _text(self) -> str:
        length = self._number("Q")
        self._need(length)
        start, self._at = self._at, self._at + length
        return self._data[start : self._at].decode("utf-8", errors="replace")

    def _number(self, code: str) -> Any:
        packed = _PACKED[code]
        self._need(packed.size)
        self._at += packed.size
        return packed.unpack_from(self._data, self._at - packed.size)[0]

    def _need(self, num: int) -> None:
        if num > self._size - self._at:
            self._fail(f"{num} bytes are needed, and {self._size - self._at} are left")

    def _fail(self, problem: str) -> None:
        raise DamagedError(f"{self._path} is damaged, or was cut short, at byte {self._at} of its header: {problem}.")


def _alignment(path: pathlib.Path, fields: Mapping[str, Any]) -> int:
    told = fields.get("general.alignment", 32)
    if type(told) is not int or told < 1 or told & (told - 1) or told > 1 << 20:
        raise DamagedError(f"{path}: general.alignment must be a power of two of at most 2^20, got {told!r:.60}.")
    return told
