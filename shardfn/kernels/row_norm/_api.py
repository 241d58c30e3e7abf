"""Norms of rows, with the same bits in any batch and on any processor."""

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn.kernels._arguments import check_dtype, check_exact, check_shape
from shardfn.kernels._chain import define_call
from shardfn.kernels._dispatch import implementation_of_rows
from shardfn.kernels._library import define, map_rows, refuse_backward

from . import _native


def row_norm(
    x: Float[Tensor, "*rows d"],
    weight: Float[Tensor, " outputs"],
    bias: Float[Tensor, " shifts"] | None = None,
    *,
    eps: float = 1e-5,
    centered: bool,
) -> Float[Tensor, "*rows d"]:
    """Returns `(x - m) / sqrt(mean((x - m)^2) + eps) * weight + bias`, each row by the same fixed expression.

    m is 0, as in an RMS norm, or with `centered` the mean, as in a layer norm. A sum over D is of 64 lanes: lane j adds
    the elements j, j + 64, ... in order, squares by fused multiply-adds, and the lanes are added by halving. The
    product with the weight and the bias are a fused multiply-add. So a row has the same bits next to any other rows, on
    any number of threads, and on any processor. For a derivative take `nn.batch_invariant_rms_norm` or
    `nn.batch_invariant_layer_norm`.

    Args:
        x: input in float32, or float64 by two roundings for each multiply-add, with any leading dims.
        weight: [D], in the dtype of x.
        bias: bias [D] in the dtype of x, or None.
        eps: added to the mean square.
        centered: whether the mean is subtracted.

    Raises:
        TypeError: for other dtypes.
        ValueError: shapes do not fit.
        NotImplementedError: in a backward.

    Example:
        >>> row_norm(torch.tensor([[2.0, -2.0], [1.0, 3.0]]), torch.ones(2), eps=0.0, centered=True)
        tensor([[ 1., -1.],
                [-1.,  1.]])
    """
    check_exact("x", x)
    for name, w in (("weight", weight), ("bias", bias)):
        if w is not None:
            check_dtype(name, w, x.dtype)
            check_shape(name, w, (x.shape[-1],), "one for each element of a row of x")
    return torch.ops.shardfn_kernels.row_norm(x, weight, bias, float(eps), centered)


def _row_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    bias = None if bias is None else bias.contiguous()
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    run = implementation_of_rows("row_norm", "row_norm", x)
    return run(rows, weight.contiguous(), bias, eps, centered).view(x.shape)


define(
    "row_norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool centered) -> Tensor",
    _row_norm,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
map_rows("row_norm", 1)
refuse_backward(
    "row_norm", "use nn.batch_invariant_rms_norm or nn.batch_invariant_layer_norm, or detach its arguments."
)
define_call("shardfn_kernels::row_norm.default", _native.call)
