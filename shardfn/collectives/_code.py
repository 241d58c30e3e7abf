"""What quantised tensors travel as: messages of bytes, one a rank, each with its scales and its codes.

    encode(flat, runs)            [a, b, ...] => [message of a, message of b, ...]
    decode(messages, runs)        the inverse
    decode_sum(messages, num)     of num ranks, one after another: the sum, in fp32, in their order
    decode_sum_encode             the same, encoded again

A message is [scales, fp32][codes][0 to 3 bytes of padding], its block of elements being one row of
`shardfn.kernels.quantize`; so no scale is shared between ranks, and an infinity or NaN stays one. The sizes of blocks
are given as runs, see `as_runs`. In a captured graph each call is one node.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.kernels import dequantize, dequantize_sum, dequantize_sum_quantize, quantize

from ._wire_ops import as_runs

_LIBRARY = torch.library.Library("shardfn", "FRAGMENT")
_CODE = "int[] runs, int bits, int block"
_LIBRARY.define(f"encode(Tensor flat, {_CODE}) -> Tensor")
_LIBRARY.define(f"decode(Tensor messages, {_CODE}, ScalarType dtype) -> Tensor")
_LIBRARY.define(f"decode_sum(Tensor messages, int num, {_CODE}) -> Tensor")
_LIBRARY.define(f"decode_sum_encode(Tensor messages, int num, {_CODE}) -> Tensor")
_ops = torch.ops.shardfn


class Code(NamedTuple):
    """How elements are rounded: to so many bits, with a scale for each block of so many elements.

    Example:
        >>> code = Code(8, 256)
        >>> message = code.encode(torch.tensor([-1.0, 0.5]), [2])
        >>> message.numel(), code.decode(message, [2], torch.float32)
        (8, tensor([-1.0000,  0.5000]))
    """

    bits: int
    block: int

    def lengths(self, sizes: Sequence[int]) -> list[int]:
        """The bytes of messages of so many elements."""
        known = {n: _length(n, self.bits, self.block) for n in set(sizes)}
        return [known[n] for n in sizes]

    def encode(self, flat: Tensor, sizes: Sequence[int]) -> Tensor:
        """One message for each block of `flat`, uint8."""
        return _ops.encode(flat, as_runs(sizes), *self)

    def decode(self, messages: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The blocks that messages stand for."""
        return _ops.decode(messages, as_runs(sizes), *self, dtype)

    def sum(self, messages: Tensor, num: int, sizes: Sequence[int]) -> Tensor:
        """The sum of the blocks of `num` ranks, fp32; the messages of each stand one after another."""
        return _ops.decode_sum(messages, num, as_runs(sizes), *self)

    def sum_again(self, messages: Tensor, num: int, sizes: Sequence[int]) -> Tensor:
        """`encode(sum(messages))`."""
        return _ops.decode_sum_encode(messages, num, as_runs(sizes), *self)


def _length(n: int, bits: int, block: int) -> int:
    return -(-(4 * -(-n // block) + -(-n * bits // 8)) // 4) * 4


class _Run(NamedTuple):
    """Neighbouring blocks of one size.

    Attributes:
        num: how many.
        n: elements of one.
        at: where their elements are.
        place: where their messages are.
        scales: bytes of a message that are scales.
        end: where its padding begins.
        length: bytes of a message.
    """

    num: int
    n: int
    at: slice
    place: slice
    scales: int
    end: int
    length: int


def _runs(runs: Sequence[int], bits: int, block: int) -> Iterator[_Run]:
    at = place = 0
    for num, n in zip(runs[::2], runs[1::2], strict=True):
        if not n:
            continue
        scales, length = 4 * -(-n // block), _length(n, bits, block)
        here, there = slice(at, at + num * n), slice(place, place + num * length)
        yield _Run(num, n, here, there, scales, scales + -(-n * bits // 8), length)
        at, place = here.stop, there.stop


def _totals(runs: Sequence[int], bits: int, block: int) -> tuple[int, int]:
    """Elements, and bytes of messages."""
    last = [(r.at.stop, r.place.stop) for r in _runs(runs, bits, block)]
    return last[-1] if last else (0, 0)


def _write(grid: Tensor, run: _Run, codes: Tensor, scales: Tensor) -> None:
    grid[:, : run.scales] = scales.view(torch.uint8)
    grid[:, run.scales : run.end] = codes.view(torch.uint8)
    grid[:, run.end :] = 0


def _read(grid: Tensor, run: _Run, bits: int) -> tuple[Tensor, Tensor]:
    codes = grid[..., run.scales : run.end].contiguous()
    scales = grid[..., : run.scales].contiguous().view(torch.float32)
    return codes.view(torch.int8) if bits == 8 else codes, scales


def _encode(flat: Tensor, runs: Sequence[int], bits: int, block: int) -> Tensor:
    out = flat.new_empty(_totals(runs, bits, block)[1], dtype=torch.uint8)
    flat = flat.reshape(-1)
    for run in _runs(runs, bits, block):
        x = flat[run.at].view(run.num, run.n)
        codes, scales = quantize(x.float() if x.dtype == torch.float64 else x, bits=bits, block=block)
        _write(out[run.place].view(run.num, run.length), run, codes, scales)
    return out


def _decode(messages: Tensor, runs: Sequence[int], bits: int, block: int, dtype: torch.dtype) -> Tensor:
    narrow = torch.float32 if dtype == torch.float64 else dtype
    out = messages.new_empty(_totals(runs, bits, block)[0], dtype=narrow)
    for run in _runs(runs, bits, block):
        codes, scales = _read(messages[run.place].view(run.num, run.length), run, bits)
        dequantize(codes, scales, run.n, bits=bits, block=block, out=out[run.at].view(run.num, run.n))
    return out.to(dtype)


def _decode_sum(messages: Tensor, num: int, runs: Sequence[int], bits: int, block: int) -> Tensor:
    numel, length = _totals(runs, bits, block)
    out = messages.new_empty(numel, dtype=torch.float32)
    for run in _runs(runs, bits, block):
        codes, scales = _read(_of_ranks(messages, num, length, run), run, bits)
        out[run.at] = dequantize_sum(codes, scales, run.n, bits=bits, block=block).view(-1)
    return out


def _decode_sum_encode(messages: Tensor, num: int, runs: Sequence[int], bits: int, block: int) -> Tensor:
    length = _totals(runs, bits, block)[1]
    out = messages.new_empty(length)
    for run in _runs(runs, bits, block):
        codes, scales = _read(_of_ranks(messages, num, length, run), run, bits)
        codes, scales = dequantize_sum_quantize(codes, scales, run.n, bits=bits, block=block)
        _write(out[run.place].view(run.num, run.length), run, codes, scales)
    return out


def _of_ranks(messages: Tensor, num: int, length: int, run: _Run) -> Tensor:
    return messages.view(num, length)[:, run.place].unflatten(1, (run.num, run.length))


for _name, _impl in (
    ("encode", _encode),
    ("decode", _decode),
    ("decode_sum", _decode_sum),
    ("decode_sum_encode", _decode_sum_encode),
):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")


@torch.library.register_fake("shardfn::encode", lib=_LIBRARY)
def _(flat: Tensor, runs: Sequence[int], bits: int, block: int) -> Tensor:
    return flat.new_empty(_totals(runs, bits, block)[1], dtype=torch.uint8)


@torch.library.register_fake("shardfn::decode", lib=_LIBRARY)
def _(messages: Tensor, runs: Sequence[int], bits: int, block: int, dtype: torch.dtype) -> Tensor:
    return messages.new_empty(_totals(runs, bits, block)[0], dtype=dtype)


@torch.library.register_fake("shardfn::decode_sum", lib=_LIBRARY)
def _(messages: Tensor, num: int, runs: Sequence[int], bits: int, block: int) -> Tensor:
    return messages.new_empty(_totals(runs, bits, block)[0], dtype=torch.float32)


@torch.library.register_fake("shardfn::decode_sum_encode", lib=_LIBRARY)
def _(messages: Tensor, num: int, runs: Sequence[int], bits: int, block: int) -> Tensor:
    return messages.new_empty(_totals(runs, bits, block)[1])
