"""Attention of ragged tokens over a paged KV cache. The cache first receives the tokens' keys and values.

T tokens, H heads, G key heads, K head dim, S sequences.
"""

import torch
from jaxtyping import Bool, Float, Int32, Shaped, UInt8
from torch import Tensor

from shardfn.kernels._arguments import check_dtype, check_exact, check_shape, check_written
from shardfn.kernels._chain import define_call
from shardfn.kernels._dispatch import implementation_of_rows
from shardfn.kernels._library import define, refuse_backward

from . import _native
from ._codes import LARGEST, cache_row

# The widest head.
WIDEST = 256
# By the dtype of keys.
_CACHES = {torch.float32: (torch.float32, torch.bfloat16, *LARGEST), torch.float64: (torch.float64,)}


def ragged_attention(
    q: Float[Tensor, "t h k"],
    k: Float[Tensor, "t g k"],
    v: Float[Tensor, "t g k"],
    cache: Shaped[Tensor, "blocks 2 g block row"],
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
) -> tuple[Float[Tensor, "t h k"], Float[Tensor, "t h"]]:
    """Writes the keys and values of tokens into a KV cache, then returns each token's attention to its sequence.

        cache[slots[i] // block, :, :, slots[i] % block] = k[i], v[i]               for all tokens i, then
        s[p] = cap(scale q[i] k_p) - slope (positions[i] - p)                       cap(x) = c tanh(x / c)
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
            codes with a scale for each row, of `cache_row(K, dtype)` elements.
        slots: where each token is written, int32.
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
    _check_arguments(q, k, v, cache, {"slots": slots, "positions": positions, "sequences": sequences}, tables)
    T, H, K = q.shape
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
        check_shape("tree", tree, (T, T), "a bit for each two tokens")
    scale = K**-0.5 if scale is None else scale
    window = None if window is None else min(window, 1 << 30)
    plan = slots, positions, sequences, tables
    op = torch.ops.shardfn_kernels.ragged_attention
    return op(q, k, v, cache, *plan, scale, window, softcap, slopes, sinks, tree)


def _check_arguments(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, plan: dict[str, Tensor], tables: Tensor) -> None:
    check_exact("q", q)
    for name, x in (("k", k), ("v", v)):
        check_dtype(name, x, q.dtype)
    if cache.dtype not in _CACHES[q.dtype]:
        known = ", ".join(map(str, _CACHES[q.dtype]))
        raise TypeError(f"cache must be one of {known} for q of {q.dtype}, got {cache.dtype}")
    T, H, K = q.shape
    if not 1 <= K <= WIDEST:
        raise ValueError(f"heads of q must have from 1 to {WIDEST} elements, got q of shape {tuple(q.shape)}")
    G = cache.shape[2] if cache.ndim == 5 else 0
    like = "blocks, key and value, key heads, places of a block, cache_row(K, dtype)"
    check_shape("cache", cache, (cache.shape[0], 2, G, cache.shape[3], cache_row(K, cache.dtype)), like)
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


def _ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor,
    scale: float, window: int | None, softcap: float | None, slopes: Tensor | None, sinks: Tensor | None,
    tree: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    run = implementation_of_rows("ragged_attention", "ragged_attention", q)
    plan = (x.contiguous() for x in (slots, positions, sequences, tables))
    return run(q, k, v, cache, *plan, scale, window, softcap, slopes, sinks, tree)


define(
    "ragged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) cache, Tensor slots, Tensor positions, Tensor sequences,"
    " Tensor tables, float scale, int? window, float? softcap, Tensor? slopes, Tensor? sinks, Tensor? tree)"
    " -> (Tensor, Tensor)",
    _ragged_attention,
    lambda q, *rest: (q.new_empty(q.shape), q.new_empty(q.shape[:2])),
)
refuse_backward("ragged_attention", "call it on q.detach(), k.detach() and v.detach() or under torch.no_grad().")
define_call("shardfn_kernels::ragged_attention.default", _native.call)
