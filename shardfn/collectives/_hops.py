"""A gather in two hops: across nodes once, and within a node as often as the whole is wanted (ZeRO++'s hpZ).

    block of rank (f, g)             f along the far axes, g along the near ones
    bring       far axes:            [A_0g] [A_1g] => [A_0g, A_1g]       the secondary piece of near rank g
    all_gather  near axes:           the secondary pieces => [A_00, A_01, A_10, A_11], in the order of ranks

Both move bits and nothing else, so the whole is that of one hop. A block enters each node once, where a single hop
sends it to every rank of the node.

Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023,
https://arxiv.org/abs/2306.10209
"""

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._channel import Pending
from ._traced import AnyChannel, AnyChannels


class TwoHops:
    """The gather along `axes` of which `near` are near. Making one is collective over the mesh.

    Attributes:
        axes: all axes, in the mesh's order.
        size: number of ranks along them.
        index: this rank's index among them.
    """

    def __init__(self, channels: AnyChannels, axes: tuple[str, ...], near: tuple[str, ...]) -> None:
        self._far: AnyChannel = channels.gather(tuple(a for a in axes if a not in near))
        self._near: AnyChannel = channels.gather(tuple(a for a in axes if a in near))
        self.axes = axes
        self.size = self._far.size * self._near.size
        self.grid = Grid(axes, self._far, self._near)
        self.index = self.grid.ranks[self._near.index][self._far.index]

    def bring(self, own: Tensor, sizes: Sequence[int]) -> Pending:
        """Across the far axes: the blocks of the ranks that share this one's index along the near axes.

        Args:
            own: this rank's block; see `Channel.all_gather`.
            sizes: number of elements of each rank's block, along all axes.
        """
        return self._far.all_gather(own, self.grid.of_near(sizes, self._near.index))

    def all_gather(self, brought: Tensor, sizes: Sequence[int]) -> Pending:
        """Along the near axes: from what `bring` gave to the blocks of all ranks, in their order."""
        lengths = [sum(self.grid.of_near(sizes, g)) for g in range(self._near.size)]
        return self._near.all_gather(brought, lengths).then(lambda out: self.grid.to_ranks(out, sizes))


class Grid:
    """Which rank along all axes is at (near index, far index), and blocks put in either order.

    Args:
        axes: all axes.
        far: a channel along the far ones.
        near: a channel along the near ones.
    """

    def __init__(self, axes: tuple[str, ...], far: AnyChannel, near: AnyChannel) -> None:
        self._axes, self._shape = axes, {**near.shape, **far.shape}
        self._num = near.size, far.size

    @functools.cached_property
    def ranks(self) -> list[list[int]]:
        """For each near index, the ranks along all axes, by far index."""
        stride = {a: math.prod(self._shape[b] for b in self._axes[i + 1 :]) for i, a in enumerate(self._axes)}
        walks = [range(0, n * stride[a], stride[a]) for a, n in self._shape.items()]
        flat = [sum(steps) for steps in itertools.product(*walks)]
        return [flat[i : i + self._num[1]] for i in range(0, len(flat), self._num[1])]

    def of_near(self, sizes: Sequence[int], near: int) -> list[int]:
        """The sizes of the blocks at one near index."""
        return [sizes[r] for r in self.ranks[near]]

    def to_ranks(self, flat: Tensor, sizes: Sequence[int]) -> Tensor:
        """Blocks by (near, far) -> by rank."""
        if len(set(sizes)) == 1:
            order = [list(self._shape).index(a) for a in self._axes]
            return flat.view(*self._shape.values(), sizes[0]).permute(*order, -1).reshape(-1)
        places = list(itertools.chain.from_iterable(self.ranks))
        blocks = dict(zip(places, flat.split_with_sizes([sizes[r] for r in places]), strict=True))
        return torch.cat([blocks[r] for r in range(len(places))])

    def from_ranks(self, flat: Tensor, sizes: Sequence[int]) -> Tensor:
        """Blocks by rank -> by (near, far)."""
        if len(set(sizes)) == 1:
            order = [self._axes.index(a) for a in self._shape]
            return flat.view(*(self._shape[a] for a in self._axes), sizes[0]).permute(*order, -1).reshape(-1)
        blocks = flat.split_with_sizes(list(sizes))
        return torch.cat([blocks[r] for r in itertools.chain.from_iterable(self.ranks)])
