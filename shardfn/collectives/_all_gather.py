"""Blocks to wholes: `all_gather`, `all_gather_invariant`, `quantized_all_gather`."""

from typing import Literal

import torch
from jaxtyping import Float, Shaped

from shardfn.core import Axes

from ._arguments import joined_size, tensor_dim
from ._axis_group import axis_group_along
from ._primitive import Call, bind


def all_gather(
    x: Shaped[torch.Tensor, "..."], axis: Axes, *, dim: int = 0, size: int | None = None
) -> Shaped[torch.Tensor, "..."]:
    """Returns the blocks along `axis`, concatenated along `dim`: `V -> V`.

        NCCL: all_gather.  Slow spec: `[cat(blocks, dim)] * n`.  Layout: `A[I_axis] -> A[I]`.

        [A] [B]  =>  [A, B] [A, B]

    Transpose: `psum_scatter`. Each rank may use the whole in another way, so cotangents differ and are summed.

    When: every rank needs the whole and goes on differently, for example with ZeRO's parameters or the sequence before
    attention. When all ranks go on in the same way, use `all_gather_invariant`: the gradient then needs no
    communication.

    Args:
        x: this rank's block.
        axis: mesh axes, major to minor. None, a missing axis and an axis of size 1 are the identity.
        dim: the dim along which `x` is a block.
        size: the global size along `dim`. Needed where the axis does not divide the size: blocks are as `torch.chunk`
            cuts, for example 7 rows on 3 ranks as 3, 3, 1 (with several axes, the major axis cuts first). Default: n
            times this block, on all ranks.

    Returns:
        The whole, of `size` along `dim`.

    Raises:
        ValueError: unknown axis, `dim` out of range, or a block whose length does not match `size`.

    Example:
        >>> all_gather(torch.arange(3), "dp")
        tensor([0, 1, 2])
    """
    line = axis_group_along(axis)
    dim = tensor_dim("all_gather", x, dim)
    size = joined_size("all_gather", x, line, dim, size)
    return x if line is None else bind(x, Call("all_gather", line, dim, size))


def all_gather_invariant(
    x: Shaped[torch.Tensor, "..."], axis: Axes, *, dim: int = 0, size: int | None = None
) -> Shaped[torch.Tensor, "..."]:
    """Returns the blocks along `axis`, concatenated along `dim`, as a value that counts once: `V -> I`.

        NCCL: all_gather.  Slow spec: `[cat(blocks, dim)] * n`.  Layout: `A[I_axis] -> A[I]`.

        [A] [B]  =>  [A, B] [A, B]

    Transpose: `take_own_block`, without communication: the cotangent is the same everywhere.

    When: all ranks go on with the same arithmetic, for example at the end of a program, with logits, outputs or
    metrics.

    Args:
        x: this rank's block.
        axis: mesh axes, major to minor. None, a missing axis and an axis of size 1 are the identity.
        dim: the dim along which `x` is a block.
        size: the global size along `dim`. See `all_gather`.

    Returns:
        The whole, of `size` along `dim`.

    Raises:
        ValueError: unknown axis, `dim` out of range, or a block whose length does not match `size`.

    Example:
        >>> all_gather_invariant(torch.ones(2, 3), "dp", dim=1).shape
        torch.Size([2, 3])
    """
    line = axis_group_along(axis)
    dim = tensor_dim("all_gather_invariant", x, dim)
    size = joined_size("all_gather_invariant", x, line, dim, size)
    return x if line is None else bind(x, Call("all_gather_invariant", line, dim, size))


def quantized_all_gather(
    x: Float[torch.Tensor, "..."],
    axis: Axes,
    *,
    dim: int = 0,
    size: int | None = None,
    bits: Literal[8, 4] = 8,
    block: int = 256,
) -> Float[torch.Tensor, "..."]:
    """Returns `all_gather` at 8 or 4 bits per element and a scale per block: `V -> V`.

        NCCL: all_gather.  Slow spec: `[cat(map(rounded, blocks), dim)] * n`.  Layout: `A[I_axis] -> A[I]`.

        [A] [B]  =>  [A', B'] [A', B'],  |A - A'| <= max|A| / 2^bits, in each block of elements

    Every rank gets the same rounded whole, with the local block rounded, too. The largest positive element of a block
    may lose one step, `max|A| / 2^(bits - 1)`.

    Transpose: `psum_scatter`, exact: gradients ignore the rounding.

    When: ranks gather values that bear some noise over a slow link, such as ZeRO's parameters for the forward (ZeRO++'s
    qwZ).

    Args:
        x: this rank's block; float32, bfloat16 or float16. Computed in float32.
        axis: mesh axes, major to minor. None, a missing axis and an axis of size 1 are the identity, without rounding.
        dim: the dim along which `x` is a block.
        size: the global size along `dim`. See `all_gather`.
        bits: 8 or 4.
        block: number of neighbours in the block, in row-major order with `dim` first, with a common scale. With 4 bits
            the number must be even.

    Returns:
        The whole, of `size` along `dim` and of the dtype of `x`.

    Raises:
        ValueError: unknown axis, `dim` out of range, a block whose length does not match `size`, or other bits.
        TypeError: another dtype.

    References:
        Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training,
        https://arxiv.org/abs/2306.10209, 2023.

    Example:
        >>> quantized_all_gather(torch.ones(2, 3), "dp", bits=4).shape
        torch.Size([2, 3])
    """
    line = axis_group_along(axis)
    dim = tensor_dim("quantized_all_gather", x, dim)
    size = joined_size("quantized_all_gather", x, line, dim, size)
    if x.dtype not in _QUANTIZED:
        raise TypeError(f"quantized_all_gather: x must be one of {', '.join(map(str, _QUANTIZED))}, got {x.dtype}.")
    if bits not in (4, 8) or block < 1 or (bits == 4 and block % 2):
        raise ValueError(
            f"quantized_all_gather: bits must be 8, or 4 with an even block, got bits={bits}, block={block}."
        )
    return x if line is None else bind(x, Call("quantized_all_gather", line, dim, size, bits=bits, block=block))


_QUANTIZED = (torch.float32, torch.bfloat16, torch.float16)
