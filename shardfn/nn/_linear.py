"""Linear maps and table look-up.

B batch, T tokens, D features in, F features out, V vocabulary.
"""

import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor


def linear(
    x_D: Float[Tensor, "*batch d"], w_FD: Float[Tensor, "f d"], b_F: Float[Tensor, " f"] | None = None
) -> Float[Tensor, "*batch f"]:
    """The affine map y = x w^T + b, with the weight as [out, in].

    Args:
        x_D: any leading dims.
        w_FD: weight.
        b_F: bias, or None.

    Returns:
        The leading dims of `x_D` and F.

    Example:
        >>> import torch
        >>> linear(torch.ones(2, 3), torch.ones(4, 3)).shape
        torch.Size([2, 4])
    """
    return F.linear(x_D, w_FD, b_F)


def embedding(tokens: Int64[Tensor, "*batch"], w_VD: Float[Tensor, "v d"]) -> Float[Tensor, "*batch d"]:
    """Row `tokens[...]` of the table.

    Args:
        tokens: indices in [0, V), any shape.
        w_VD: the table.

    Returns:
        The shape of `tokens` and D.

    Raises:
        IndexError: a token is outside the table (on CPU; CUDA asserts on the device).

    Example:
        >>> import torch
        >>> embedding(torch.tensor([1, 0]), torch.tensor([[1.0], [2.0]])).tolist()
        [[2.0], [1.0]]
    """
    return F.embedding(tokens, w_VD)
