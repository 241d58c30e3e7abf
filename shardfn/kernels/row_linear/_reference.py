"""Batch-invariant linear layers: the definition."""

from collections.abc import Callable, Sequence

from torch import Tensor

from shardfn.kernels._exponential import fused as fused

from ._codes import unpack_rows


def row_linear(x: Tensor, packed: Tensor, num: int, chunks: int, bias: Tensor | None) -> Tensor:
    """Maps x [m, k] and packed [panels, k, 64], or codes, to [m, num]."""
    k = x.shape[1]
    weight = unpack_rows(packed, num, k)
    chains = []
    for i in range(chunks):
        total = x.new_zeros(x.shape[0], num)
        for j in range(i * k // chunks, (i + 1) * k // chunks):
            total = fused(x[:, j, None], weight[:, j], total)
        chains.append(total)
    out = joined(chains)
    return out if bias is None else out + bias


def row_linears(
    x: Tensor,
    packed: Sequence[Tensor],
    nums: Sequence[int],
    chunks: int,
    biases: Sequence[Tensor | None],
    *,
    one: Callable[..., Tensor] = row_linear,
) -> list[Tensor]:
    """Maps x [*, k] to [*, num] of each layer, computed by `one`."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    layers = zip(packed, nums, biases, strict=True)
    return [one(rows, w.contiguous(), n, chunks, bias).view(*x.shape[:-1], n) for w, n, bias in layers]


def joined(chains: Sequence[Tensor]) -> Tensor:
    """Returns the chains of chunks, added by a binary tree.

    Neighbours come first, and the last remaining nodes from the end. For example 5 chains a to e make ((a + b) + (c +
    d)) + e.

    Nodes of equal numbers of chunks, a power of two, may take the place of the chunks.

    Args:
        chains: list with a tensor for each chunk, or for each node.

    Example:
        >>> import torch
        >>> joined([torch.tensor(float(x)) for x in (1, 2, 3)])  # (1 + 2) + 3
        tensor(6.)
    """
    nodes: list[tuple[int, Tensor]] = []
    for total in chains:
        level = 0
        while nodes and nodes[-1][0] == level:
            total, level = nodes.pop()[1] + total, level + 1
        nodes.append((level, total))
    out = nodes.pop()[1]
    while nodes:
        out = nodes.pop()[1] + out
    return out
