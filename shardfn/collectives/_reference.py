"""The meaning of every collective, slowly.

Functions from the list of all ranks' blocks to the list of all ranks' results.
"""

import torch
from torch import Tensor

Blocks = list[Tensor]
Numbers = list[list[int]]


def psum_ref(blocks: Blocks) -> Blocks:
    """Returns the sum, taken in the order of ranks, for each rank.

    Example:
        >>> psum_ref([torch.tensor(1), torch.tensor(2)])
        [tensor(3), tensor(3)]
    """
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    return [total] * len(blocks)


def pmean_ref(blocks: Blocks) -> Blocks:
    """Returns the mean for each rank."""
    return [total / len(blocks) for total in psum_ref(blocks)]


def pmax_ref(blocks: Blocks) -> Blocks:
    """Returns the elementwise maximum for each rank."""
    return [torch.stack(blocks).amax(0)] * len(blocks)


def pvary_ref(blocks: Blocks) -> Blocks:
    """Returns each rank's block."""
    return list(blocks)


def all_gather_ref(blocks: Blocks, dim: int) -> Blocks:
    """Returns the concatenation for each rank.

    Example:
        >>> all_gather_ref([torch.tensor([1]), torch.tensor([2])], 0)
        [tensor([1, 2]), tensor([1, 2])]
    """
    return [torch.cat(blocks, dim)] * len(blocks)


all_gather_invariant_ref = all_gather_ref


def psum_scatter_ref(blocks: Blocks, dim: int) -> Blocks:
    """Returns each rank's block of the sum."""
    return take_own_block_ref(psum_ref(blocks), dim)


def take_own_block_ref(blocks: Blocks, dim: int) -> Blocks:
    """Returns each rank's block of the rank's tensor.

    Example:
        >>> take_own_block_ref([torch.arange(3), torch.arange(3)], 0)
        [tensor([0, 1]), tensor([2])]
    """
    return [cut(whole, len(blocks), dim)[i] for i, whole in enumerate(blocks)]


def all_to_all_ref(blocks: Blocks, split_dim: int, concat_dim: int) -> Blocks:
    """Returns, for rank i, block i of every rank, joined."""
    pieces = [cut(block, len(blocks), split_dim) for block in blocks]
    return [torch.cat([cuts[i] for cuts in pieces], concat_dim) for i in range(len(blocks))]


def ppermute_ref(blocks: Blocks, perm: list[tuple[int, int]]) -> Blocks:
    """Returns the source's block for each destination, and zeros for other ranks."""
    source = {dst: src for src, dst in perm}
    return [blocks[source[i]] if i in source else torch.zeros_like(b) for i, b in enumerate(blocks)]


def ragged_all_to_all_ref(
    blocks: Blocks, outs: Blocks, input_offsets: Numbers, send_sizes: Numbers, output_offsets: Numbers
) -> Blocks:
    """Returns each rank's `out` with received rows in place. Numbers are of sender i, for receiver j.

    Example:
        >>> x = torch.tensor([5, 6])
        >>> ragged_all_to_all_ref([x], [torch.zeros(3, dtype=torch.int64)], [[1]], [[1]], [[2]])
        [tensor([0, 0, 6])]
    """
    results = [out.clone() for out in outs]
    for i, x in enumerate(blocks):
        for j, result in enumerate(results):
            start, size, to = input_offsets[i][j], send_sizes[i][j], output_offsets[i][j]
            if size:
                result[to : to + size] = x[start : start + size]
    return results


def cut(x: Tensor, n: int, dim: int) -> Blocks:
    """Returns `torch.chunk`, with the empty blocks that torch leaves out.

    Example:
        >>> cut(torch.arange(2), 3, 0)
        [tensor([0]), tensor([1]), tensor([], dtype=torch.int64)]
    """
    chunks = list(x.chunk(n, dim))
    return chunks + [x.narrow(dim, 0, 0)] * (n - len(chunks))
