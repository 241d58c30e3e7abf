"""Softmax attention.

B batch, T query tokens, S key tokens, H query heads, G key and value heads, K head dim, V head dim of values.
Vaswani et al., Attention Is All You Need, 2017, https://arxiv.org/abs/1706.03762
Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models, 2023, https://arxiv.org/abs/2305.13245
Gemma Team, Gemma 2, 2024, https://arxiv.org/abs/2408.00118 (softcap)
Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023, https://arxiv.org/abs/2309.17453
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from shardfn.collectives import run_one_operation
from shardfn.core import raise_all

from ._attention_backends import DENSE, AttentionBackend, Dense, shard_rows, whole_length
from ._dropout import PairDropout
from ._masks import Causal, Full, Mask
from ._online import OnlineScores


def attention(
    q_BTHK: Float[Tensor, "b t h k"],
    k_BSGK: Float[Tensor, "b s g k"],
    v_BSGV: Float[Tensor, "b s g v"],
    *,
    causal: bool | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    slopes_H: Float[Tensor, " h"] | None = None,
    sinks_H: Float[Tensor, " h"] | None = None,
    softcap: float | None = None,
    impl: AttentionBackend = DENSE,
) -> Float[Tensor, "b t h v"]:
    """Returns softmax(scale q k^T + mask) v. Query head h reads key head h // (H / G). A query without keys gives 0.

    Args:
        q_BTHK: queries. Where `impl` cuts the sequence, the rank's queries.
        k_BSGK: keys, where G divides H, for example 8 and 32.
        v_BSGV: values. Heads may have another width, such as in latent attention.
        causal: token t attends to tokens s <= t: True is `mask=Causal()`, False `mask=Full()`. Default True.
        mask: mask in place of `causal`: the counted pairs of the whole sequence. Dropout too: `Causal() &
            PairDropout(...)`.
        scale: default 1 / sqrt(K).
        slopes_H: slopes of ALiBi, from `alibi_slopes`: the score of a key at distance d is lowered by slope * d. The
            mask must look back only.
        sinks_H: attention sinks: the score of an additional key of each head, with the value 0. The probability of the
            sink is missing from the other keys.
        softcap: bound c above 0: scores are c tanh(scale q k^T / c), before masks and slopes, as in Gemma 2. None: no
            bound.
        impl: `Dense()`, `Blockwise()`, `BlockSparse()`, `Ulysses(axis, length)` or `Ring(axis, length)`. All give the
            same values.

    Raises:
        ValueError: G does not divide H, masks of other numbers of tokens or heads, slopes with a mask that looks ahead,
            sinks with `Chunked()`, a softcap with `BlockSparse()` or not above 0, tokens other than the rank's part of
            the sequence, or dropout of other numbers of samples.

    Example:
        >>> import torch
        >>> q, kv = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
        >>> attention(q, kv, kv).shape
        torch.Size([2, 5, 4, 8])
        >>> from shardfn.nn import Blockwise, Causal, Window
        >>> y = attention(q, kv, kv, mask=Causal() & Window(2), impl=Blockwise(4))
        >>> torch.allclose(y, attention(q, kv, kv, mask=Window(2)), atol=1e-6)
        True
    """
    (T, H), (S, G) = q_BTHK.shape[1:3], k_BSGK.shape[1:3]
    if H % max(G, 1):
        raise ValueError(f"attention: the number of key heads must divide the number of query heads, got {G} and {H}.")
    if mask is not None and causal is not None:
        raise ValueError(
            f"attention: expected causal or mask, got both causal={causal} and mask={mask}."
            " Write both in the mask, as Causal() & mask."
        )
    if mask is None:
        mask = Full() if causal is False else Causal()
    if slopes_H is not None and not mask.looks_back:
        raise ValueError("attention with slopes_H must look back only, since a distance has no sign. Use causal.")
    length = whole_length(impl, T)
    shard_rows(impl, T)
    if S != T and length != T:
        raise ValueError(
            f"attention: {T} queries and {S} keys on a rank of a sequence of {length}: both numbers must be equal."
        )
    raise_all(ValueError, f"attention with {mask}:", mask.problems(length, S if S != T else length, H))
    _check_samples(mask, q_BTHK.shape[0])
    K, V = q_BTHK.shape[-1], v_BSGV.shape[-1]
    if softcap is not None and not softcap > 0:
        raise ValueError(f"attention: softcap={softcap} must be above 0, or None.")
    how = OnlineScores(mask, scale, slopes_H, sinks_H, softcap)
    if K == V or isinstance(impl, Dense):
        return _run_body(impl, q_BTHK, k_BSGK, v_BSGV, how, length)
    # Zeros add nothing to scores, and only cut-off columns to results.
    q_BTHK, k_BSGK, v_BSGV = (F.pad(x, (0, max(K, V) - x.shape[-1])) for x in (q_BTHK, k_BSGK, v_BSGV))
    how = how._replace(scale=K**-0.5 if scale is None else scale)
    return _run_body(impl, q_BTHK, k_BSGK, v_BSGV, how, length)[..., :V]


def _run_body(
    impl: AttentionBackend, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, how: OnlineScores, length: int
) -> Tensor:
    """Runs attention by a body.

    On a cut sequence ranks run different operations, so the call is followed as a whole.
    """
    if not impl.axes:
        return impl.attend(q_BTHK, k_BSGK, v_BSGV, how, length)

    def attend_whole(q: Tensor, k: Tensor, v: Tensor, slopes_H: Tensor | None, sinks_H: Tensor | None) -> Tensor:
        return impl.attend(q, k, v, how._replace(slopes_H=slopes_H, sinks_H=sinks_H), length)

    return run_one_operation(attend_whole, q_BTHK, k_BSGK, v_BSGV, how.slopes_H, how.sinks_H, along=impl.axes)


def _check_samples(mask: Mask, num: int) -> None:
    wrong = [len(m.index_B) for m in mask.parts if isinstance(m, PairDropout) and len(m.index_B) != num]
    if wrong:
        raise ValueError(
            f"attention: PairDropout numbers {wrong[0]} samples, and the queries are of {num}. index_B must have"
            " the global number of each sample of this rank."
        )


def alibi_slopes(num_heads: int) -> list[float]:
    """Returns ALiBi's slopes: 2^(-8 i / n), i = 1 .. n, for n a power of two.

    For other n the slopes of the largest power of two c below n, and then every second slope of 2 c. For example 6
    heads have the 4 slopes of 4 heads and 2 slopes of 8 heads.

    Args:
        num_heads: n.

    Example:
        >>> alibi_slopes(3)
        [0.0625, 0.00390625, 0.25]

    References:
        Press et al., Train Short, Test Long, 2021, https://arxiv.org/abs/2108.12409
    """
    c = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / c) for i in range(1, c + 1)]
    return slopes if c == num_heads else slopes + alibi_slopes(2 * c)[: 2 * (num_heads - c) : 2]
