"""Compressors: values that turn rows of floats into codes and back.

    sign      1 bit per element, one scale            q = sign(x), zero counts as positive;  s = sqrt(mean(x^2))
    int8      1 byte an element, a scale a block     q = round(x / s);  s = 2 max|x| / 2^8
    int4      half a byte, a scale a block           q = round(x / s);  s = 2 max|x| / 2^4
    top_k     the largest elements and their places
    identity  nothing

A compressor works on `x [r, c]` in float32. The codes are tensors with a leading dim of r, so that each row can go to
another rank. The memory from a call to the next is an error like `x`, or `()`.

Compressed collectives also share checks before any message, and buckets in flight while other buckets start.
"""

import collections
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float32
from torch import Tensor
from torch.autograd import forward_ad

from shardfn import kernels
from shardfn._torch import disable_current_modes, forward_level, is_functorch_wrapped_tensor
from shardfn.core import PyTree, raise_all

# Elements of a single message: half a megabyte at one bit each.
BUCKET = 1 << 22


def buckets(leaves: Sequence[Any], size: int) -> list[list[Any]]:
    """Returns buckets of neighbours, each of `size` elements at most, without empty leaves."""
    out: list[list[Any]] = []
    room = 0
    for leaf in leaves:
        if leaf.cut.n == 0:
            continue
        if leaf.cut.n > room or not out:
            out.append([])
            room = size
        out[-1].append(leaf)
        room -= leaf.cut.n
    return out


def staggered(runs: Sequence[Iterator[None]]) -> None:
    """Runs each iterator to the end, a stage at a time.

    One more starts, then all started iterators continue, youngest first.

    So every message that can be sent is sent before any run waits only to receive.
    """
    # The order depends on the number of runs and on their stops, never on arrivals. So the order is equal on all ranks,
    # and messages need no names.
    under_way: collections.deque[Iterator[None]] = collections.deque()
    waiting = collections.deque(runs)
    while waiting or under_way:
        if waiting:
            under_way.append(waiting.popleft())
        for run in list(under_way)[::-1]:
            if next(run, under_way) is under_way:
                under_way.remove(run)


def padded(flat: Tensor, size: int) -> Tensor:
    """Returns `flat` with zeros behind."""
    return flat if flat.numel() == size else torch.nn.functional.pad(flat, (0, size - flat.numel()))


def check_leaves(op: str, leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Raises unless every leaf is a floating point tensor without a gradient."""
    bad = [f"{path} is {_describe_kind(x)}" for path, x in zip(paths, leaves, strict=True)
           if not (isinstance(x, Tensor) and x.is_floating_point())]  # fmt: skip
    raise_all(TypeError, f"{op} takes floating point tensors:", bad)
    bad = [f"{path} of shape {tuple(x.shape)}" for path, x in zip(paths, leaves, strict=True) if _is_followed(x)]
    raise_all(
        NotImplementedError,
        f"{op} is not a linear function and has no derivative, nor a vmap rule. Call it outside of torch.func and"
        " under torch.no_grad(), or pass x.detach(), for",
        bad,
    )


def _describe_kind(x: Any) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else repr(x)


def _is_followed(x: Tensor) -> bool:
    if is_functorch_wrapped_tensor(x) or (x.requires_grad and torch.is_grad_enabled()):
        return True
    return forward_level() >= 0 and forward_ad.unpack_dual(x).tangent is not None


def matched(op: str, treedef: Any, state: PyTree) -> list[Any]:
    """Returns the state of each leaf.

    Raises:
        ValueError: the state is of another tree.
    """
    try:
        return treedef.flatten_up_to(state)
    except ValueError as error:
        raise ValueError(
            f"{op}: the state must be of this tree's structure. Make it by compressed_init. {error}"
        ) from error


def misfit(op: str, ranks: int) -> str:
    """Returns the first line of an error that lists states of another size."""
    return (
        f"{op} over {ranks} rank{'s' * (ranks > 1)}: a state that does not fit. compressed_init makes one that does,"
        " and recut_residuals one for another number of ranks:"
    )


Codes = tuple[Tensor, ...]
Memory = Tensor | tuple[()]


class Compress(Protocol):
    """`(x, memory, whole=, donate=) -> (codes, memory)`."""

    def __call__(self, x: Tensor, memory: Memory, /, *, whole: bool, donate: bool) -> tuple[Codes, Memory]:
        """Returns the codes of a tensor."""
        ...


class Compressor(NamedTuple):
    """Compressor of rows of floats into codes, and back, such as `sign()` or `int8()`.

    A new compressor needs the first four fields.

    Attributes:
        name: name in messages.
        init: `like [r, c] -> memory`: zeros like `like`, or `()`.
        compress: `(x [r, c], memory, whole=, donate=) -> (codes, memory)`. `whole`: the rows are parts of a single
            tensor, so that a scale of the whole is taken over all rows. `donate`: `x` and the memory may be
            overwritten.
        decompress: `(codes, c) -> x [r, c]`.
        quantum: divisor of a row's length.
        fed_back: the compressor with error feedback, if there is a faster form than the plain combination.
        pads: whether `compress` takes `x` of any float dtype and shape that fills the memory in part. The rest is zero.
        mean: `(codes of k rows, memory [1, c]) -> (codes of one row, memory)`: decompressed, averaged in the order of
            rows and compressed again, over the memory. None means step by step.
        total: `(codes of k rows, c) -> x [1, c]`: decompressed and summed in the order of rows. None means step by
            step.
        decompress_into: `(codes, out [r, c])`: `decompress` into existing memory. None means not supported.

    Example:
        >>> codes, _ = sign().compress(torch.tensor([[3.0, -4.0, 3.0, -4.0, 3.0, -4.0, 3.0, -4.0]]), (), whole=True,
        ...                            donate=False)
        >>> codes[0], sign().decompress(codes, 8)[0, :2]
        (tensor([[170]], dtype=torch.uint8), tensor([ 3.5355, -3.5355]))
    """

    name: str
    init: Callable[[Tensor], Memory]
    compress: Compress
    decompress: Callable[[Codes, int], Tensor]
    quantum: int = 1
    fed_back: "Compressor | None" = None
    pads: bool = False
    mean: Callable[[Codes, Memory], tuple[Codes, Memory]] | None = None
    total: Callable[[Codes, int], Tensor] | None = None
    decompress_into: Callable[[Codes, Tensor], None] | None = None

    @property
    def remembers(self) -> bool:
        """Returns whether there is a memory."""
        return _has_memory(self.init)


@functools.lru_cache(maxsize=256)
def _has_memory(init: Callable[[Tensor], Memory]) -> bool:
    with disable_current_modes():  # a captured program must not hold the result
        return isinstance(init(torch.empty(1, 0)), Tensor)


def combine(compressor: Compressor, codes: Codes, memory: Memory, c: int, divisor: int) -> tuple[Codes, Memory]:
    """Sums the rows of several ranks in order, divides the sum, and compresses it again as a single row."""
    if compressor.mean is not None and divisor == len(codes[0]):
        return compressor.mean(codes, memory)
    total = sum_of_rows(compressor, codes, c)
    total = total.div_(divisor) if divisor > 1 else total
    return compressor.compress(total, memory, whole=True, donate=True)


def sum_of_rows(compressor: Compressor, codes: Codes, c: int) -> Float32[Tensor, "1 c"]:
    """Returns the sum of the decompressed rows, taken in order: a new tensor."""
    if compressor.total is not None:
        return compressor.total(codes, c)
    rows = [compressor.decompress(tuple(part[i : i + 1] for part in codes), c) for i in range(codes[0].shape[0])]
    # The first row may share memory with the codes.
    total = torch.add(rows[0], rows[1]) if len(rows) > 1 else rows[0].clone()
    for row in rows[2:]:
        total.add_(row)
    return total


# identity


@functools.cache
def identity() -> Compressor:
    """Returns a compressor that keeps values: collectives give the exact sums, in the order of ranks.

    Example:
        >>> identity().compress(torch.ones(1, 2), (), whole=True, donate=False)
        ((tensor([[1., 1.]]),), ())
    """
    return Compressor("identity()", _no_memory, _compress_nothing, lambda codes, c: codes[0])


def _compress_nothing(x: Tensor, memory: Memory, /, *, whole: bool, donate: bool) -> tuple[Codes, Memory]:
    del whole, donate
    return (x.clone(),), memory


# sign


@functools.cache
def sign() -> Compressor:
    """Returns a compressor of one bit per element: the sign, times the root of the mean square.

    Zero counts as positive. Without `error_feedback` training goes astray. A NaN or an infinity anywhere spoils the
    whole result.

    References:
        Tang et al., 1-bit Adam, https://arxiv.org/abs/2102.02888, 2021.

    Example:
        >>> codes, _ = sign().compress(torch.arange(-4.0, 4.0)[None], (), whole=True, donate=False)
        >>> codes
        (tensor([[15]], dtype=torch.uint8), tensor([2.3452]))
    """
    return _SIGN._replace(fed_back=_SIGN_FED_BACK)


def _compress_signs(x: Tensor, memory: Memory, /, *, whole: bool, donate: bool) -> tuple[Codes, Memory]:
    del donate
    return kernels.sign_compress_(x, torch.zeros_like(x), whole=whole), memory


def _signs_and_error(x: Tensor, memory: Memory, /, *, whole: bool, donate: bool) -> tuple[Codes, Memory]:
    assert isinstance(memory, Tensor)
    if donate:
        return kernels.sign_compress_(x, memory, whole=whole), memory
    bits, scale, error = kernels.sign_compress(x, memory, whole=whole)
    return (bits, scale), error


def _mean_of_signs(codes: Codes, memory: Memory) -> tuple[Codes, Memory]:
    assert isinstance(memory, Tensor)
    bits, scale = codes
    bits, scale = kernels.sign_mean_(bits, scale, memory.view(-1))
    return (bits[None], scale), memory


def _decompress_signs(codes: Codes, c: int) -> Tensor:
    del c
    bits, scale = codes
    return kernels.unpack_signs(bits, scale)


def _decompress_signs_into(codes: Codes, out: Tensor) -> None:
    bits, scale = codes
    kernels.unpack_signs(bits, scale, out=out)


# int8, int4


@functools.cache
def int8(block: int = 2048) -> Compressor:
    """Returns a compressor of a byte an element: `q = round(x / s)` in [-128, 127], `s = 2 max|x| / 2^8`.

    Each block has a scale s. The most positive element of a block comes back as 127/128 of the value at worst. Every
    other element is off by `s / 2` at most.

    Args:
        block: number of elements with a common scale. The last block of a row may be short.

    Raises:
        ValueError: `block` is not positive.

    References:
        Wang et al., ZeRO++, https://arxiv.org/abs/2306.10209, 2023.

    Example:
        >>> codes, _ = int8().compress(torch.tensor([[-1.0, -0.5, 0.0, 0.25, 0.75, 1.0]]), (), whole=True, donate=False)
        >>> codes[0]
        tensor([[-128,  -64,    0,   32,   96,  127]], dtype=torch.int8)
    """
    return _make_block_compressor(8, block)


@functools.cache
def int4(block: int = 256) -> Compressor:
    """Returns a compressor of half a byte an element: `q = round(x / s)` in [-8, 7], `s = 2 max|x| / 2^4`.

    Each block has a scale s. The most positive element of a block comes back as 7/8 of the value at worst. Every other
    element is off by `s / 2` at most.

    Args:
        block: number of elements with a common scale, even. The last block of a row may be short.

    Raises:
        ValueError: `block` is not positive, or odd.

    References:
        Wang et al., ZeRO++, https://arxiv.org/abs/2306.10209, 2023.

    Example:
        >>> x = torch.tensor([[-1.0, -0.5, 0.0, 0.25, 0.75, 1.0]])
        >>> int4().decompress(int4().compress(x, (), whole=True, donate=False)[0], 6)
        tensor([[-1.0000, -0.5000,  0.0000,  0.2500,  0.7500,  0.8750]])
    """
    return _make_block_compressor(4, block)


def _make_block_compressor(bits: int, block: int) -> Compressor:
    if block < 1 or (bits == 4 and block % 2):
        raise ValueError(f"int{bits}: block must be 1 or more, and even with 4 bits, got {block}.")

    def compress_blocks(x: Tensor, memory: Memory, /, *, whole: bool, donate: bool) -> tuple[Codes, Memory]:
        del whole, donate
        return kernels.quantize(x, bits=bits, block=block), memory

    def decompress_blocks(codes: Codes, c: int) -> Tensor:
        values, scales = codes
        return kernels.dequantize(values, scales, c, bits=bits, block=block)

    def decompress_into(codes: Codes, out: Tensor) -> None:
        values, scales = codes
        kernels.dequantize(values, scales, out.shape[1], bits=bits, block=block, out=out)

    def sum_blocks(codes: Codes, c: int) -> Tensor:
        values, scales = codes
        return kernels.dequantize_sum(values[:, None], scales[:, None], c, bits=bits, block=block)

    name = f"int{bits}(block={block})"
    return Compressor(
        name, _no_memory, compress_blocks, decompress_blocks, total=sum_blocks, decompress_into=decompress_into
    )


# top_k


@functools.cache
def top_k(fraction: float) -> Compressor:
    """Returns a compressor to the largest elements of each row, by magnitude, and the places: 8 bytes each.

    Args:
        fraction: fraction of a row's elements, in (0, 1], rounded up, for example 1 of 10 elements with 0.01.

    Raises:
        ValueError: `fraction` is not in (0, 1].

    References:
        Stich et al., Sparsified SGD with memory, https://arxiv.org/abs/1809.07599, 2018.

    Example:
        >>> top_k(0.5).compress(torch.tensor([[1.0, -3.0, 2.0, 0.0]]), (), whole=True, donate=False)[0]
        (tensor([[-3.,  2.]]), tensor([[1, 2]], dtype=torch.int32))
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"top_k: fraction must be in (0, 1], got {fraction}.")

    def compress_largest(x: Tensor, memory: Memory, /, *, whole: bool, donate: bool) -> tuple[Codes, Memory]:
        del whole, donate
        places = x.abs().topk(math.ceil(fraction * x.shape[1]), dim=1).indices
        return (x.gather(1, places), places.int()), memory

    def decompress_largest(codes: Codes, c: int) -> Tensor:
        values, places = codes
        return values.new_zeros(values.shape[0], c).scatter_(1, places.long(), values)

    return Compressor(f"top_k({fraction})", _no_memory, compress_largest, decompress_largest)


# error feedback


@functools.lru_cache(maxsize=256)
def error_feedback(inner: Compressor) -> Compressor:
    """Returns `inner` with error feedback: `y = x + e`, `e' = y - decompressed(compressed(y))`.

    The error of a call is added to the next input, so no part is lost: over T steps, the sum of outputs differs from
    the sum of inputs only by the last error.

    Args:
        inner: a compressor without a memory.

    Returns:
        A compressor with the error `e [r, c]` as memory. Through `identity()` the error stays zero.

    Raises:
        ValueError: `inner` has a memory.

    References:
        Seide et al., 1-bit stochastic gradient descent, Interspeech 2014. Karimireddy et al., Error feedback fixes
        SignSGD and other gradient compression schemes, https://arxiv.org/abs/1901.09847, 2019.

    Example:
        >>> compressor = error_feedback(top_k(0.5))
        >>> x = torch.tensor([[4.0, 3.0]])
        >>> codes, error = compressor.compress(x, compressor.init(x), whole=True, donate=False)
        >>> error, compressor.decompress(compressor.compress(x, error, whole=True, donate=False)[0], 2)
        (tensor([[0., 3.]]), tensor([[0., 6.]]))
    """
    if inner.remembers:
        raise ValueError(
            f"error_feedback: inner must have no memory, got {inner.name}. Pass a compressor without a memory."
        )
    if inner.fed_back is not None:
        return inner.fed_back

    def compress_with_error(x: Tensor, memory: Memory, /, *, whole: bool, donate: bool) -> tuple[Codes, Memory]:
        assert isinstance(memory, Tensor)
        y = memory.add_(x) if donate else x + memory
        codes, _ = inner.compress(y, (), whole=whole, donate=False)
        return codes, y.sub_(inner.decompress(codes, y.shape[1]))

    return Compressor(
        f"error_feedback({inner.name})",
        torch.zeros_like,
        compress_with_error,
        inner.decompress,
        inner.quantum,
        total=inner.total,
        decompress_into=inner.decompress_into,
    )


def _no_memory(like: Tensor) -> Memory:
    del like
    return ()


_SIGN = Compressor(
    "sign()", _no_memory, _compress_signs, _decompress_signs, quantum=8, decompress_into=_decompress_signs_into
)
_SIGN_FED_BACK = Compressor(
    "error_feedback(sign())",
    torch.zeros_like,
    _signs_and_error,
    _decompress_signs,
    quantum=8,
    pads=True,
    mean=_mean_of_signs,
    decompress_into=_decompress_signs_into,
)
