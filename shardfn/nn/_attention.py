"""Softmax attention.

B batch, T query tokens, S key tokens, H query heads, G key and value heads, K head dim.
Vaswani et al., Attention Is All You Need, 2017, https://arxiv.org/abs/1706.03762
Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models, 2023, https://arxiv.org/abs/2305.13245
"""

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
) -> Float[Tensor, "b t h k"]:
    """softmax(scale q k^T + mask) v; query head h reads key head h // (H / G).

    Args:
        q_BTHK: queries.
        k_BSGK: keys; G divides H.
        v_BSGK: values.
        causal: token t attends to tokens s <= t.
        scale: default 1 / sqrt(K).

    Raises:
        ValueError: G does not divide H, or causal with T != S.

    Example:
        >>> import torch
        >>> q, kv = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
        >>> attention(q, kv, kv).shape
        torch.Size([2, 5, 4, 8])
    """
    (T, H), (S, G) = q_BTHK.shape[1:3], k_BSGK.shape[1:3]
    if H % G:
        raise ValueError(f"attention: {H} query heads over {G} key heads; the latter must divide the former.")
    if causal and T != S:
        raise ValueError(f"causal attention of {T} queries over {S} keys: the counts must agree; use causal=False.")
    q_BHTK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, is_causal=causal, scale=scale, enable_gqa=H != G)
    return y_BHTK.transpose(1, 2)
