"""Attention whose keys and values wait on the host or on disk and come back chunk by chunk.

A sequence is cut into spans, and each span over the ranks, in order. So after the `all_to_all` of a piece from every
rank each rank has a whole span of some heads. All keys and values are dealt in this way and sent away, span by span.
Then each span of queries takes the spans of keys read by the mask, and the next span is fetched during the computation.
The backward goes through the spans of keys, and for each through the spans of queries. Gradients of queries wait on the
host in between. In addition to the arguments and the results of a rank only a few spans are on the device, whatever the
number of spans (for example 4 spans or 64), and between forward and backward no memory is needed there.

B samples, T tokens, H query heads, G key heads, K head dim, P ranks.

Yao et al., Training Ultra Long Context Language Model with Fully Pipelined Distributed Transformer, 2024,
https://arxiv.org/abs/2408.16978
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from shardfn.collectives import all_to_all, axis_index, axis_size, mesh_as_now
from shardfn.core import Axes, Pending
from shardfn.memory import AnyPool, Fetch, capturing, stored_of, to_host, token_of

from ._masks import Span
from ._online import OnlineScores, Rows, narrowed, refuse_gradients, wide
from ._parallel import all_ranges, assign_heads, evenly, ranges_over, rank_range
from ._rectangles import TORCH_TILE, Rectangle, attend_over, gradients_over, kernel_tile, merged


class UlyssesExchange:
    """Exchange of tokens and heads, of a span of the sequence at a time.

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
        self._sent, self._read = assign_heads(*heads, axis) if self._ranks > 1 else (None, [])
        start, stop = rank_range(self._num_sent, axis)
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


Bundle = tuple[Tensor, ...]


class OffloadedChunks:
    """Bundles of tensors that wait on the host or on disk.

    Args:
        device: device to which bundles return.
        pool: pool of files. None is the host.
        kept: waiting tensors and tokens.
        width: the number of tensors of a bundle in `kept`.
    """

    def __init__(self, device: torch.device, pool: AnyPool | None, kept: Sequence[Tensor] = (), width: int = 1) -> None:
        self._device, self._pool, self._width = device, pool, width
        self._kept, self._going = list(kept), list[tuple[Pending[Any], bool]]()

    @property
    def kept(self) -> list[Tensor]:
        """Returns host tensors, and tokens of tensors on disk, once all have left."""
        self.settle()
        return self._kept

    def send(self, bundle: Bundle) -> None:
        """Sends a bundle away, once the bundle before has left."""
        self.settle()
        self._width = len(bundle)
        self._going = [(to_host(x), x.numel() > 0) for x in bundle]

    def settle(self) -> None:
        """Waits until all sent bundles have arrived."""
        going, self._going = self._going, []
        for pending, some in going:
            host = pending.result()
            if self._pool is not None and some:
                host = token_of(self._pool.write(host).result())
            self._kept.append(host)

    def come(self, order: Iterable[int]) -> Iterator[Bundle]:
        """Yields the bundles of given numbers. The next bundle is on the way while a bundle is in use."""
        before: list[Fetch] | None = None
        for i in order:
            coming = [self._fetch_tensor(x) for x in self.kept[i * self._width : (i + 1) * self._width]]
            if before is not None:
                yield tuple(x.result() for x in before)
            before = coming
        if before is not None:
            yield tuple(x.result() for x in before)

    def _fetch_tensor(self, x: Tensor) -> Fetch:
        on_disk = self._pool is not None and x.dtype == torch.int64
        fetch = Fetch(stored_of(x).read() if on_disk else x, self._device)
        if not on_disk:
            fetch.move()
        return fetch


class Sums:
    """Sums that wait on the host between additions."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._sums = device, dict[int, Pending[Tensor]]()

    def add(self, i: int, x: Tensor) -> None:
        """Adds to sum i."""
        before = self.take(i)
        self._sums[i] = to_host(x if before is None else before + x)

    def take(self, i: int) -> Tensor | None:
        """Removes and returns sum i, on the device, or None if nothing was added."""
        found = self._sums.pop(i, None)
        return None if found is None else Fetch(found.result(), self._device).result()


@dataclasses.dataclass(frozen=True)
class Chunked:
    """Attention with keys and values on the host or on disk, fetched chunk by chunk, forward and backward (FPDT).

    Along an axis each rank has all tokens of some heads during the computation of a chunk, as with `Ulysses`, and a
    piece of every chunk at rest: rows lie in `sequence_order` before the cut. Queries, results and gradients wait in
    the same place as keys, but sums of gradients wait on the host. There is no vmap, no forward mode and no second
    derivative: take `Blockwise` or `Ulysses` for these.

    Attributes:
        chunk: number of tokens of a chunk, of all ranks together. The last chunk may have fewer.
        axis: mesh axes along which tokens are cut.
        length: number of tokens of the whole sequence, needed where the axis has several ranks.
        to: place of waiting tensors, "host" or "disk".
        pool: with "disk", the files: `memory.Pool(path)`.

    Raises:
        ValueError: `chunk` is less than 1, another place, or "disk" without a pool.

    Example:
        >>> from shardfn import nn
        >>> x = torch.randn(1, 10, 2, 4)
        >>> torch.allclose(nn.attention(x, x, x, impl=Chunked(4)), nn.attention(x, x, x), atol=1e-6)
        True
    """

    chunk: int
    axis: Axes = None
    length: int | None = None
    to: Literal["host", "disk"] = "host"
    pool: AnyPool | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.to != ("host" if self.pool is None else "disk"):
            raise ValueError(
                f"{self}: a chunk has 1 or more tokens, and waits on 'host', or on 'disk' with pool=memory.Pool(path)."
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """Returns the axes along which tokens are cut, major to minor."""
        return () if self.axis is None else (self.axis,) if isinstance(self.axis, str) else tuple(self.axis)

    @property
    def lengths(self) -> frozenset[int]:
        """Returns the stated numbers of tokens of the whole sequence."""
        return frozenset() if self.length is None else frozenset({self.length})

    @property
    def shuffled_axes(self) -> tuple[str, ...]:
        """Returns the axes over which tokens are dealt out of order, major to minor."""
        return self.axes

    def rows(self, length: int) -> Rows:
        """Returns the positions of the rank's tokens of a sequence."""
        return _rows_of_rank(_piece_sizes(all_ranges(length, self.axis), self.chunk), int(axis_index(self.axis)))

    def order(self, length: int, num_ranks: Sequence[int]) -> Rows:
        """Returns the positions of all tokens, in the order before the cut."""
        sizes = _piece_sizes(ranges_over(length, num_ranks), self.chunk)
        return tuple(span for r in range(math.prod(num_ranks)) for span in _rows_of_rank(sizes, r))

    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: OnlineScores, length: int) -> Tensor:
        """Returns the attention of the rank's queries over all keys."""
        refuse_gradients(how)
        if q_BTHK.shape[1] != k_BSGK.shape[1]:
            raise ValueError(
                f"Chunked needs equal numbers of queries and keys, got {q_BTHK.shape[1]} queries over"
                f" {k_BSGK.shape[1]} keys. Use Blockwise()."
            )
        if how.sinks_H is not None:
            raise ValueError("Chunked attention does not support sinks. Use Ulysses(), Ring() or Blockwise().")
        if self.pool is not None and capturing():
            raise ValueError(
                "Chunked(to='disk') is not captured. Run the step without jit, or let chunks wait on 'host'."
            )
        q, k, v = narrowed(q_BTHK, k_BSGK, v_BSGK)
        H, G = q.shape[2], k.shape[2]
        own = how.of_heads(*rank_range(H, self.axis)) if axis_size(self.axis) > 1 else how
        sizes = _piece_sizes(all_ranges(length, self.axis), self.chunk)
        tile = kernel_tile(own, q.device, TORCH_TILE)
        at = (tile or TORCH_TILE, tile is not None)
        plan = ChunkPlan(self.axis, sizes, (H, G), own._replace(slopes_H=None), at, self.pool)
        if not sizes:
            return torch.zeros_like(q)
        with torch.autocast(q.device.type, enabled=False):
            return _ChunkedAttention.apply(q, k, v, own.slopes_H, plan, *own.mask.tensors)[0]


class ChunkPlan(NamedTuple):
    """Arguments of the autograd functions besides tensors.

    Attributes:
        axis: mesh axes along which each span is cut. None means a single rank.
        sizes: tokens of each rank's piece of each span, [spans][P].
        heads: (H, G) of all ranks.
        how: scores of the rank's heads, without slopes.
        tile: tile of a rectangle, and whether the kernel computes the tile.
        pool: pool of files. None means the host.
    """

    axis: Axes
    sizes: tuple[tuple[int, ...], ...]
    heads: tuple[int, int]
    how: OnlineScores
    tile: tuple[int, bool]
    pool: AnyPool | None

    @property
    def spans(self) -> list[Span]:
        """Returns the positions of each span."""
        ends = [0]
        for pieces in self.sizes:
            ends.append(ends[-1] + sum(pieces))
        return list(itertools.pairwise(ends))

    def reads(self) -> list[list[int]]:
        """Returns, for each span of queries, the spans of keys in which the mask counts a pair."""
        spans = self.spans
        return [[j for j, k in enumerate(spans) if self.how.mask.cover(q, k) != "none"] for q in spans]

    def rectangle(self, i: int, j: int) -> Rectangle:
        """Returns the rectangle of the queries of span i and the keys of span j."""
        return Rectangle(self.spans[i], self.spans[j], *self.tile)

    def with_data(self, slopes_H: Tensor | None, data: Any) -> OnlineScores:
        """Returns the scores with the data of the mask."""
        return self.how._replace(mask=self.how.mask.with_tensors(data), slopes_H=slopes_H)


class _Backwards(torch.autograd.Function):
    """Autograd function with a single derivative, in reverse mode."""

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> NoReturn:
        _refuse_transform("forward-mode derivative")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        _refuse_transform("vmap")


class _ChunkedAttention(_Backwards):
    """Maps (q, k, v, slopes, plan, data of the mask) to (y, tensors for the backward ...)."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, slopes_H: Tensor | None, plan: ChunkPlan, *data: Tensor) -> Any:
        how, dealer, ys = plan.with_data(slopes_H, data), UlyssesExchange(plan.axis, plan.sizes, plan.heads), []
        keys, queries = (OffloadedChunks(q.device, plan.pool) for _ in range(2))
        for i in range(len(plan.sizes)):
            keys.send((dealer.deal_keys(k, i), dealer.deal_keys(v, i)))
        for i, reads in enumerate(plan.reads()):
            own, found = dealer.deal(q, i), None
            work = own.to(wide(own.dtype))  # partial results are not rounded
            for j, (k_j, v_j) in zip(reads, keys.come(reads), strict=True):
                part = work, k_j.to(work.dtype), v_j.to(work.dtype)
                found = merged(found, attend_over(part, how, plan.rectangle(i, j)))
            y, lse = _empty_result(work) if found is None else found
            y = y.to(own.dtype)
            ys.append(dealer.undeal(y, i))
            queries.send((own, y, lse))
        return torch.cat(ys, 1), *keys.kept, *queries.kept

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, _, _, slopes_H, plan, *data = inputs
        ctx.plan, ctx.sloped, ctx.like, ctx.on_mesh = plan, slopes_H is not None, (q.device, q.dtype), mesh_as_now()
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # waiting tensors have no gradients, and need no zeros on the device
        ctx.save_for_backward(*output[1:], *([slopes_H] if ctx.sloped else []), *data)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        saved, num = ctx.saved_tensors, 5 * len(ctx.plan.sizes)  # once: remat makes the tensors again at each look
        kept, data = saved[:num], list(saved[num:])
        slopes_H = data.pop(0) if ctx.sloped else None
        with ctx.on_mesh():  # a backward may run when the mesh of the forward is no longer bound
            grads = _ChunkedBackward.apply(grad_outputs[0], slopes_H, ctx.plan, ctx.like, *kept, *data)
        return (*grads, None, None, *(None for _ in data))


class _ChunkedBackward(_Backwards):
    """Maps (dy, slopes, plan, (device, dtype), tensors of the forward, data of the mask) to (dq, dk, dv)."""

    @staticmethod
    def forward(dy: Tensor, slopes_H: Tensor | None, plan: ChunkPlan, like: Any, *rest: Tensor) -> Any:
        (device, dtype), n = like, len(plan.sizes)
        how, dealer = plan.with_data(slopes_H, rest[5 * n :]), UlyssesExchange(plan.axis, plan.sizes, plan.heads)
        keys = OffloadedChunks(device, plan.pool, rest[: 2 * n], 2)
        queries = OffloadedChunks(device, plan.pool, rest[2 * n : 5 * n], 3)
        cotangents, dqs, dks, dvs, reads = OffloadedChunks(device, plan.pool), Sums(device), [], [], plan.reads()
        for i in range(n):
            cotangents.send((dealer.deal(dy, i),))
        for j, kv in enumerate(keys.come(range(n))):
            k, v = (x.to(wide(dtype)) for x in kv)
            dk, dv, by = torch.zeros_like(k), torch.zeros_like(v), [i for i in range(n) if j in reads[i]]
            for i, (q, y, lse), (out,) in zip(by, queries.come(by), cotangents.come(by), strict=True):
                q, y, out = (x.to(k.dtype) for x in (q, y, out))
                dq, *more = gradients_over(out, (q, k, v), y, lse, how, plan.rectangle(i, j))
                dqs.add(i, dq)
                dk, dv = dk + more[0], dv + more[1]
            dks.append(dealer.undeal_keys(dk.to(dtype), j))
            dvs.append(dealer.undeal_keys(dv.to(dtype), j))
        found = []
        for i, (out,) in enumerate(cotangents.come(range(n))):
            dq = dqs.take(i)
            found.append(dealer.undeal(torch.zeros_like(out) if dq is None else dq.to(dtype), i))
        return torch.cat(found, 1), torch.cat(dks, 1), torch.cat(dvs, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> NoReturn:
        _refuse_transform("second derivative")


def _refuse_transform(what: str) -> NoReturn:
    raise NotImplementedError(f"Chunked() has no {what}. Blockwise() and Ulysses() compute the same and have.")


def _empty_result(q_BTHK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (y, lse) of queries without a span of keys."""
    B, T, H, _ = q_BTHK.shape
    return torch.zeros_like(q_BTHK), q_BTHK.new_full((B, H, T), -math.inf)


def _piece_sizes(ranges: list[Span], chunk: int) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of each rank's piece of each span, [spans][P], for ranks with the rows of the ranges."""
    own = [stop - start for start, stop in ranges]
    each = -(-chunk // len(own))
    num = -(-max(own) // each)
    return tuple(tuple(min(each, max(n - i * each, 0)) for n in own) for i in range(num))


def _rows_of_rank(sizes: tuple[tuple[int, ...], ...], rank: int) -> Rows:
    out, at = [], 0
    for pieces in sizes:
        start = at + sum(pieces[:rank])
        out += [(start, start + pieces[rank])] if pieces[rank] else []
        at += sum(pieces)
    return tuple(out)
