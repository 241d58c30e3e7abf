"""Ring attention: keys and values go round a ring of ranks, while each rank keeps its queries.

At hop h rank r has the keys and values of rank r - h. For example at hop 1 of 3 ranks, rank 0 has the keys of rank 2.
Keys and values are sent on as long as a rank ahead has a query with attention to the keys. Masks decide only by
positions, so all ranks know the transfers. The next keys and values are on the way while the present keys and values
are used. Only the rank's tensors are kept for the backward. There keys and values go round once more, with the
gradients a hop behind. From the last rank with a summand the gradients go home.

    sent by a rank, of b samples, N tokens, h features of keys: forward 2 b N h (P - 1) / P, backward twice that

With a single rank the result is attention in blocks. On a CPU `kernels.block_sparse_attention` computes each hop. The
products of torch, a tile at a time, compute unsupported masks, derivatives of the gradients, and forward mode.

B samples, T queries, S keys, H query heads, G key heads, R = H / G, K head dim, P ranks. Liu et al., Ring Attention
with Blockwise Transformers, 2023, https://arxiv.org/abs/2310.01889
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.collectives import mesh_as_now, ppermute, ppermute_start, transforming
from shardfn.core import Axes, save_tensors

from ._online import (
    OnlineScores,
    Outer,
    Pushed,
    Rows,
    absorb,
    finish,
    gathered,
    narrowed,
    refuse_gradients,
    tiles,
    transpose,
    wide,
)
from ._rectangles import QKV, attend_over, by_key_head, gradients_over, kernel_tile, merged, rectangles
from ._ring_rounds import Perm, RingRounds, make_rounds, num_rows, part_of

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def online(
    axis: Axes, rows: tuple[Rows, ...], qkv: QKV, how: OnlineScores, block: int, kernel: int | None = None
) -> Tensor:
    """Returns the attention of the rank's queries to the keys of all ranks, [B, T, H, K].

    Args:
        axis: mesh axes of the ring. None means a single rank.
        rows: the positions of each rank's tokens.
        qkv: queries, keys and values of the rank, [B, T, H or G, K].
        how: the scores.
        block: block of a tile.
        kernel: size of a tile of the kernel. Default: `kernel_tile`.

    Raises:
        ValueError: data of a mask require a gradient.

    Example:
        >>> from shardfn.nn._masks import Causal
        >>> x = torch.ones(1, 3, 1, 2)
        >>> online(None, (((0, 3),),), (x, x, x), OnlineScores(Causal(), 1.0), 2).shape
        torch.Size([1, 3, 1, 2])
    """
    refuse_gradients(how)
    q, k, v = narrowed(*qkv)
    tile = kernel_tile(how, q.device, block) if kernel is None else kernel
    along = make_rounds(axis, rows, q.shape[1], how._replace(slopes_H=None, sinks_H=None), block, tile)
    with torch.autocast(q.device.type, enabled=False):
        return _Online.apply(q, k, v, how.sinks_H, how.slopes_H, along, *how.mask.tensors)[0]


class _Online(torch.autograd.Function):
    """(q, k, v, sinks, slopes, course, data of the mask) -> (y, lse), closed under backward, jvp and vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, sinks_H: Any, slopes_H: Any, along: RingRounds, *data: Tensor) -> Any:
        return _compute_values(along, _bind_data(along, slopes_H, data), (q, k, v), sinks_H)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, sinks_H, slopes_H, along, *data = inputs
        ctx.along, ctx.on_mesh = along, mesh_as_now()
        ctx.mark_non_differentiable(output[1])
        _save_operands(ctx, (q, k, v, *output), (sinks_H, slopes_H), data)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> tuple[Tensor, None]:
        saved, sinks_H, slopes_H, data = _load_saved(ctx, 5)
        with ctx.on_mesh():
            return tangent(ctx.along, _bind_data(ctx.along, slopes_H, data), saved, sinks_H, grad_inputs), None

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        saved, sinks_H, slopes_H, data = _load_saved(ctx, 5)  # once: remat makes the tensors again at each look
        with ctx.on_mesh():  # a backward may run when the mesh of the forward is no longer bound
            grads = OnlineBackward.apply(grad_outputs[0], *saved, sinks_H, slopes_H, ctx.along, *data)
        return (*grads, *([None] if sinks_H is None else []), None, None, *(None for _ in data))


def _compute_values(along: RingRounds, how: OnlineScores, qkv: QKV, sinks_H: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, H, K] and lse [B, H, T]."""
    return _add_sink(*_attend_hops(along, how, qkv), sinks_H)


def tangent(along: RingRounds, how: OnlineScores, saved: Saved, sinks_H: Tensor | None, given: Any) -> Tensor:
    """Returns the tangent of y, from the tangents of q, k, v and sinks. None stands for 0."""
    tangents = (torch.zeros_like(x) if t is None else t for x, t in zip(saved[:3], given[:3], strict=True))
    dy = _push_tangents(along, how, saved, tuple(tangents))
    if sinks_H is None or given[3] is None:
        return dy
    share_BHT = (sinks_H[:, None] - saved[4]).exp() * given[3][:, None]
    return dy - (saved[3] * share_BHT.transpose(1, 2)[..., None]).to(dy.dtype)


class OnlineBackward(torch.autograd.Function):
    """Maps (dy, q, k, v, y, lse, sinks, slopes, course, data of the mask) to (dq, dk, dv), and dsinks with sinks.

    A function of dy, q, k, v and sinks: derivatives come from the formula in tiles, with y and lse computed again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, sinks_H: Any, *rest: Any) -> Any:
        slopes_H, along, *data = rest
        grads = (_backward_by_kernel if along.kernel else _backward_in_tiles)(
            along, _bind_data(along, slopes_H, data), (q, k, v, y, lse), dy
        )
        return grads if sinks_H is None else (*grads, _sink_gradient(dy, y, lse, sinks_H))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        dy, q, k, v, _, _, sinks_H, slopes_H, along, *data = inputs
        ctx.along, ctx.on_mesh = along, mesh_as_now()
        _save_operands(ctx, (dy, q, k, v), (sinks_H, slopes_H), data)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        primals, again, num = _rerun_gradients(ctx)
        with ctx.on_mesh():
            pull: Any = torch.func.vjp(again, *primals)[1]
            dy, dq, dk, dv, *dsinks = pull(tuple(grad_outputs))
        return dy, dq, dk, dv, None, None, *(dsinks or [None]), None, None, *(None for _ in range(num))

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        primals, again, _ = _rerun_gradients(ctx)
        given = (*grad_inputs[:4], grad_inputs[6])[: len(primals)]
        tangents = [torch.zeros_like(x) if t is None else t for x, t in zip(primals, given, strict=True)]
        with ctx.on_mesh():
            return torch.func.jvp(again, primals, tuple(tangents))[1]


def _rerun_gradients(ctx: Any) -> Any:
    """Returns (dy, q, k, v, sinks), a differentiable function to their gradients, and the number of mask data."""
    saved, sinks_H, slopes_H, data = _load_saved(ctx, 4)
    how = _bind_data(ctx.along, slopes_H, data)

    def compute_gradients(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Any:
        sinks_H = sinks[0] if sinks else None
        y, lse = _add_sink(*_attend_in_tiles(ctx.along, how, (q, k, v)), sinks_H)
        grads = _backward_in_tiles(ctx.along, how, (q, k, v, y, lse), dy)
        return grads if sinks_H is None else (*grads, _sink_gradient(dy, y, lse, sinks_H))

    return (*saved, *([] if sinks_H is None else [sinks_H])), compute_gradients, len(data)


def _add_sink(y_BTHK: Tensor, lse_BHT: Tensor, sinks_H: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns y and lse with an additional key of score `sinks_H` and value 0. The gradients' formulas still hold."""
    if sinks_H is None:
        return y_BTHK, lse_BHT
    both_BHT = torch.logaddexp(lse_BHT, sinks_H.to(lse_BHT.dtype)[:, None])
    share_BHT = (lse_BHT - both_BHT).exp()
    return (y_BTHK * share_BHT.transpose(1, 2)[..., None]).to(y_BTHK.dtype), both_BHT


def _sink_gradient(dy_BTHK: Tensor, y_BTHK: Tensor, lse_BHT: Tensor, sinks_H: Tensor) -> Tensor:
    """Returns the gradient of the scores of sinks, -p delta. A sink is a key with the value 0."""
    delta_BHT = (dy_BTHK.to(lse_BHT.dtype) * y_BTHK.to(lse_BHT.dtype)).sum(-1).transpose(1, 2)
    return -((sinks_H.to(lse_BHT.dtype)[:, None] - lse_BHT).exp() * delta_BHT).sum((0, 2)).to(sinks_H.dtype)


def _save_operands(
    ctx: Any, tensors: tuple[Tensor, ...], maybe: tuple[Tensor | None, Tensor | None], data: list[Tensor]
) -> None:
    ctx.there = [x is not None for x in maybe]
    save_tensors(ctx, *tensors, *(x for x in maybe if x is not None), *data)


def _load_saved(ctx: Any, num: int) -> tuple[Any, Tensor | None, Tensor | None, list[Tensor]]:
    """Returns the tensors of `_save_operands`: `num` tensors, sinks, slopes, and the data of the mask."""
    saved = list(ctx.saved_tensors)
    tensors, rest = tuple(saved[:num]), saved[num:]
    sinks_H, slopes_H = (rest.pop(0) if there else None for there in ctx.there)
    return tensors, sinks_H, slopes_H, rest


def _bind_data(along: RingRounds, slopes_H: Tensor | None, data: Any) -> OnlineScores:
    return along.how._replace(mask=along.how.mask.with_tensors(data), slopes_H=slopes_H)


def _attend_hops(along: RingRounds, how: OnlineScores, qkv: QKV) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, H, K] and lse [B, H, T], by the kernel where possible."""
    if along.kernel is None:
        return _attend_in_tiles(along, how, qkv)
    q = qkv[0]
    alone = along.size == 1 and len(along.queries) <= 1
    q = q if alone else q.to(wide(q.dtype))  # partial results are not rounded
    found: dict[Any, Any] = {}
    for (k, v), keys, _ in _iterate_hops(along, 1, *qkv[1:]):
        for queries, at, part in rectangles(along.queries, keys, how, along.kernel):
            k_S, v_S = (x[:, slice(*at)].to(q.dtype) for x in (k, v))
            found[queries] = merged(found.get(queries), attend_over((q[:, slice(*queries)], k_S, v_S), how, part))
    ys, lses = [], []
    for tile in tiles(along.queries, max(num_rows(along.queries), 1)):
        like = q[:, slice(*tile.at)]
        none = torch.zeros_like(like), like.new_zeros(like.shape[:3], dtype=wide(q.dtype)).transpose(1, 2) - torch.inf
        y, lse = found.get(tile.at, none)
        ys.append(y)
        lses.append(lse)
    if not ys:
        return torch.zeros_like(qkv[0]), q.new_zeros(q.shape[0], q.shape[2], 0, dtype=wide(q.dtype))
    return torch.cat(ys, 1).to(qkv[0].dtype), torch.cat(lses, 2)


def _backward_by_kernel(along: RingRounds, how: OnlineScores, saved: Saved, dy: Tensor) -> QKV:
    """Returns the gradients of q, k and v by the kernel."""
    assert along.kernel is not None
    q, k, v, y, lse = saved
    kernel, alone = along.kernel, along.size == 1 and len(along.queries) <= 1
    work = q.dtype if alone else wide(q.dtype)
    q, y, dy = (x.to(work) for x in (q, y, dy))
    dqs: dict[Any, Tensor] = {}

    def transpose_hop(kv: tuple[Tensor, Tensor], keys: Rows) -> Tensor:
        k, v = (x.to(work) for x in kv)
        dkv = [torch.zeros_like(k), torch.zeros_like(v)]
        for queries, at, part in rectangles(along.queries, keys, how, kernel):
            rows, columns = slice(*queries), slice(*at)
            own = q[:, rows], k[:, columns], v[:, columns]
            dq, *news = gradients_over(dy[:, rows], own, y[:, rows], lse[..., rows], how, part)
            dqs[queries] = dqs[queries] + dq if queries in dqs else dq
            dkv = [_add_at(old, new, at) for old, new in zip(dkv, news, strict=True)]
        return torch.cat(dkv, -1)

    dkv = _round_and_home(along, 1, (k, v), transpose_hop)
    spans = [t.at for t in tiles(along.queries, max(num_rows(along.queries), 1))]
    found = [dqs[at] if at in dqs else torch.zeros_like(q[:, slice(*at)]) for at in spans]
    dq = torch.cat(found, 1) if found else torch.zeros_like(q)
    dk, dv = dkv.split([k.shape[-1], v.shape[-1]], -1)
    return dq.to(saved[0].dtype), dk.to(k.dtype), dv.to(v.dtype)


def _add_at(x: Tensor, part: Tensor, at: tuple[int, int]) -> Tensor:
    """Returns x [B, S, G, K] with `part` added to the rows `at`."""
    if part.shape == x.shape:
        return x + part
    return torch.cat([x[:, : at[0]], x[:, slice(*at)] + part, x[:, at[1] :]], 1)


def _attend_in_tiles(along: RingRounds, how: OnlineScores, qkv: QKV) -> tuple[Tensor, Tensor]:
    """Returns the same, a tile of torch's products at a time, differentiable."""
    q, k, v = by_key_head(qkv)
    states: list[Any] = [None] * len(tiles(along.queries, along.block))
    for kv, keys, _ in _iterate_hops(along, 2, k, v):
        absorb(states, q, along.queries, (kv[0], kv[1]), keys, how, along.block)
    y, lse = finish(states, q, v, along.queries, along.block)
    return y.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2)


def _backward_in_tiles(along: RingRounds, how: OnlineScores, saved: Saved, dy: Tensor) -> QKV:
    """Returns the gradients of q, k and v, a tile of torch's products at a time, differentiable."""
    q, k, v = by_key_head(saved[:3])
    y, dy = (x.transpose(1, 2).unflatten(1, q.shape[1:3]) for x in (saved[3], dy))
    lse = saved[4].unflatten(1, q.shape[1:3])
    outer = Outer(q, dy, lse, (dy.to(lse.dtype) * y.to(lse.dtype)).sum(-1))
    dqs: list[Any] = [None] * len(tiles(along.queries, along.block))

    def transpose_hop(kv: tuple[Tensor, Tensor], keys: Rows) -> Tensor:
        return torch.cat(transpose(dqs, outer, along.queries, kv, keys, how, along.block), -1)

    dk, dv = _round_and_home(along, 2, (k, v), transpose_hop).split([k.shape[-1], v.shape[-1]], -1)
    dq = gathered(dqs, q, along.queries, along.block).flatten(1, 2)
    return dq.transpose(1, 2), dk.to(k.dtype).transpose(1, 2), dv.to(v.dtype).transpose(1, 2)


def _push_tangents(along: RingRounds, how: OnlineScores, saved: Saved, tangents: tuple[Tensor, ...]) -> Tensor:
    """Returns the tangent of y."""
    q, k, v = by_key_head(saved[:3])
    dq, dk, dv = by_key_head(tangents)
    lse = saved[4].unflatten(1, q.shape[1:3])
    pushed = Pushed(along.queries, (q, dq, lse), along.block)
    for tensors, keys, _ in _iterate_hops(along, 2, k, v, dk, dv):
        pushed.absorb(tensors, keys, how)
    y = pushed.finish(saved[3].transpose(1, 2).unflatten(1, q.shape[1:3]))[0]
    return y.flatten(1, 2).transpose(1, 2)


def _iterate_hops(along: RingRounds, dim: int, *kv: Tensor) -> Iterator[tuple[tuple[Tensor, ...], Rows, int]]:
    """Yields keys and values (and tensors with the same rows) of each hop, with positions and the hop.

    Each bundle is sent on before the yield, and the next bundle is waited for only at the next request.
    """
    n, own = along.size, num_rows(along.rows[along.index])
    if n == 1 or not along.onward(1):
        yield kv, along.rows[along.index], 0
        return
    widths = [x.shape[-1] for x in kv]
    pad = (0, 0) * (kv[0].ndim - 1 - dim) + (0, along.longest - own)
    packed = F.pad(torch.cat(kv, -1), pad)
    here, rows = kv, along.rows[along.index]
    for hop in range(n):
        perm = along.onward(hop + 1) if hop + 1 < n else []
        coming = _start_send(packed, along, perm) if perm else None
        yield here, rows, hop
        if coming is None:
            return
        packed = coming()
        source = (along.index - hop - 1) % n
        rows = along.rows[source] if along.last[source] > hop else ()
        here = packed.narrow(dim, 0, num_rows(rows)).split(widths, -1)


def _round_and_home(
    along: RingRounds, dim: int, kv: tuple[Tensor, Tensor], hop_of: Callable[[Any, Rows], Tensor]
) -> Tensor:
    """Returns the gradients of the rank's keys and values, along the last dim, from all ranks that read the keys.

    A rank's sums travel during the computation with the next keys, and travel home during the computation with the
    later part of the rank's keys, left until then.
    """
    coming: list[Callable[[], Tensor]] = []
    passing: Callable[[], Tensor] | None = None
    rows = along.rows[along.index]
    num = num_rows(rows)
    early = -(-num // 2) if along.size > 1 and along.onward(1) else num

    def hop_of_range(start: int, stop: int) -> Tensor:
        k, v = (x.narrow(dim, start, stop - start) for x in kv)
        return hop_of((k, v), part_of(rows, start, stop))

    own: list[Tensor] = []
    for here, keys, hop in _iterate_hops(along, dim, *kv):
        if hop == 0:
            own.append(hop_of_range(0, early))
            continue
        dkv = hop_of((here[0], here[1]), keys)
        dkv = F.pad(dkv, (0, 0) * (dkv.ndim - 1 - dim) + (0, along.longest - dkv.shape[dim]))
        dkv = dkv if passing is None else dkv + passing()
        onward = along.onward(hop + 1) if hop + 1 < along.size else []
        passing = _start_send(dkv, along, onward) if onward else None
        if home := along.homeward(hop):
            coming.append(_start_send(dkv, along, home))
    own += [hop_of_range(early, num)] if early < num else []
    return functools.reduce(lambda x, wait: x + wait().narrow(dim, 0, num), coming, torch.cat(own, dim))


def _start_send(x: Tensor, along: RingRounds, perm: Perm) -> Callable[[], Tensor]:
    """Sends `x`, and returns a function to wait for the received tensor."""
    if torch.is_grad_enabled() or transforming():
        here = ppermute(x, along.axis, perm)
        return lambda: here
    return ppermute_start(x, along.axis, perm)
