"""Norms of rows, with the same bits in any batch and on any processor."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ._arguments import check_dtype, check_shape, threads_for
from ._build import function
from ._chain import Arguments, KernelCall, addresses, are_dense
from ._fixed_bits import multiply_add, sum_halves
from ._op import EXACT, KernelOp

LANES = 64
# Elements up to which a second thread does not pay.
FEW = 1 << 18
_SOURCE = "_row_norm.cpp"


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
    ROW_NORM.check_dtype("x", x)
    for name, w in (("weight", weight), ("bias", bias)):
        if w is not None:
            check_dtype(name, w, x.dtype)
            check_shape(name, w, (x.shape[-1],), "one for each element of a row of x")
    return ROW_NORM(x, weight, bias, float(eps), centered)


# The definition. Each operation is rounded once.


def _norm_by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    d, shape = x.shape[-1], x.shape
    c = x = x.reshape(shape[:-1].numel(), d)
    if centered:
        c = x - (sum_halves(_sum_lanes(x)) / d)[:, None]
    square = sum_halves(_sum_squares(c)) / d + x.new_tensor(eps)
    # Numpy's roots are the numbers next to the true roots, but torch's not always.
    root = torch.from_numpy(np.sqrt(square.double().cpu().numpy())).to(square)
    y = c * (1 / root)[:, None]
    y = y * weight if bias is None else multiply_add(y, weight.expand_as(y), bias.expand_as(y))
    return y.view(shape)


def _sum_lanes(x: Tensor) -> Tensor:
    """Returns the sums of the lanes, [r, 64]."""
    total = x.new_zeros(x.shape[0], LANES)
    for part in _split_parts(x):
        total = total + part
    return total


def _sum_squares(x: Tensor) -> Tensor:
    """Returns the sums of the lanes' squares, [r, 64]."""
    total = x.new_zeros(x.shape[0], LANES)
    for part in _split_parts(x):
        total = multiply_add(part, part, total)
    return total


def _split_parts(x: Tensor) -> tuple[Tensor, ...]:
    return torch.nn.functional.pad(x, (0, -x.shape[1] % LANES)).unflatten(1, (-1, LANES)).unbind(1)


# In C++.


def _norm_natively(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    run = function(_SOURCE, "row_norm", "ppppfiiii")
    run(*addresses(_list_arguments(x, weight, bias, eps, centered, y)))
    return y


def _make_call(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    x, weight, bias, eps, centered = arguments
    given = _list_arguments(x, weight, bias, eps, centered, y)
    return KernelCall(_SOURCE, "row_norm", given) if are_dense(x, weight, bias) else None


def _list_arguments(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool, y: Tensor) -> Arguments:
    rows, d = x.shape[:-1].numel(), x.shape[-1]
    return x, weight, bias, y, eps, rows, d, centered, threads_for(x.numel(), FEW)


ROW_NORM = KernelOp(
    schema="row_norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool centered) -> Tensor",
    reference=_norm_by_torch,
    dtypes=EXACT,
    native=_norm_natively,
    source=_SOURCE,
    triton="_row_norm_triton.row_norm",
    fast_dtypes=(torch.float32,),
    no_derivative="use nn.batch_invariant_rms_norm or nn.batch_invariant_layer_norm, or detach its arguments.",
    mapped=1,
    chain=_make_call,
)
