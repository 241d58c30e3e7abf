"""Quantised weight of a linear layer: integers with scales and zero points of groups of inputs.

    w = scale (q - zero)

The product is exact in float32 for scales of 16 bits. So the codes of the kernels hold many such weights without a
change of any value:

    int8    w = scale (q - zero),             where q - zero is from -128 to 127
    int4    w = scale q + least,              where q is from 0 to 15, and least = -scale zero is exact in float16

N outputs, K inputs, G groups of inputs.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.kernels import GROUP, Quantization

Span = tuple[int, int]
_ROWS = 512  # rows that are decoded at a time


class Groups(NamedTuple):
    """Scales [n, G] and zero points [n, G] of some outputs, for example of rows 512 to 1023."""

    scale: Tensor
    zero: Tensor


class QuantizedWeight(NamedTuple):
    """Quantised weight [N, K]. Only the requested part is read.

    Attributes:
        shape: N and K.
        dtype: dtype of the scales.
        bits: number of bits of an integer. None for floats of 8 bits.
        order: group of each input.
        group: number of consecutive inputs with one scale. None for groups of other inputs.
        integers: function from a range of outputs and a range of inputs to integers of int16, or to floats.
        groups: function from a range of outputs to scales and zero points.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    bits: int | None
    order: Tensor
    group: int | None
    integers: Callable[[Span, Span], Tensor]
    groups: Callable[[Span], Groups]

    def decode(self, rows: Span, cols: Span) -> Tensor:
        """Returns the dequantized values of some rows and columns, in float32."""
        return torch.cat([self._decode_rows(some, cols) for some in _split_rows(rows)])

    def _decode_rows(self, rows: Span, cols: Span) -> Tensor:
        (scale, zero), q, at = self.groups(rows), self.integers(rows, cols), self.order[slice(*cols)]
        return scale.float()[:, at] * (q - zero[:, at]).float()

    def find_codes(self) -> Quantization | None:
        """Returns the codes of the kernels that hold the weight without a change of any value, or None."""
        n, k = self.shape
        if self.bits is None or self.group is None or self.group % GROUP or k % GROUP or not n:
            return None
        int4 = self.bits <= 4
        for rows in _split_rows((0, n)):
            scale, zero = self.groups(rows)
            if not torch.equal(scale.float(), scale.half().float()):
                return None
            if bool(((zero < 2**self.bits - 128) | (zero > 128)).any()):
                return None
            least = scale.float() * -zero.float()
            int4 = int4 and torch.equal(least, least.half().float())
        return "int4" if int4 else "int8"

    def blocks(self, codes: Quantization, rows: Span, groups: Span) -> Tensor:
        """Returns blocks of codes, in the form of `kernels.quantize_blocks`.

        Args:
            codes: result of `find_codes`, for example "int8".
            rows: range of outputs.
            groups: range of blocks of 32 inputs.
        """
        return torch.cat([self._make_blocks(codes, some, groups) for some in _split_rows(rows)])

    def _make_blocks(self, codes: Quantization, rows: Span, groups: Span) -> Tensor:
        firsts = self.order[torch.arange(*groups) * GROUP]
        scale, zero = (x[:, firsts, None] for x in self.groups(rows))
        q = self.integers(rows, (groups[0] * GROUP, groups[1] * GROUP)).unflatten(1, (-1, GROUP))
        parts = [_to_bytes(scale.half())]
        if codes == "int8":
            parts.append(_to_bytes((q - zero).to(torch.int8)))
        else:
            q = q.to(torch.uint8)
            least = (scale.float() * -zero.float()).half()
            parts += [_to_bytes(least), q[..., : GROUP // 2] | q[..., GROUP // 2 :] << 4]
        return torch.cat(parts, -1).flatten(1)


def _to_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _split_rows(rows: Span) -> Iterator[Span]:
    for start in range(rows[0], rows[1], _ROWS):
        yield start, min(start + _ROWS, rows[1])
