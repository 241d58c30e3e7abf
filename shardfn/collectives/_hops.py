"""A gather in two hops: across nodes once, and within a node as often as the whole is wanted (ZeRO++'s hpZ).

    block of rank (f, g)             f along the far axes, g along the near ones
    bring       far axes:            [A_0g] [A_1g] => [A_0g, A_1g]       the secondary piece of near rank g
    all_gather  near axes:           the secondary pieces => [A_00, A_01, A_10, A_11], in the order of ranks

Both hops only move bits, so the whole is equal to the result of a single hop. A block enters each node once, where a
single hop sends the block to every rank of the node, for example 8 times. All blocks travel at the size of the largest.

Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023,
https://arxiv.org/abs/2306.10209
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardfn.core import Pending

from ._traced import AnyChannel, AnyChannels
from ._wire_ops import as_runs


class TwoHops:
    """The gather along `axes`, in two hops: along the far axes, then along `near`.

    The constructor is collective over the mesh.

    Attributes:
        axes: all axes, in the mesh's order.
        size: number of ranks along the axes.
        index: index of this rank among these ranks.
    """

    def __init__(self, channels: AnyChannels, axes: tuple[str, ...], near: tuple[str, ...]) -> None:
        self._far: AnyChannel = channels.gather(tuple(a for a in axes if a not in near))
        self._near: AnyChannel = channels.gather(tuple(a for a in axes if a in near))
        self._grid = NearFar(axes, self._far, self._near)
        self.axes, self.size, self.index = axes, self._far.size * self._near.size, self._grid.index

    def bring(self, own: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Brings blocks across the far axes: from ranks with this rank's index along the near axes.

        Args:
            own: this rank's block. See `Channel.all_gather`.
            sizes: number of elements of each rank's block, along all axes.
        """
        c = max(sizes)
        flat = own.reshape(-1) if own.numel() == c else torch.nn.functional.pad(own.reshape(-1), (0, c - own.numel()))
        return self._far.all_gather(flat, [c] * self._far.size)

    def all_gather(self, brought: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Gathers along the near axes: from the result of `bring` to the blocks of all ranks, in order."""
        pending = self._near.all_gather(brought, [brought.numel()] * self._near.size)
        return pending.then(lambda out: _trim_padding(self._grid.to_ranks(out), sizes))


class NearFar:
    """Blocks of the same size in the order of ranks along all axes, or of (near index, far index).

    Args:
        axes: all axes.
        far: a channel along the far axes.
        near: a channel along the near axes.

    Attributes:
        index: this rank's index along all axes.
    """

    def __init__(self, axes: tuple[str, ...], far: AnyChannel, near: AnyChannel) -> None:
        self._axes, self._shape = axes, {**near.shape, **far.shape}
        at = near.index * far.size + far.index
        coords = dict(zip(self._shape, _split_index(at, tuple(self._shape.values())), strict=True))
        self.index = functools.reduce(lambda i, a: i * self._shape[a] + coords[a], axes, 0)

    def to_ranks(self, flat: Tensor) -> Tensor:
        """Reorders blocks by (near, far) to blocks by rank."""
        now = list(self._shape)
        return flat.view(*self._shape.values(), -1).permute(*(now.index(a) for a in self._axes), -1).reshape(-1)

    def from_ranks(self, flat: Tensor) -> Tensor:
        """Reorders blocks by rank to blocks by (near, far)."""
        now = flat.view(*(self._shape[a] for a in self._axes), -1)
        return now.permute(*(self._axes.index(a) for a in self._shape), -1).reshape(-1)


def _split_index(n: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n // math.prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes))


def _trim_padding(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns blocks without padding."""
    runs, c, parts, start = as_runs(sizes), max(sizes), list[Tensor](), 0
    if len(runs) == 2:
        return flat
    for num, n in zip(runs[::2], runs[1::2], strict=True):
        parts.append(flat[start : start + num * c].view(num, c)[:, :n].reshape(-1))
        start += num * c
    return torch.cat(parts)
