"""Files of mxfp4, as of gpt-oss: experts whose weights have blocks of 32 numbers of 4 bits with a shared power of two.

    NAME_blocks   uint8 [E, N, K / 32, 16]    two numbers of a byte, the first in the lower bits
    NAME_scales   uint8 [E, N, K / 32]        exponent + 127
    NAME          [E, K, N], decoded: inputs come before outputs, as in the files of floats

E experts, N outputs, K inputs.

References:
    Open Compute Project, Microscaling Formats (MX) Specification 1.0, 2023
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardfn.checkpoint import SafetensorsEntry
from shardfn.core import raise_all
from shardfn.interop.leaves import Archive
from shardfn.kernels import Quantization

from ._weight import Span

_BLOCK = 32
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_HALF, *(-x for x in _HALF))


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the numbers of blocks, float32 [.., K].

    Args:
        blocks: uint8 [.., K / 32, 16].
        scales: uint8 [.., K / 32].

    Example:
        >>> decode_mxfp4(torch.full((1, 16), 0x2A, dtype=torch.uint8), torch.tensor([128], dtype=torch.uint8))[:2]
        tensor([-2.,  2.])
    """
    table = torch.tensor(VALUES)
    pairs = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], -1).flatten(-2)
    return torch.ldexp(pairs, scales[..., None].int() - 127).flatten(-2)


class MXFP4Archive(Mapping[str, SafetensorsEntry]):
    """Tensors of an archive, with decoded weights in place of blocks and scales. Only requested experts are decoded.

    Args:
        archive: files of the model.

    Raises:
        ValueError: blocks or scales are missing, or of other shapes or dtypes. The message lists all.
    """

    def __init__(self, archive: Archive) -> None:
        self.directory, self._archive, problems = archive.directory, archive, list[str]()
        self._entries: dict[str, SafetensorsEntry] = {}
        paths = {name.removesuffix(end) for name in archive for end in ("_blocks", "_scales") if name.endswith(end)}
        for path in sorted(paths):
            if missing := [f"{path}{end}" for end in ("_blocks", "_scales") if f"{path}{end}" not in archive]:
                problems += [f"{name} is missing" for name in missing]
                continue
            blocks, scales = archive[f"{path}_blocks"], archive[f"{path}_scales"]
            if blocks.dtype != torch.uint8 or len(blocks.shape) != 4 or blocks.shape[3] != _BLOCK // 2:
                problems.append(f"{path}_blocks must be uint8 [E, N, K / 32, 16], got {blocks.dtype} {blocks.shape}")
            elif scales.dtype != torch.uint8 or scales.shape != blocks.shape[:3]:
                wanted = f"uint8 {blocks.shape[:3]}"
                problems.append(f"{path}_scales must be {wanted}, got {scales.dtype} {scales.shape}")
            else:
                E, N, num = blocks.shape[:3]
                self._entries[path] = blocks._replace(dtype=torch.bfloat16, shape=(E, num * _BLOCK, N))
        if not paths:
            problems.append("there is no tensor named *_blocks")
        raise_all(ValueError, f"{archive.directory} does not fit its quantization_config of mxfp4:", problems)
        self._plain = [name for name in archive if not name.endswith(("_blocks", "_scales"))]

    @property
    def codes(self) -> Mapping[str, Quantization]:
        """Returns no weights, as the kernels have no codes for mxfp4."""
        return {}

    def blocks(self, name: str, rows: Span, groups: Span) -> Tensor:
        """Refuses to return blocks of codes of the kernels.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{name}: mxfp4 has no codes of the kernels, got rows {rows} and groups {groups}. Decode it.")

    def __getitem__(self, name: str) -> SafetensorsEntry:
        if name in self._entries:
            return self._entries[name]
        if name not in self._plain:
            raise KeyError(name)
        return self._archive[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        yield from self._entries

    def __len__(self) -> int:
        return len(self._plain) + len(self._entries)

    def box(self, name: str, box: Sequence[Span], shape: Sequence[int] | None = None) -> Tensor:
        """Returns a box of a tensor: see `CodedArchive`. The first dim of a decoded weight counts experts."""
        if name not in self._entries:
            return self._archive.box(name, box, shape)
        E, K, N = self._entries[name].shape
        dims = tuple(shape or (E, K, N))
        assert dims[0] == E, "a view keeps the dim of experts"
        (start, stop), *inner = box
        if not math.prod(b - a for a, b in box):
            return torch.empty([b - a for a, b in box])
        parts = list[Tensor]()
        for e in range(start, stop):  # a whole layer of floats is not in memory beside the result
            blocks = self._archive.box(f"{name}_blocks", [(e, e + 1), (0, N), (0, K // _BLOCK), (0, _BLOCK // 2)])
            scales = self._archive.box(f"{name}_scales", [(e, e + 1), (0, N), (0, K // _BLOCK)])
            decoded = decode_mxfp4(blocks[0], scales[0]).T.contiguous().view(dims[1:])
            parts.append(decoded[tuple(slice(a, b) for a, b in inner)].clone())
        return torch.stack(parts)
