"""Reads GGUF files: settings and tensors in place, without a copy of the file in memory.

The format is that of ggml (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3, in the
order of bytes of x86 and ARM. A header is not trusted: each count, length and offset is compared with the size of the
file before it is used, so that a damaged file is an error with its place and never a crash or a huge allocation.

Decodes the blocks of GGUF files to float32, kind by kind, as ggml's `dequantize_row_*` define them.

A block has a fixed number of elements of a row, 32 or 256, and a fixed number of bytes: scales, and codes of 2 to 8
bits. Each decoder below takes blocks as uint8 of shape (blocks, bytes of a block), and returns float32 of shape
(blocks, elements of a block). All of them are written with torch operations, so that they run on any device.
"""

import math
import mmap
import os
import pathlib
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.core import first_of
from shardfn.memory import DamagedError


class _BlockKind(NamedTuple):
    """Kind of blocks of a GGUF file.

    Attributes:
        name: name in ggml, such as "Q4_1".
        size: number of elements of a block.
        bytes: number of bytes of a block.
        decode: function from blocks, uint8 (n, bytes), to elements, float32 (n, size).
    """

    name: str
    size: int
    bytes: int
    decode: Callable[[Tensor], Tensor]


def gguf_kind(number: int) -> _BlockKind:
    """Returns the kind of blocks of a number in a file.

    Raises:
        ValueError: the kind is not known, or its blocks are not decoded here.
    """
    if number not in _KINDS:
        known = ", ".join(x.name for x in _KINDS.values())
        raise ValueError(f"is of kind {number}, and the known kinds are {known}.")
    return _KINDS[number]


def decode_gguf_blocks(blocks: Tensor, kind: _BlockKind) -> Tensor:
    """Returns the elements of rows of blocks.

    Args:
        blocks: bytes of rows, uint8 of shape (rows, bytes of a row).
        kind: kind of the blocks.

    Returns:
        Elements in float32, of shape (rows, elements of a row).

    Example:
        >>> decode_gguf_blocks(torch.tensor([[0, 60] + [2] * 32], dtype=torch.uint8), gguf_kind(8))[0, :3]
        tensor([2., 2., 2.])
    """
    rows = blocks.shape[0]
    if not blocks.numel():
        return torch.empty(rows, blocks.shape[-1] // kind.bytes * kind.size)
    return kind.decode(blocks.reshape(-1, kind.bytes)).reshape(rows, -1)


def _halves(blocks: Tensor, first: int, num: int = 1) -> Tensor:
    """Returns float16 numbers at a byte of each block, as float32."""
    return blocks[:, first : first + 2 * num].contiguous().view(torch.float16).float()


def _nibbles(q: Tensor) -> Tensor:
    """Returns the low halves of bytes, then the high halves, along the last dim."""
    return torch.cat([q & 15, q >> 4], -1)


def _fifth_bits(blocks: Tensor, first: int) -> Tensor:
    """Returns 32 bits at a byte of each block, each as 16 or 0."""
    return _bits(blocks[:, first : first + 4]).flatten(1) << 4


def _bits(q: Tensor) -> Tensor:
    """Returns the bits of bytes, the least first, in a new last dim."""
    return (q.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=q.device)) & 1


def _view(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda b: b.contiguous().view(dtype).float()


def _q4_0(b: Tensor) -> Tensor:
    return _halves(b, 0) * (_nibbles(b[:, 2:]).to(torch.int8) - 8).float()


def _q4_1(b: Tensor) -> Tensor:
    return _halves(b, 0) * _nibbles(b[:, 4:]).float() + _halves(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return _halves(b, 0) * read_q5_0(b).float()


def read_q5_0(blocks: Tensor) -> Tensor:
    """Returns the codes of blocks of Q5_0, int8 from -16 to 15."""
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).to(torch.int8) - 16


def _q5_1(b: Tensor) -> Tensor:
    return _halves(b, 0) * (_nibbles(b[:, 8:]) | _fifth_bits(b, 4)).float() + _halves(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return _halves(b, 0) * b[:, 2:].view(torch.int8).float()


def _two_bits(q: Tensor) -> Tensor:
    """Returns codes of two bits: of each 32 bytes the lowest pairs of bits first, shape (blocks, 256)."""
    q = q.reshape(len(q), -1, 1, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=q.device).view(1, 1, 4, 1)
    return ((q >> shifts) & 3).reshape(len(q), -1)


def _q2_k(b: Tensor) -> Tensor:
    scales, q = b[:, :16], _two_bits(b[:, 16:80]).view(len(b), 16, 16).float()
    d, least = _halves(b, 80), _halves(b, 82)
    return ((d * (scales & 15).float()).unsqueeze(-1) * q - (least * (scales >> 4).float()).unsqueeze(-1)).flatten(1)


def _q3_k(b: Tensor) -> Tensor:
    high, low, packed = b[:, :32], _two_bits(b[:, 32:96]), b[:, 96:108]
    # 16 scales of 6 bits: 4 low bits in 8 bytes, 2 high bits in 4 bytes.
    low_bits = _nibbles(packed[:, :8])
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device).view(1, 4, 1)
    high_bits = ((packed[:, 8:].unsqueeze(1) >> shifts) & 3).flatten(1)
    scales = (low_bits | (high_bits << 4)).to(torch.int8) - 32
    # A bit of 0 subtracts 4. Bit k of 32 bytes belongs to the k-th 32 elements.
    third = _bits(high).transpose(1, 2).reshape(len(b), -1)
    q = low.to(torch.int8) - ((third ^ 1) << 2).to(torch.int8)
    scale = _halves(b, 108) * scales.float()
    return (scale.unsqueeze(-1) * q.view(len(b), 16, 16).float()).flatten(1)


def _scales_of_six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 8 scales and 8 least values of 6 bits from 12 bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], -1)
    least = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], -1)
    return scales.float(), least.float()


def _q4_k(b: Tensor) -> Tensor:
    scale, least, q = read_q4_k(b)
    return (scale.unsqueeze(-1) * q.float() - least.unsqueeze(-1)).flatten(1)


def read_q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns scales [n, 8] of blocks of Q4_K, numbers [n, 8] that are subtracted, and codes [n, 8, 32]."""
    scales, least = _scales_of_six_bits(blocks[:, 4:16])
    q = _nibbles(blocks[:, 16:].reshape(len(blocks), 4, 32)).view(len(blocks), 8, 32)
    return _halves(blocks, 0) * scales, _halves(blocks, 2) * least, q


def _q5_k(b: Tensor) -> Tensor:
    scales, least = _scales_of_six_bits(b[:, 4:16])
    high = _bits(b[:, 16:48]).transpose(1, 2) << 4
    q = (_nibbles(b[:, 48:].reshape(len(b), 4, 32)).view(len(b), 8, 32) | high).float()
    return _by_scales(b, scales, least, q)


def _by_scales(b: Tensor, scales: Tensor, least: Tensor, q: Tensor) -> Tensor:
    d, m = _halves(b, 0), _halves(b, 2)
    return ((d * scales).unsqueeze(-1) * q - (m * least).unsqueeze(-1)).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    low, high = b[:, :128].reshape(len(b), 2, 64), b[:, 128:192].reshape(len(b), 2, 1, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device).view(1, 1, 4, 1)
    q = _nibbles(low).view(len(b), 2, 4, 32) | (((high >> shifts) & 3) << 4)
    scale = _halves(b, 208) * b[:, 192:208].contiguous().view(torch.int8).float()
    return (scale.unsqueeze(-1) * (q.reshape(len(b), 16, 16).to(torch.int8) - 32).float()).flatten(1)


_KINDS = {
    0: _BlockKind("F32", 1, 4, _view(torch.float32)),
    1: _BlockKind("F16", 1, 2, _view(torch.float16)),
    2: _BlockKind("Q4_0", 32, 18, _q4_0),
    3: _BlockKind("Q4_1", 32, 20, _q4_1),
    6: _BlockKind("Q5_0", 32, 22, _q5_0),
    7: _BlockKind("Q5_1", 32, 24, _q5_1),
    8: _BlockKind("Q8_0", 32, 34, _q8_0),
    10: _BlockKind("Q2_K", 256, 84, _q2_k),
    11: _BlockKind("Q3_K", 256, 110, _q3_k),
    12: _BlockKind("Q4_K", 256, 144, _q4_k),
    13: _BlockKind("Q5_K", 256, 176, _q5_k),
    14: _BlockKind("Q6_K", 256, 210, _q6_k),
    30: _BlockKind("BF16", 1, 2, _view(torch.bfloat16)),
}


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

    kind: _BlockKind
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
        told: list[tuple[str, _BlockKind, tuple[int, ...], int]] = []
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
            elif 0 in shape:
                problems.append(f"{name!r} has the shape {shape}, and each dim must be 1 or more")
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

    def _kind(self, name: str) -> _BlockKind:
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
