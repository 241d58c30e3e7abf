"""Attention of ragged tokens over a paged cache: the definition. Each operation is rounded once.

T tokens, G key heads, R query heads for each key head, K head dim, N positions of a tile.
"""

import torch
from torch import Tensor

from shardfn.kernels._exponential import exponential, fused, polynomial

from ._check import check_plan
from ._codes import LARGEST, as_rows, dequantize_cache_rows, quantize_cache_rows

# Positions of a tile, and lanes over K of a dot product, and of the sum of weights.
TILE, LANES = 32, 16
# The polynomial of Cephes, the highest power first: (tanh x - x) / x^3 of x^2, |x| < 0.625.
TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
SMALL = 0.625
# Of the series of float64.
WIDE_TERMS = 9


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor,
    scale: float, window: int | None, softcap: float | None, slopes: Tensor | None, sinks: Tensor | None,
    tree: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns [T, H, K] and [T, H]. Writes the cache [blocks, 2, G, block, row]."""
    check_plan(cache, slots, positions, sequences, tables, window, tree)
    write(k, v, cache, slots)
    (T, H, K), G = q.shape, k.shape[1]
    slope, sink = (None if x is None else x.view(G, H // G) for x in (slopes, sinks))
    block = cache.shape[3]
    places = seen_slots(block, slots, positions, sequences, tables, window, tree)
    by_place, q = as_rows(cache), q.view(T, G, H // G, K)
    state = _start_state(q, sink)
    for begin in range(0, places.shape[1], TILE):
        at = places[:, begin : begin + TILE]
        slot = at.clamp(min=0)
        rows = by_place[slot // block, :, :, slot % block]
        kv_TN2GK = dequantize_cache_rows(rows, K, cache.dtype) if cache.dtype in LARGEST else rows.to(q.dtype)
        x = _compute_scores(q, kv_TN2GK[:, :, 0], scale, softcap)
        if slope is not None:
            p = torch.arange(begin, begin + TILE, device=q.device)
            x = fused(-slope[..., None], (positions[:, None] - p).to(q.dtype)[:, None, None], x)
        state = _add_tile(state, x, kv_TN2GK[:, :, 1], at >= 0)
    most, lanes, y = state
    total = halved(lanes)
    y = torch.where(total[..., None] == 0, 0.0, y / total[..., None])
    return y.view(T, H, K), (most + total.log()).view(T, H)


def write(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Writes each token's key and value at the token's slot. The last token with a slot is kept."""
    index, order = slots.long(), torch.arange(len(slots), device=slots.device)
    last = order.new_full((cache.shape[0] * cache.shape[3],), -1).scatter_reduce(0, index, order, "amax")
    kept = last[index] == order
    rows = torch.stack([k, v], 1)[kept]
    rows = quantize_cache_rows(rows, cache.dtype) if cache.dtype in LARGEST else rows.to(cache.dtype)
    block = cache.shape[3]
    as_rows(cache)[index[kept] // block, :, :, index[kept] % block] = rows


def seen_slots(
    block: int, slots: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor, window: int | None,
    tree: Tensor | None,
) -> Tensor:  # fmt: skip
    """Returns the slots of the visible keys of tokens, by position, int64 [T, whole tiles]. -1 means no key."""
    most = int(positions.max()) + 1 if len(positions) else 0
    p, mine = torch.arange(-(-most // TILE) * TILE, device=slots.device), positions[:, None].long()
    seen = p <= mine
    if window is not None:
        seen &= p > mine - window
    blocks = tables[sequences.long()].long()
    at = blocks[:, (p // block).clamp(max=max(blocks.shape[1] - 1, 0))] * block + p % block
    if tree is not None:
        seen_token = (tree != 0).nonzero()
        i, j = seen_token.unbind(1)
        at[i, positions[j].long()] = slots[j].long()
    return torch.where(seen, at, -1)


def _start_state(q: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns largest scores [T, G, R], lanes of sums of weights [T, G, R, LANES], weighted values [T, G, R, K]."""
    most = q.new_full(q.shape[:-1], -torch.inf)
    most = most if sink is None else sink.expand_as(most)
    lanes = q.new_zeros(*most.shape, LANES)
    lanes[..., 0] = (most > -torch.inf).to(q.dtype)
    return most, lanes, torch.zeros_like(q)


def _compute_scores(q: Tensor, k_TNGK: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Returns the scores [T, G, R, N].

    Lane l has the chain over elements l, l + 16, ..., and lanes are added by halving.
    """
    pad = 0, -q.shape[-1] % LANES
    q = torch.nn.functional.pad(q, pad).unflatten(-1, (-1, LANES))[:, :, :, None]
    k = torch.nn.functional.pad(k_TNGK, pad).unflatten(-1, (-1, LANES)).movedim(1, 2)[:, :, None]
    total = q.new_zeros(*q.shape[:3], k.shape[3], LANES)
    for j in range(q.shape[-2]):
        total = fused(q[..., j, :], k[..., j, :], total)
    x = halved(total)
    if softcap is None:
        return x * x.new_tensor(scale)
    return tanh(x * x.new_tensor(scale / softcap)) * x.new_tensor(softcap)


def _add_tile(
    state: tuple[Tensor, Tensor, Tensor], x: Tensor, v_TNGK: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the state with an additional tile. Tokens without a visible key in the tile keep the old state."""
    most, lanes, y = state
    x = torch.where(seen[:, None, None], x, -torch.inf)
    top = torch.where(x.isnan(), -torch.inf, x).amax(-1)
    new = torch.where(top > most, top, most)
    shift = torch.where(new == -torch.inf, 0.0, new)
    weights, factor = exponential(x - shift[..., None]), exponential(most - shift)[..., None]
    values = torch.zeros_like(y)
    for n in range(TILE):
        more = fused(weights[..., n, None], v_TNGK[:, n, :, None], values)
        values = torch.where(seen[:, n, None, None, None], more, values)
    fresh = new, fused(lanes, factor, weights[..., :LANES] + weights[..., LANES:]), fused(y, factor, values)
    any_seen = seen.any(1)[:, None, None]
    return (
        torch.where(any_seen, fresh[0], most),
        torch.where(any_seen[..., None], fresh[1], lanes),
        torch.where(any_seen[..., None], fresh[2], y),
    )


def halved(x: Tensor) -> Tensor:
    """Returns the sum over the last dim, a power of two: the second half is added to the first, and so on."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def tanh(x: Tensor) -> Tensor:
    """Returns the hyperbolic tangent: a polynomial near 0, else by e^(-2 |x|)."""
    square, e = x * x, exponential(-2 * x.abs())
    near = _wide_near(x, square) if x.dtype == torch.float64 else fused(polynomial(TANH, square) * square, x, x)
    return torch.where(x.abs() < SMALL, near, torch.copysign((1 - e) / (1 + e), x))


def _wide_near(x: Tensor, square: Tensor) -> Tensor:
    """Returns the quotient of the series of sinh and cosh."""
    sinh, cosh = torch.ones_like(x), torch.ones_like(x)
    for i in range(2 * WIDE_TERMS - 1, 0, -2):
        cosh = 1 + cosh * square * (1 / (i * (i + 1)))
        sinh = 1 + sinh * square * (1 / ((i + 1) * (i + 2)))
    return x * sinh / cosh
