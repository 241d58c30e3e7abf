"""Values of blocks of codes: the inverse of `quantize_blocks`, up to rounding, as a single node of a graph."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from shardfn.kernels._library import define, refuse_backward

from ._codes import BLOCK_BYTES, GROUP, Quantization


def dequantize_blocks(
    blocks: UInt8[Tensor, "*rows bytes"], k: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*rows k"]:
    """Returns the values of blocks of codes: the factors of `row_linear`, rounded at most once.

        int8    scale q               int4    scale q + least

    Args:
        blocks: blocks of GGUF's Q8_0 or Q4_1, as from `quantize_blocks`, with any dims before the last.
        k: number of elements of a row. Further elements, up to a multiple of 32, are left out.
        dtype: dtype of the result. The values are in float32, and are rounded to the dtype.

    Raises:
        TypeError: blocks are not uint8.
        ValueError: rows are not made of blocks of a single kind.

    Example:
        >>> from shardfn.kernels import quantize_blocks
        >>> dequantize_blocks(quantize_blocks(torch.ones(1, 64), "int4"), 40).unique()
        tensor([1.])
    """
    if blocks.dtype != torch.uint8:
        raise TypeError(f"blocks are {blocks.dtype}, must be torch.uint8: the bytes of GGUF's blocks")
    groups = -(-k // GROUP)
    if not groups or blocks.shape[-1] not in [groups * n for n in BLOCK_BYTES.values()]:
        sizes = " or ".join(f"{groups * n} ({quantization})" for quantization, n in BLOCK_BYTES.items())
        raise ValueError(f"blocks have rows of {blocks.shape[-1]} bytes, and rows of {k} elements have {sizes}")
    return torch.ops.shardfn_kernels.dequantize_blocks(blocks, k, dtype)


def block_bytes(k: int, quantization: Quantization) -> int:
    """Returns the bytes of the blocks of a row of k elements.

    Example:
        >>> block_bytes(40, "int4")
        40
    """
    return -(-k // GROUP) * BLOCK_BYTES[quantization]


def _decode_blocks(blocks: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    lead, groups = blocks.shape[:-1], -(-k // GROUP)
    by_group = blocks.reshape(-1, groups, blocks.shape[-1] // groups)
    if by_group.storage_offset() % 2:  # float16 lies at even bytes
        by_group = by_group.clone()
    scale = by_group[..., :2].view(torch.float16).float()
    if by_group.shape[-1] == BLOCK_BYTES["int8"]:
        out = by_group[..., 2:].view(torch.int8).float().mul_(scale)
    else:
        q = by_group[..., 4:]
        out = torch.empty(*by_group.shape[:-1], GROUP, device=blocks.device)
        out[..., : GROUP // 2], out[..., GROUP // 2 :] = q & 15, q >> 4
        # The products are exact, so the result is the same fused or not.
        out.mul_(scale).add_(by_group[..., 2:4].view(torch.float16).float())
    out = out.view(*lead, groups * GROUP)
    return (out if k == groups * GROUP else out[..., :k]).to(dtype).contiguous()


define(
    "dequantize_blocks(Tensor blocks, int k, ScalarType dtype) -> Tensor",
    _decode_blocks,
    lambda blocks, k, dtype: blocks.new_empty(*blocks.shape[:-1], k, dtype=dtype),
)
refuse_backward("dequantize_blocks", "codes are not differentiated. Train an adapter next to the codes.")
