"""Rotary tables with the same numbers on every processor, from only additions and multiplications.

T tokens, K head dim.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

# pi / 2 in two parts. Products of the first and a whole number below 2^20 are exact.
_HIGH, _LOW = 1.5707963267341256, 6.077100506506192e-11
_MAGIC = 6755399441055744.0  # 1.5 * 2^52: added numbers are rounded to whole numbers, ties to even
_TERMS = 9


def batch_invariant_rope_table(
    positions_T: Int64[Tensor, " t"], head_dim: int, *, base: float = 10000.0, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "t k"], Float[Tensor, "t k"]]:
    """Returns `rope_table` with the same numbers on every processor: a row depends only on the row's position.

    In float64, powers of the base come from the C library, and may differ in the last bit from another library.

    Args:
        positions_T: global positions of the tokens.
        head_dim: K, even.
        base: the longest wave is 2 pi base tokens.
        dtype: float32 or float64.

    Returns:
        cos_TK and sin_TK, for `rope`.

    Raises:
        ValueError: `head_dim` is odd.

    Example:
        >>> cos_TK, sin_TK = batch_invariant_rope_table(torch.arange(3), 4)
        >>> cos_TK[0].tolist(), sin_TK[0].tolist()
        ([1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0])
    """
    if head_dim % 2:
        raise ValueError(
            f"batch_invariant_rope_table(head_dim={head_dim}): rotation pairs dims, so the head dim must be even."
        )
    powers = [base ** -(i / head_dim) for i in range(0, head_dim, 2)]
    inverse = torch.tensor(powers, dtype=dtype, device=positions_T.device)
    x = (positions_T.to(dtype)[:, None] * inverse).double()
    quarters = (x * (1 / (_HIGH + _LOW)) + _MAGIC) - _MAGIC
    r = (x - quarters * _HIGH) - quarters * _LOW
    square, near_cos, near_sin = r * r, torch.ones_like(r), torch.ones_like(r)
    for i in range(2 * _TERMS - 1, 0, -2):
        near_cos = 1 - near_cos * square * (1 / (i * (i + 1)))
        near_sin = 1 - near_sin * square * (1 / ((i + 1) * (i + 2)))
    near_sin = near_sin * r
    quarter = quarters.to(torch.int64) & 3
    swapped = quarter % 2 == 1
    cos, sin = torch.where(swapped, near_sin, near_cos), torch.where(swapped, near_cos, near_sin)
    cos = torch.where((quarter == 1) | (quarter == 2), -cos, cos)
    sin = torch.where(quarter >= 2, -sin, sin)
    return cos.to(dtype).repeat(1, 2), sin.to(dtype).repeat(1, 2)
