"""Rotary position embedding in Llama's convention: dim k is rotated with dim k + K/2.

B batch, T tokens, H heads, K head dim.
Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021, https://arxiv.org/abs/2104.09864
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def rope_table(
    positions_T: Int64[Tensor, " t"], head_dim: int, *, base: float = 10000.0, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "t k"], Float[Tensor, "t k"]]:
    """Returns the cos and sin of position * base^(-2i / K), i = 0 .. K/2 - 1, both halves equal.

    Args:
        positions_T: global positions of the tokens.
        head_dim: K, even.
        base: the longest wave is 2 pi base tokens.
        dtype: dtype of the result. Angles are always formed in float32 or better.

    Returns:
        cos_TK and sin_TK, for `rope`.

    Raises:
        ValueError: `head_dim` is odd.

    Example:
        >>> cos_TK, sin_TK = rope_table(torch.arange(3), 4)
        >>> cos_TK.shape
        torch.Size([3, 4])
    """
    if head_dim % 2:
        raise ValueError(f"rope_table(head_dim={head_dim}): rotation pairs dims, so the head dim must be even.")
    work = torch.float64 if dtype == torch.float64 else torch.float32
    powers = torch.arange(0, head_dim, 2, dtype=work, device=positions_T.device) / head_dim
    angles_TK = torch.outer(positions_T.to(work), base**-powers).repeat(1, 2)
    return angles_TK.cos().to(dtype), angles_TK.sin().to(dtype)


def rope(
    x_BTHK: Float[Tensor, "b t h k"], cos_TK: Float[Tensor, "t k"], sin_TK: Float[Tensor, "t k"]
) -> Float[Tensor, "b t h k"]:
    """Rotates each pair (a, b) = (x_k, x_(k + K/2)) by the pair's angle: x cos + (-b, a) sin.

    So <rope(q)_s, rope(k)_t> depends on the positions only through s - t.

    Args:
        x_BTHK: queries or keys.
        cos_TK: cosines from `rope_table`.
        sin_TK: sines from `rope_table`.

    Example:
        >>> x_BTHK = torch.ones(1, 1, 1, 2)
        >>> torch.equal(rope(x_BTHK, *rope_table(torch.tensor([0]), 2)), x_BTHK)
        True
    """
    a, b = x_BTHK.chunk(2, dim=-1)
    return x_BTHK * cos_TK[:, None] + torch.cat((-b, a), dim=-1) * sin_TK[:, None]
