"""Attention of ragged tokens over a paged KV cache. The cache first receives the tokens' keys and values.

T tokens, H heads, G key heads, R query heads for each key head, K head dim, S sequences, N positions of a tile. Each
operation of the definition is rounded once.

The cache may be in codes: the key or value of a head has codes of a byte each, and a scale.

    int8    x = scale q,    q from -127 to 127            scale = max|x| / 127
    fp8     x = scale q,    q of float8_e4m3fn            scale = max|x| / 448

A row is the codes, padded with zeros to a multiple of four bytes, then the scale in float32, for example 64 + 4 bytes
for a head dim of 64. So a token's codes depend only on the token's key and value, not on other tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int32, Shaped, UInt8
from torch import Tensor

from ._arguments import check_dtype, check_shape, check_written, num_threads
from ._build import function
from ._chain import Arguments, KernelCall, addresses, are_dense
from ._fixed_bits import exponential, multiply_add, polynomial, sum_halves
from ._op import EXACT, KernelOp

# The widest head, for example the 512 + 64 numbers of a latent key of DeepSeek-V3.
WIDEST = 1024
# Positions of a tile, and lanes over K of a dot product, and of the sum of weights.
TILE, LANES = 32, 16
# The polynomial of Cephes, the highest power first: (tanh x - x) / x^3 of x^2, |x| < 0.625.
TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
SMALL = 0.625
# Of the series of float64.
WIDE_TERMS = 9
# The largest code of each dtype.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Multiply-adds of scores up to which a second thread does not pay.
FEW = 1 << 19
# The dtypes of a cache, by the dtype of keys.
_CACHES = {torch.float32: (torch.float32, torch.bfloat16, *LARGEST), torch.float64: (torch.float64,)}
# The kinds of a cache, as in _cache_rows.h.
_KINDS = {torch.bfloat16: 0, torch.float32: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
_SOURCE = "_ragged_attention.cpp"
# The softmaxes of multi-modal causal attention, as in _ragged_attention.cpp.
BRANCHES = ("text", "images", "text_of_all", "whole")


def ragged_attention(
    q: Float[Tensor, "r h k"],
    k: Float[Tensor, "t g k"],
    v: Float[Tensor, "t g k"],
    cache: Shaped[Tensor, "blocks parts g block row"],
    slots: Int32[Tensor, " t"],
    positions: Int32[Tensor, " t"],
    sequences: Int32[Tensor, " t"],
    tables: Int32[Tensor, "s width"],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    slopes: Float[Tensor, " h"] | None = None,
    sinks: Float[Tensor, " h"] | None = None,
    tree: Bool[Tensor, "t t"] | UInt8[Tensor, "t t"] | None = None,
    rows: Int32[Tensor, " r"] | None = None,
    relative: Float[Tensor, "h d"] | None = None,
    images: Int32[Tensor, "s words"] | None = None,
    branch: str = "text",
) -> tuple[Float[Tensor, "r h k"], Float[Tensor, "r h"]]:
    """Writes the keys and values of tokens into a KV cache, then returns each token's attention to its sequence.

        cache[slots[i] // block, :, :, slots[i] % block] = k[i], v[i]               for all tokens i, then
        s[p] = cap(scale q[i] k_p) - slope (positions[i] - p) + relative[positions[i] - p]      cap(x) = c tanh(x / c)
        y[i] = sum of e^s[p] v_p / (sum of e^s[p] + e^sink)                         over the positions p that i sees
        lse[i] = log(sum of e^s[p] + e^sink)

    Token i sees the positions from 0, or from positions[i] - window + 1, to positions[i]. The key at position p of
    sequence s is in block tables[s, p // block], at place p % block. Head h reads key head h // (H / G).

    Each element is a fixed expression of a row of q and of the visible keys and values, by position only. So the op is
    batch-invariant: bits depend neither on the tables, the size of blocks, the cut of a sequence into calls (chunked
    prefill), and other tokens, nor on threads and the processor. For example 7 tokens in a single call and in calls of
    4 and 3 have equal bits. The expression: tiles of 32 positions from position 0 on, without wholly masked tiles, a
    softmax carried from tile to tile, and sums of fused multiply-adds in a fixed order. In float64, products are
    rounded before the addition, and the op is slow. There is no derivative yet.

    Args:
        q: queries, float32 or float64. G divides H.
        k: keys, in the dtype of q.
        v: values, in the dtype of q.
        cache: KV cache in float32, bfloat16, int8 or float8_e4m3fn, or float64 with a float64 q. The cache is
            contiguous, and written in place. Keys and values are rounded to the cache's dtype before the read, also for
            the token itself. Of tokens with the same slot the last is kept. A row has K elements. int8 and float8 are
            codes with a scale for each row, of `cache_row(K, dtype)` elements. A block has keys and values, or a single
            part of keys that also are the values, as in latent attention. v is not read then.
        slots: place in the cache for each token, int32.
        positions: position of each token in the sequence, int32.
        sequences: the row of `tables` for each token, int32.
        tables: blocks of each sequence, int32. Unread entries may have any value.
        scale: scale of scores. None means 1 / sqrt(K).
        window: number of positions that a token sees at most, including the token.
        softcap: the bound c of scores.
        slopes: slopes of ALiBi, in the dtype of q.
        sinks: score of an additional key with the value 0, in the dtype of q.
        tree: tree for branching guesses of speculative decoding. Where row i has bits, the keys at the last positions
            of token i come from the tokens j with tree[i, j], from the slots of these tokens instead of the table. In
            the order of j, the tokens belong to i's sequence, at consecutive positions up to positions[i], and the last
            token is i. A row without bits uses only the table.
        rows: token of each query, int32. The keys and values of all tokens are written, and y has a row for each query,
            with the bits of row rows[r] of a call without `rows`. For example the last token of each prompt, or of 7
            tokens the tokens 6 and 2. None: a query for each token, in order.
        relative: number of each head and distance that is added to scores, in the dtype of q: relative positions. The
            last number is for all greater distances. For example 128 numbers for distances 0 to 127 and more.
        images: bits of the positions of image tokens of each sequence, from `pack_bits`, for one softmax of multi-modal
            causal attention. Guesses of a tree are text. None: all positions are alike.
        branch: "text" lets text see text, "images" lets text see images and each token of an image itself, and
            "text_of_all" lets all tokens see text. "whole" is a call without `images`, in which each token of an image
            also sees the rest of the image: all image tokens around the token without text between, also outside of the
            window. Their keys are in the cache, or are written by the call. Without a visible image, "text" and "whole"
            have the bits of a call without `images`.

    Returns:
        y and lse, in the dtype of q. A row of y is 0 if all scores are -inf, and lse is then -inf. The bits of lse
        depend on the logarithm of the device.

    Raises:
        TypeError: for other dtypes.
        ValueError: shapes do not fit, or a token is out of range. Nothing is written.
        NotImplementedError: in a backward.

    Example:
        >>> q, k, v = torch.ones(3, 2, 4), torch.ones(3, 1, 4), torch.arange(12.0).view(3, 1, 4)
        >>> cache = torch.zeros(4, 2, 1, 2, 4)  # 4 blocks of 2 tokens
        >>> places = torch.arange(3, dtype=torch.int32)
        >>> tables = torch.tensor([[3, 1]], dtype=torch.int32)  # block 3 has positions 0 and 1, block 1 has 2
        >>> slots = torch.tensor([6, 7, 2], dtype=torch.int32)
        >>> ragged_attention(q, k, v, cache, slots, places, torch.zeros_like(places), tables)[0][:, 0]
        tensor([[0., 1., 2., 3.],
                [2., 3., 4., 5.],
                [4., 5., 6., 7.]])
        >>> cache[3, 1, :, 1]  # a value
        tensor([[4., 5., 6., 7.]])

    References:
        Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, SOSP 2023,
        https://arxiv.org/abs/2309.06180
        Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, https://arxiv.org/abs/1805.02867
    """
    plan = {"slots": slots, "positions": positions, "sequences": sequences}
    _check_arguments(q, k, v, cache, plan, tables, len(q) if rows is None else len(slots))
    H, K = q.shape[1:]
    for name, x in (("slopes", slopes), ("sinks", sinks)):
        if x is not None:
            check_dtype(name, x, q.dtype)
            check_shape(name, x, (H,), "one for each head")
    if window is not None and window < 1:
        raise ValueError(f"window must be 1 or more (a token sees at least itself), or None, got {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be a number above 0, or None, got {softcap}")
    if tree is not None:
        if tree.dtype not in (torch.bool, torch.uint8):
            raise TypeError(f"tree is {tree.dtype}, must be {torch.bool} or {torch.uint8}")
        check_shape("tree", tree, (len(k), len(k)), "a bit for each two tokens")
    if rows is not None:
        check_dtype("rows", rows, torch.int32)
        check_shape("rows", rows, (len(q),), "a token for each query")
    if relative is not None:
        check_dtype("relative", relative, q.dtype)
        if relative.ndim != 2 or len(relative) != H or not relative.shape[1]:
            raise ValueError(
                f"relative must have a row for each of {H} heads and a number for each distance, got shape"
                f" {tuple(relative.shape)}"
            )
    if branch not in BRANCHES:
        raise ValueError(f"branch must be one of {', '.join(map(repr, BRANCHES))}, got {branch!r}")
    if images is not None:
        check_dtype("images", images, torch.int32)
        words = -(-tables.shape[1] * cache.shape[3] // TILE)
        check_shape("images", images, (len(tables), words), "a bit for each position of a sequence's blocks")
    scale = K**-0.5 if scale is None else scale
    window = None if window is None else min(window, 1 << 30)
    scores = scale, window, softcap, slopes, sinks, tree, rows, relative, images, BRANCHES.index(branch)
    return RAGGED_ATTENTION(q, k, v, cache, *plan.values(), tables, *scores)


def pack_bits(x_SN: Bool[Tensor, "s n"]) -> Int32[Tensor, "s words"]:
    """Returns a bit for each flag, 32 in a word, the first in the lowest bit.

    Example:
        >>> pack_bits(torch.tensor([[True, False, True]]))
        tensor([[5]], dtype=torch.int32)
    """
    padded = torch.nn.functional.pad(x_SN, (0, -x_SN.shape[1] % TILE)).unflatten(1, (-1, TILE))
    return (padded.long() << torch.arange(TILE, device=x_SN.device)).sum(-1).int()


def _check_arguments(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, plan: dict[str, Tensor], tables: Tensor, T: int
) -> None:
    RAGGED_ATTENTION.check_dtype("q", q)
    for name, x in (("k", k), ("v", v)):
        check_dtype(name, x, q.dtype)
    if cache.dtype not in _CACHES[q.dtype]:
        known = ", ".join(map(str, _CACHES[q.dtype]))
        raise TypeError(f"cache must be one of {known} for q of {q.dtype}, got {cache.dtype}")
    H, K = q.shape[1:]
    if not 1 <= K <= WIDEST:
        raise ValueError(f"heads of q must have from 1 to {WIDEST} elements, got q of shape {tuple(q.shape)}")
    G = cache.shape[2] if cache.ndim == 5 else 0
    like = "blocks, key and value (or 1 part that is both), key heads, places of a block, cache_row(K, dtype)"
    parts = 1 if G and cache.shape[1] == 1 else 2
    check_shape("cache", cache, (cache.shape[0], parts, G, *cache.shape[3:4], cache_row(K, cache.dtype)), like)
    check_written("cache", cache)
    if not G or H % G:
        raise ValueError(
            f"the number of key heads must divide the number of heads, got {G} key heads of cache and {H} heads of q"
        )
    for name, x in (("k", k), ("v", v)):
        check_shape(name, x, (T, G, K), "a row of the cache's heads for each token")
    for name, x in plan.items():
        check_dtype(name, x, torch.int32)
        check_shape(name, x, (T,), "one for each token")
    check_dtype("tables", tables, torch.int32)


# Caches in codes.


def cache_row(head_dim: int, dtype: torch.dtype) -> int:
    """Returns the elements of a row of a cache: the head dim, and for codes the bytes of codes and scale.

    Example:
        >>> cache_row(77, torch.float32), cache_row(77, torch.int8)
        (77, 84)
    """
    return -(-head_dim // 4) * 4 + 4 if dtype in LARGEST else head_dim


def encode_rows(x: Float32[Tensor, "*batch k"], dtype: torch.dtype) -> UInt8[Tensor, "*batch row"]:
    """Rounds rows to codes. |x - decoded| is at most half of the scale in int8, and max(|x| / 16, scale / 1024) in fp8.

    A row with an infinite or NaN value is decoded as NaN.

    Args:
        x: the rows.
        dtype: `torch.int8` or `torch.float8_e4m3fn`.

    Returns:
        The bytes of the rows.

    Example:
        >>> decode_rows(encode_rows(torch.tensor([[1.0, -4.0, 0.5]]), torch.float8_e4m3fn), 3, torch.float8_e4m3fn)
        tensor([[ 1.0000, -4.0000,  0.5000]])
    """
    top, k = LARGEST[dtype], x.shape[-1]
    scale = x.abs().amax(-1, keepdim=True) / top
    q = torch.where(scale > 0, x / scale, 0.0).clamp(-top, top).nan_to_num(0.0)
    codes = (q.round() if dtype == torch.int8 else q).to(dtype).view(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, cache_row(k, dtype) - 4 - k))
    return torch.cat([codes, scale.view(torch.uint8)], -1)


def decode_rows(rows: UInt8[Tensor, "*batch row"], k: int, dtype: torch.dtype) -> Float32[Tensor, "*batch k"]:
    """Returns the values of the bytes of rows.

    Args:
        rows: rows from `encode_rows`.
        k: the head dim.
        dtype: see `encode_rows`.
    """
    scale = rows[..., -4:].contiguous().view(torch.float32)
    return rows[..., :k].contiguous().view(dtype).float() * scale


def view_rows(cache: Shaped[Tensor, "*batch row"]) -> Shaped[Tensor, "*batch row"]:
    """Returns a cache of codes as bytes, as a view."""
    return cache.view(torch.uint8) if cache.dtype in LARGEST else cache


# Checks of the values of a plan. A captured program has the values only at the run.


def check_plan(
    cache: Tensor, slots: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor, window: int | None,
    tree: Tensor | None, rows: Tensor | None,
) -> None:  # fmt: skip
    """Raises ValueError with the first token where slot, position, sequence, block, guess or row is out of range."""
    blocks, block = cache.shape[0], cache.shape[3]
    width = tables.shape[1]
    for name, x, count, of in (
        ("slots", slots, blocks * block, f"cache has {blocks} blocks of {block} tokens"),
        ("sequences", sequences, len(tables), f"tables has {len(tables)} sequences"),
        ("positions", positions, width * block, f"tables has {width} blocks of {block} tokens a sequence"),
        ("rows", slots[:0] if rows is None else rows, len(slots), f"the call has {len(slots)} tokens"),
    ):
        wrong = (x < 0) | (x >= count)
        if wrong.any():
            i = int(wrong.nonzero()[0])
            raise ValueError(f"{name}[{i}] is {int(x[i])}, must be from 0 to {count - 1}: {of}")
    if tree is not None:
        _check_tree(positions, sequences, tree)
    _check_tables(blocks, block, positions, sequences, tables, window, tree)


def _count_guesses(tree: Tensor) -> Tensor:
    """Returns how many of each token's last visible positions have the keys of guesses, int64 [T]."""
    return (tree != 0).sum(1)


def _check_tables(
    blocks: int, block: int, positions: Tensor, sequences: Tensor, tables: Tensor, window: int | None,
    tree: Tensor | None,
) -> None:  # fmt: skip
    end = positions + 1 if tree is None else positions + 1 - _count_guesses(tree)
    begin = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
    index = torch.arange(tables.shape[1], device=tables.device)
    read = (index >= (begin // block)[:, None]) & (index * block < end[:, None])
    rows = tables[sequences.long()]
    wrong = (read & ((rows < 0) | (rows >= blocks))).nonzero()
    if len(wrong):
        i, b = wrong[0].tolist()
        s = int(sequences[i])
        raise ValueError(
            f"tables[{s}, {b}] must be from 0 to {blocks - 1}, as cache has {blocks} blocks, got {int(tables[s, b])}"
            f" for token {i} at position {int(positions[i])}"
        )


def _check_tree(positions: Tensor, sequences: Tensor, tree: Tensor) -> None:
    for i in (tree != 0).any(1).nonzero().flatten().tolist():
        tokens = tree[i].nonzero().flatten()
        end, s, found = int(positions[i]) + 1, int(sequences[i]), positions[tokens].tolist()
        if (
            int(tokens[-1]) != i
            or found != list(range(end - len(found), end))
            or not bool((sequences[tokens] == s).all())
        ):
            raise ValueError(
                f"tree[{i}] has tokens {tokens.tolist()} of sequences {sequences[tokens].tolist()} at positions "
                f"{found}. Must be tokens of sequence {s} at consecutive positions up to {end - 1}, token {i} the last"
            )


# The definition.


def _attend_by_torch(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor,
    scale: float, window: int | None, softcap: float | None, slopes: Tensor | None, sinks: Tensor | None,
    tree: Tensor | None, rows: Tensor | None, relative: Tensor | None, images: Tensor | None, branch: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns [R, H, K] and [R, H] of R queries. Writes the cache [blocks, parts, G, block, row]."""
    check_plan(cache, slots, positions, sequences, tables, window, tree, rows)
    write_cache(k, v, cache, slots)
    (R, H, K), G = q.shape, k.shape[1]
    slope, sink = (None if x is None else x.view(G, H // G) for x in (slopes, sinks))
    block = cache.shape[3]
    places = find_slots(block, slots, positions, sequences, tables, window, tree, images, branch)
    if rows is not None:
        places, positions = places[rows.long()], positions[rows.long()]
    by_place, q = view_rows(cache), q.reshape(R, G, H // G, K)
    state = _start_state(q, sink)
    for begin in range(0, places.shape[1], TILE):
        at = places[:, begin : begin + TILE]
        slot = at.clamp(min=0)
        found = by_place[slot // block, :, :, slot % block]
        kv_RN2GK = decode_rows(found, K, cache.dtype) if cache.dtype in LARGEST else found.to(q.dtype)
        x = _compute_scores(q, kv_RN2GK[:, :, 0], scale, softcap)
        if slope is not None:
            p = torch.arange(begin, begin + TILE, device=q.device)
            x = multiply_add(-slope[..., None], (positions[:, None] - p).to(q.dtype)[:, None, None], x)
        if relative is not None:
            p = torch.arange(begin, begin + TILE, device=q.device)
            away = (positions[:, None] - p).clamp(0, relative.shape[1] - 1).long()
            x = x + relative[:, away].movedim(0, 1).reshape(R, G, H // G, TILE)
        state = _add_tile(state, x, kv_RN2GK[:, :, -1], at >= 0)
    most, lanes, y = state
    total = sum_halves(lanes)
    y = torch.where(total[..., None] == 0, 0.0, y / total[..., None])
    return y.view(R, H, K), (most + total.log()).view(R, H)


def write_cache(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Writes each token's key and value at the token's slot. The last token with a slot is kept."""
    index, order = slots.long(), torch.arange(len(slots), device=slots.device)
    last = order.new_full((cache.shape[0] * cache.shape[3],), -1).scatter_reduce(0, index, order, "amax")
    kept = last[index] == order
    rows = torch.stack([k, v][: cache.shape[1]], 1)[kept]
    rows = encode_rows(rows, cache.dtype) if cache.dtype in LARGEST else rows.to(cache.dtype)
    block = cache.shape[3]
    view_rows(cache)[index[kept] // block, :, :, index[kept] % block] = rows


def find_slots(
    block: int, slots: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor, window: int | None,
    tree: Tensor | None, images: Tensor | None, branch: int,
) -> Tensor:  # fmt: skip
    """Returns the slots of the visible keys of tokens, by position, int64 [T, whole tiles]. -1 means no key."""
    whole = images if BRANCHES[branch] == "whole" else None
    most = tables.shape[1] * block if whole is not None else int(positions.max()) + 1 if len(positions) else 0
    p, mine = torch.arange(-(-most // TILE) * TILE, device=slots.device), positions[:, None].long()
    seen = p <= mine
    if window is not None:
        seen &= p > mine - window
    if whole is not None:
        seen |= _see_image(p, mine, whole[sequences.long()])
    elif images is not None:
        seen &= _see_kinds(p, mine, images[sequences.long()], BRANCHES[branch])
    blocks = tables[sequences.long()].long()
    at = blocks[:, (p // block).clamp(max=max(blocks.shape[1] - 1, 0))] * block + p % block
    if tree is not None:
        seen_token = (tree != 0).nonzero()
        i, j = seen_token.unbind(1)
        at[i, positions[j].long()] = slots[j].long()
    return torch.where(seen, at, -1)


def _see_image(p: Tensor, mine: Tensor, words: Tensor) -> Tensor:
    """Returns the positions of the image that a token is of, bool [T, N]."""
    of_image = (words[:, p // TILE] >> (p % TILE) & 1) > 0
    edges = of_image != torch.nn.functional.pad(of_image, (1, 0))[:, :-1]
    run = edges.cumsum(1)
    return of_image & of_image.gather(1, mine) & (run == run.gather(1, mine))


def _see_kinds(p: Tensor, mine: Tensor, words: Tensor, branch: str) -> Tensor:
    """Returns the positions that tokens see by their kind, bool [T, N]."""
    of_image = (words[:, p // TILE] >> (p % TILE) & 1) > 0
    row = of_image.gather(1, mine)
    if branch == "images":
        return torch.where(row, p == mine, of_image)
    return ~of_image if branch == "text_of_all" else ~of_image & ~row


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
        total = multiply_add(q[..., j, :], k[..., j, :], total)
    x = sum_halves(total)
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
        more = multiply_add(weights[..., n, None], v_TNGK[:, n, :, None], values)
        values = torch.where(seen[:, n, None, None, None], more, values)
    fresh = (
        new,
        multiply_add(lanes, factor, weights[..., :LANES] + weights[..., LANES:]),
        multiply_add(y, factor, values),
    )
    any_seen = seen.any(1)[:, None, None]
    return (
        torch.where(any_seen, fresh[0], most),
        torch.where(any_seen[..., None], fresh[1], lanes),
        torch.where(any_seen[..., None], fresh[2], y),
    )


def tanh(x: Tensor) -> Tensor:
    """Returns the hyperbolic tangent: a polynomial near 0, else by e^(-2 |x|)."""
    square, e = x * x, exponential(-2 * x.abs())
    near = _wide_near(x, square) if x.dtype == torch.float64 else multiply_add(polynomial(TANH, square) * square, x, x)
    return torch.where(x.abs() < SMALL, near, torch.copysign((1 - e) / (1 + e), x))


def _wide_near(x: Tensor, square: Tensor) -> Tensor:
    """Returns the quotient of the series of sinh and cosh."""
    sinh, cosh = torch.ones_like(x), torch.ones_like(x)
    for i in range(2 * WIDE_TERMS - 1, 0, -2):
        cosh = 1 + cosh * square * (1 / (i * (i + 1)))
        sinh = 1 + sinh * square * (1 / ((i + 1) * (i + 2)))
    return x * sinh / cosh


# In C++.


def _attend_natively(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor,
    scale: float, window: int | None, softcap: float | None, slopes: Tensor | None, sinks: Tensor | None,
    tree: Tensor | None, rows: Tensor | None, relative: Tensor | None, images: Tensor | None, branch: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    R, H, K = q.shape
    q, k, v = (x if x.stride()[1:] == (K, 1) else x.contiguous() for x in (q, k, v))
    given = slopes, sinks, tree, rows, relative, images
    slopes, sinks, tree, rows, relative, images = (None if x is None else x.contiguous() for x in given)
    slots, positions, sequences, tables = (x.contiguous() for x in (slots, positions, sequences, tables))
    plan = slots, positions, sequences, tables
    y, lse = q.new_empty(R, H, K), q.new_empty(R, H)
    scores = scale, window, softcap, slopes, sinks, tree, rows, relative, images, branch
    run = function(_SOURCE, "ragged_attention", "p" * 16 + "i" * 18 + "ff" + "ii", returns=True)
    if run(*addresses(_list_arguments(q, k, v, cache, *plan, *scores, y, lse))):
        check_plan(cache, *plan, window, tree, rows)
        raise AssertionError("C++ refused a plan that is in range")
    return y, lse


def _make_call(arguments: Sequence[Any], results: Sequence[Tensor]) -> KernelCall | None:
    q, k, v, cache, *plan, _, window, _, slopes, sinks, tree, rows, relative, images, _ = arguments
    if not are_dense(q, k, v, slopes, sinks, relative) or not all(
        x is None or x.is_contiguous() for x in (cache, *plan, tree, rows, images)
    ):
        return None
    check = check_plan, (cache, *plan, window, tree, rows)
    return KernelCall(_SOURCE, "ragged_attention", _list_arguments(*arguments, *results), check)


def _list_arguments(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor,
    scale: float, window: int | None, softcap: float | None, slopes: Tensor | None, sinks: Tensor | None,
    tree: Tensor | None, rows: Tensor | None, relative: Tensor | None, images: Tensor | None, branch: int,
    y: Tensor, lse: Tensor,
) -> Arguments:  # fmt: skip
    (R, H, K), (T, G) = q.shape, k.shape[:2]
    tensors = q, k, v, cache, slots, positions, sequences, tables, rows, slopes, sinks, tree, relative, images, y, lse
    blocks, reach = (cache.shape[0], cache.shape[3]), 0 if relative is None else relative.shape[1]
    sizes = *(T, R, H, G, K), *(x.stride(0) for x in (q, k, v)), *blocks, *tables.shape, reach
    scores = (scale, 0.0) if softcap is None else (scale / softcap, softcap)
    kinds = 0 if images is None else images.shape[1], branch, cache.shape[1]
    return *tensors, *sizes, window or 0, _KINDS[cache.dtype], *kinds, *scores, num_threads(), FEW


def _count_flops(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, *rest: Any) -> int:
    """Returns the operations, as if each token saw all places of the token's row of the tables."""
    del k, v
    return 4 * q.numel() * rest[3].shape[1] * cache.shape[3]


RAGGED_ATTENTION = KernelOp(
    schema="ragged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) cache, Tensor slots, Tensor positions,"
    " Tensor sequences, Tensor tables, float scale, int? window, float? softcap, Tensor? slopes, Tensor? sinks,"
    " Tensor? tree, Tensor? rows, Tensor? relative, Tensor? images, int branch) -> (Tensor, Tensor)",
    abstract=lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:2])),
    reference=_attend_by_torch,
    dtypes=EXACT,
    native=_attend_natively,
    source=_SOURCE,
    triton="_ragged_attention_triton.ragged_attention",
    fast_dtypes=(torch.float32,),
    contiguous=False,
    written_from=("k", "v", "cache", "slots"),
    no_derivative="call it on q.detach(), k.detach() and v.detach() or under torch.no_grad().",
    flops=_count_flops,
    chain=_make_call,
)
