"""Softmax attention.

B batch, T query tokens, S key tokens, H query heads, G key and value heads, K head dim.
Vaswani et al., Attention Is All You Need, 2017, https://arxiv.org/abs/1706.03762
Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models, 2023, https://arxiv.org/abs/2305.13245
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def attention(
    q_BTHK: Float[Tensor, "b t h k"],
    k_BSGK: Float[Tensor, "b s g k"],
    v_BSGK: Float[Tensor, "b s g k"],
    *,
    causal: bool = True,
    scale: float | None = None,
    slopes_H: Float[Tensor, " h"] | None = None,
) -> Float[Tensor, "b t h k"]:
    """softmax(scale q k^T + mask) v; query head h reads key head h // (H / G).

    Args:
        q_BTHK: queries.
        k_BSGK: keys; G divides H.
        v_BSGK: values.
        causal: token t attends to tokens s <= t.
        scale: default 1 / sqrt(K).
        slopes_H: ALiBi: the score of a key at distance d is lowered by slope * d; from `alibi_slopes`. Needs `causal`.

    Raises:
        ValueError: G does not divide H, causal with T != S, or slopes without causal.

    Example:
        >>> import torch
        >>> q, kv = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
        >>> attention(q, kv, kv).shape
        torch.Size([2, 5, 4, 8])
    """
    (T, H), (S, G) = q_BTHK.shape[1:3], k_BSGK.shape[1:3]
    if H % max(G, 1):
        raise ValueError(f"attention: {H} query heads over {G} key heads; the latter must divide the former.")
    if causal and T != S:
        raise ValueError(f"causal attention of {T} queries over {S} keys: the counts must agree; use causal=False.")
    if slopes_H is not None and not causal:
        raise ValueError("attention with slopes_H looks back only, since a distance has no sign; use causal.")
    bias = None if slopes_H is None else _alibi(slopes_H, T).to(q_BTHK.dtype)
    q_BHTK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    mask = {"is_causal": causal} if bias is None else {"attn_mask": bias}
    y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, scale=scale, enable_gqa=H != G, **mask)
    return y_BHTK.transpose(1, 2)


def alibi_slopes(num_heads: int) -> list[float]:
    """ALiBi's slopes: 2^(-8 i / n), i = 1 .. n, for n a power of two.

    For other n those of the largest power of two c below it, and then every other one of those of 2 c.

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


def _alibi(slopes_H: Tensor, T: int) -> Tensor:
    """[H, T, T]: -slope * distance, and -inf for what is to come. In the dtype of the slopes: 16 bits would round."""
    at = torch.arange(T, device=slopes_H.device)
    distance_TS = at[:, None] - at
    return (-slopes_H[:, None, None] * distance_TS).masked_fill(distance_TS < 0, -math.inf)
