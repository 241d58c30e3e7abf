"""Messages of quantised tensors: bytes, each message with its scales and its codes.

    encode(flat, sizes, c)          blocks of up to c elements => a message each
    decode(messages, sizes, c)      the inverse
    decode_sum(messages, num, n)    of num messages of n elements, one after another: the sum, in fp32, in their order
    decode_sum_encode(messages, num)  the same for several blocks at once, each sum encoded again

A message is [scales, fp32][codes][0 to 3 bytes of padding]. The elements, with zeros up to c, are one row of
`shardfn.kernels.quantize`. So all messages of a transfer have the same length, no scale is shared between ranks, and an
infinity or NaN stays as before. In a captured graph each call is one node.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.kernels import dequantize, dequantize_sum, dequantize_sum_quantize, quantize

from ._wire_ops import as_runs

_LIBRARY = torch.library.Library("shardfn", "FRAGMENT")
_LIBRARY.define("encode(Tensor flat, int[] runs, int c, int bits, int block) -> Tensor")
_LIBRARY.define("decode(Tensor messages, int[] runs, int c, int bits, int block, ScalarType dtype) -> Tensor")
_LIBRARY.define("decode_sum(Tensor messages, int num, int n, int c, int bits, int block) -> Tensor")
_LIBRARY.define("decode_sum_encode(Tensor messages, int num, int c, int bits, int block) -> Tensor")
_ops = torch.ops.shardfn


class Quantizer(NamedTuple):
    """Rounding of elements to `bits` bits each, for example 8 bits, with a scale for each `block` elements.

    Example:
        >>> code = Code(8, 256)
        >>> message = code.encode(torch.tensor([-1.0, 0.5]), [2], 2)
        >>> message.numel(), code.decode(message, [2], 2, torch.float32)
        (8, tensor([-1.0000,  0.5000]))
    """

    bits: int
    block: int

    def length(self, c: int) -> int:
        """Returns the bytes of a message of c elements."""
        return _message_length(c, self.bits, self.block)

    def encode(self, flat: Tensor, sizes: Sequence[int], c: int) -> Tensor:
        """Returns a message of c elements for each block of `flat`, uint8."""
        return _ops.encode(flat, as_runs(sizes), c, *self)

    def decode(self, messages: Tensor, sizes: Sequence[int], c: int, dtype: torch.dtype) -> Tensor:
        """Returns the blocks that messages encode."""
        return _ops.decode(messages, as_runs(sizes), c, *self, dtype)

    def sum(self, messages: Tensor, num: int, n: int, c: int) -> Tensor:
        """Returns the sum of one block's messages from `num` ranks, fp32 [n]."""
        return _ops.decode_sum(messages, num, n, c, *self)

    def sum_again(self, messages: Tensor, num: int, c: int) -> Tensor:
        """Returns the messages of the sums of blocks, from the messages of `num` ranks, rank by rank."""
        return _ops.decode_sum_encode(messages, num, c, *self)


def _message_length(c: int, bits: int, block: int) -> int:
    return -(-(4 * -(-c // block) + -(-c * bits // 8)) // 4) * 4


def _encode_runs(flat: Tensor, runs: Sequence[int], c: int, bits: int, block: int) -> Tensor:
    rows, start = list[Tensor](), 0
    for num, n in zip(runs[::2], runs[1::2], strict=True):
        x = flat[start : start + num * n].view(num, n)
        rows.append(x if n == c else torch.nn.functional.pad(x, (0, c - n)))
        start += num * n
    x = rows[0] if len(rows) == 1 else torch.cat(rows)
    return _join_message(*quantize(x.float() if x.dtype == torch.float64 else x, bits=bits, block=block))


def _decode_runs(messages: Tensor, runs: Sequence[int], c: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    num, narrow = sum(runs[::2]), torch.float32 if dtype == torch.float64 else dtype
    codes, scales = _split_messages(messages.view(num, -1), c, bits, block)
    x = dequantize(codes, scales, c, bits=bits, block=block, dtype=narrow)
    rows, start = list[Tensor](), 0
    for num, n in zip(runs[::2], runs[1::2], strict=True):
        rows.append(x[start : start + num, :n].reshape(-1))
        start += num
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(dtype)


def _decode_sum(messages: Tensor, num: int, n: int, c: int, bits: int, block: int) -> Tensor:
    codes, scales = _split_messages(messages.view(num, 1, -1), c, bits, block)
    total = dequantize_sum(codes, scales, c, bits=bits, block=block).view(-1)
    return total if n == c else total[:n].clone()


def _decode_sum_encode(messages: Tensor, num: int, c: int, bits: int, block: int) -> Tensor:
    codes, scales = _split_messages(messages.view(num, -1, _message_length(c, bits, block)), c, bits, block)
    return _join_message(*dequantize_sum_quantize(codes, scales, c, bits=bits, block=block))


def _join_message(codes: Tensor, scales: Tensor) -> Tensor:
    parts = [scales.view(torch.uint8), codes.view(torch.uint8)]
    padding = -sum(x.shape[1] for x in parts) % 4
    if padding:
        parts.append(codes.new_zeros(len(codes), padding, dtype=torch.uint8))
    return torch.cat(parts, 1).view(-1)


def _split_messages(messages: Tensor, c: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    begin = 4 * -(-c // block)
    codes = messages[..., begin : begin + -(-c * bits // 8)].contiguous()
    scales = messages[..., :begin].contiguous().view(torch.float32)
    return codes.view(torch.int8) if bits == 8 else codes, scales


for _name, _impl in (
    ("encode", _encode_runs),
    ("decode", _decode_runs),
    ("decode_sum", _decode_sum),
    ("decode_sum_encode", _decode_sum_encode),
):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")


@torch.library.register_fake("shardfn::encode", lib=_LIBRARY)
def _(flat: Tensor, runs: Sequence[int], c: int, bits: int, block: int) -> Tensor:
    return flat.new_empty(sum(runs[::2]) * _message_length(c, bits, block), dtype=torch.uint8)


@torch.library.register_fake("shardfn::decode", lib=_LIBRARY)
def _(messages: Tensor, runs: Sequence[int], c: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    total = sum(num * n for num, n in zip(runs[::2], runs[1::2], strict=True))
    return messages.new_empty(total, dtype=dtype)


@torch.library.register_fake("shardfn::decode_sum", lib=_LIBRARY)
def _(messages: Tensor, num: int, n: int, c: int, bits: int, block: int) -> Tensor:
    return messages.new_empty(n, dtype=torch.float32)


@torch.library.register_fake("shardfn::decode_sum_encode", lib=_LIBRARY)
def _(messages: Tensor, num: int, c: int, bits: int, block: int) -> Tensor:
    return messages.new_empty(messages.numel() // num)
