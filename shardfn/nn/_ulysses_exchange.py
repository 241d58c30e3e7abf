"""Pieces of a rank's tokens <-> spans of the rank's heads: the `all_to_all` of a span of a sequence, and the transpose.

P ranks, H query heads, G key heads.
"""

import torch
from torch import Tensor

from shardfn.collectives import all_to_all, axis_index, axis_size
from shardfn.core import Axes

from ._heads import dealt_heads, evenly
from ._parallel import own_range


class UlyssesExchange:
    """UlyssesExchange of a span at a time.

    Args:
        axis: mesh axes. None means a single rank.
        sizes: tokens of each rank's piece of each span, [spans][P].
        heads: (H, G) of all ranks.
    """

    def __init__(self, axis: Axes, sizes: tuple[tuple[int, ...], ...], heads: tuple[int, int]) -> None:
        self._axis, self._sizes, (self._H, self._G) = axis, sizes, heads
        self._ranks, self._index, at = axis_size(axis), int(axis_index(axis)), 0
        self._pieces = []
        for pieces in sizes:
            self._pieces.append(slice(at, at + pieces[self._index]))
            at += pieces[self._index]
        self._sent, self._read = dealt_heads(*heads, axis) if self._ranks > 1 else (None, [])
        start, stop = own_range(self._num_sent, axis)
        self._own = stop - start

    @property
    def _num_sent(self) -> int:
        return self._G if self._sent is None else len(self._sent)

    def deal(self, x_BTHK: Tensor, i: int) -> Tensor:
        """Maps the rank's piece of span i, of all heads, to the whole span, of the rank's query heads."""
        return self._gather_span(x_BTHK[:, self._pieces[i]], i)

    def undeal(self, x_BSHK: Tensor, i: int) -> Tensor:
        """Returns the inverse of `deal`, equal to the transpose."""
        return self._scatter_span(x_BSHK, i, self._H)

    def deal_keys(self, x_BTGK: Tensor, i: int) -> Tensor:
        """Maps the rank's piece of span i to the whole span, of the key heads read by the rank's query heads."""
        piece = x_BTGK[:, self._pieces[i]]
        found = self._gather_span(piece if self._sent is None else piece[:, :, self._sent], i)
        return found if evenly(self._read, found.shape[2]) else found[:, :, self._read]

    def undeal_keys(self, x_BSGK: Tensor, i: int) -> Tensor:
        """Returns the transpose of `deal_keys`: gradients of key heads on several ranks are added up."""
        if not evenly(self._read, self._own):
            x_BSGK = _scatter_heads(x_BSGK, self._read, self._own)
        back = self._scatter_span(x_BSGK, i, self._num_sent)
        return back if self._sent is None else _scatter_heads(back, self._sent, self._G)

    def _gather_span(self, piece: Tensor, i: int) -> Tensor:
        if self._ranks == 1:
            return piece
        sizes, most = self._sizes[i], max(self._sizes[i])
        whole = all_to_all(_pad_rows(piece, most), self._axis, split_dim=2, concat_dim=1, size=most * self._ranks)
        return torch.cat([x[:, :n] for x, n in zip(whole.split(most, 1), sizes, strict=True)], 1)

    def _scatter_span(self, x: Tensor, i: int, heads: int) -> Tensor:
        if self._ranks == 1:
            return x
        sizes, most = self._sizes[i], max(self._sizes[i])
        whole = torch.cat([_pad_rows(piece, most) for piece in x.split(list(sizes), 1)], 1)
        return all_to_all(whole, self._axis, split_dim=1, concat_dim=2, size=heads)[:, : sizes[self._index]]


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    missing = rows - x.shape[1]
    return torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1) if missing else x


def _scatter_heads(x: Tensor, heads: list[int], num: int) -> Tensor:
    """Adds head i of x to head `heads[i]` of `num`."""
    index = torch.tensor(heads, dtype=torch.int64, device=x.device)
    return x.new_zeros(*x.shape[:2], num, x.shape[3]).index_add(2, index, x)
