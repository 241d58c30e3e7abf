"""Attention whose keys and values go round a ring of ranks, each of which keeps its own queries.

At hop h rank r has the keys and values of rank r - h. They are sent on as long as a rank ahead has a query that
attends to them, which masks tell by positions alone, so that all ranks know what is sent. Nothing but this rank's own
tensors is kept for the backward, in which keys and values go round once more, with their gradients one hop behind;
from the last rank that adds to them, those go home.

    sent by a rank, of b samples, N tokens, h features of keys: forward 2 b N h (P - 1) / P, backward twice that

With one rank this is attention in blocks: memory O(block) for scores, forward and backward.

B samples, T queries, S keys, H query heads, G key heads, R = H / G, K head dim, P ranks.
Liu et al., Ring Attention with Blockwise Transformers, 2023, https://arxiv.org/abs/2310.01889
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.collectives import axis_index, axis_size, ppermute
from shardfn.core import Axes

from ._online import OnlineScores, Outer, Pushed, Rows, absorb, finish, gathered, tiles, transpose

Perm = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class RingCourse:
    """What goes round, and who needs it.

    Attributes:
        axis: mesh axes; None is one rank.
        rows: the positions of each rank's keys, by index; with several ranks, of its queries too.
        queries: the positions of this rank's queries.
        index: of this rank.
        how: the scores, without tensors.
        block: of a tile.
    """

    axis: Axes
    rows: tuple[Rows, ...]
    queries: Rows
    index: int
    how: OnlineScores
    block: int

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        """Rows of a message: all are as long as the longest."""
        return max(num_rows(r) for r in self.rows)

    @property
    def last(self) -> tuple[int, ...]:
        """The last hop at which a rank needs the keys of each rank; 0 where none does but itself."""
        n = self.size
        return tuple(max((h for h in range(1, n) if self._needs((j + h) % n, j)), default=0) for j in range(n))

    def onward(self, hop: int) -> Perm:
        """Who sends to whom so that keys that are still needed arrive at `hop`."""
        n = self.size
        return [((j + hop - 1) % n, (j + hop) % n) for j, last in enumerate(self.last) if last >= hop]

    def homeward(self, hop: int) -> Perm:
        """Who sends gradients of keys home after `hop`."""
        return [((j + hop) % self.size, j) for j, last in enumerate(self.last) if last == hop > 0]

    def _needs(self, query: int, key: int) -> bool:
        pairs = ((q, k) for q in self.rows[query] for k in self.rows[key])
        return any(self.how.mask.cover(q, k) != "none" for q, k in pairs)


def course(axis: Axes, rows: tuple[Rows, ...], num_queries: int, how: OnlineScores, block: int) -> RingCourse:
    """The course of this rank's tensors; on one rank queries need not be as many as keys."""
    assert len(rows) == axis_size(axis)
    index = axis_index(axis)
    queries = rows[index] if axis_size(axis) > 1 else tuple(r for r in ((0, num_queries),) if num_queries)
    return RingCourse(axis, rows, queries, index, how, block)


def num_rows(rows: Rows) -> int:
    """How many tokens they are."""
    return sum(stop - start for start, stop in rows)


def online(q_BGRTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, along: RingCourse) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks, [B, G, R, T, K].

    Example:
        >>> from shardfn.nn._masks import Causal
        >>> q, kv = torch.ones(1, 1, 1, 3, 2), torch.ones(1, 1, 3, 2)
        >>> online(q, kv, kv, course(None, (((0, 3),),), 3, OnlineScores(Causal(), 1.0), 2)).shape
        torch.Size([1, 1, 1, 3, 2])
    """
    how = along.how
    plain = dataclasses.replace(along, how=how._replace(slopes_H=None))
    return _Online.apply(q_BGRTK, k_BGSK, v_BGSK, how.slopes_H, plain, *how.mask.tensors)[0]


class _Online(torch.autograd.Function):
    """(q, k, v, slopes, course, data of the mask) -> (y, lse), closed under backward, jvp and vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, slopes_H: Tensor | None, along: RingCourse, *data: Tensor) -> Any:
        how = _told(along, slopes_H, data)
        queries = along.queries
        states: list[Any] = [None] * len(tiles(queries, along.block))
        for kv, keys, _ in _hops(along, k, v):
            absorb(states, q, queries, (kv[0], kv[1]), keys, how, along.block)
        return finish(states, q, v, queries, along.block)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, slopes_H, along, *data = inputs
        ctx.along, ctx.sloped = along, slopes_H is not None
        kept = (q, k, v, *output, *([slopes_H] if ctx.sloped else []), *data)
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, y, lse, *data = ctx.saved_tensors
        slopes_H, along = data.pop(0) if ctx.sloped else None, ctx.along
        how = _told(along, slopes_H, data)
        dq, dk, dv = (torch.zeros_like(x) if t is None else t for x, t in zip((q, k, v), grad_inputs[:3], strict=True))
        pushed = Pushed(along.queries, (q, dq, lse), along.block)
        for tensors, keys, _ in _hops(along, k, v, dk, dv):
            pushed.absorb(tensors, keys, how)
        return pushed.finish(y)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        q, k, v, y, lse, *data = ctx.saved_tensors
        slopes_H = data.pop(0) if ctx.sloped else None
        dq, dk, dv = _backward(ctx.along, _told(ctx.along, slopes_H, data), (q, k, v, y, lse), grad_outputs)
        return (dq, dk, dv, None, None, *(None for _ in data))


def _told(along: RingCourse, slopes_H: Tensor | None, data: Any) -> OnlineScores:
    return along.how._replace(mask=along.how.mask.with_tensors(data), slopes_H=slopes_H)


def _hops(along: RingCourse, *kv: Tensor) -> Iterator[tuple[tuple[Tensor, ...], Rows, int]]:
    """Keys and values (and whatever lies like them) as they come by, with their positions and the hop."""
    n, own = along.size, num_rows(along.rows[along.index])
    yield kv, along.rows[along.index], 0
    if n == 1:
        return
    widths = [x.shape[-1] for x in kv]
    packed = F.pad(torch.cat(kv, -1), (0, 0, 0, along.longest - own))
    for hop in range(1, n):
        perm = along.onward(hop)
        if not perm:
            return
        packed = ppermute(packed, along.axis, perm)
        source = (along.index - hop) % n
        rows = along.rows[source] if along.last[source] >= hop else ()
        yield packed[..., : num_rows(rows), :].split(widths, -1), rows, hop


def _backward(
    along: RingCourse, how: OnlineScores, saved: tuple[Tensor, ...], cotangents: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, y, lse = saved
    dy, dlse = cotangents
    delta = (dy.to(lse.dtype) * y.to(lse.dtype)).sum(-1) - dlse
    queries, outer = along.queries, Outer(q, dy, lse, delta)
    dqs: list[Any] = [None] * len(tiles(queries, along.block))
    own: Any = None
    passing: Any = None
    for kv, keys, hop in _hops(along, k, v):
        dkv = torch.cat(transpose(dqs, outer, queries, (kv[0], kv[1]), keys, how, along.block), -1)
        if hop == 0:
            own = dkv
            continue
        dkv = F.pad(dkv, (0, 0, 0, along.longest - dkv.shape[-2]))
        if hop > 1:
            dkv = dkv + ppermute(passing, along.axis, along.onward(hop))
        passing = dkv
        if home := along.homeward(hop):
            own = own + ppermute(dkv, along.axis, home)[..., : own.shape[-2], :]
    dk, dv = own.split([k.shape[-1], v.shape[-1]], -1)
    return gathered(dqs, q, queries, along.block), dk.to(k.dtype), dv.to(v.dtype)
