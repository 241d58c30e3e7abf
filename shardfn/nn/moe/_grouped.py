"""Linear layers of experts: each group of rows times a separate matrix, with derivatives of any order."""

import functools

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from shardfn.kernels import grouped_outer, grouped_product
from shardfn.nn._as_ops import run_op, runs_as_ops
from shardfn.nn._products import Product
from shardfn.nn._trilinear import Trilinear, derivative


def grouped(
    x: Float[Tensor, "rows k"],
    w: Float[Tensor, "e inputs outputs"],
    counts: Int64[Tensor, " e"],
    transposed: bool = False,
    *,
    batch_invariant: bool = False,
) -> Float[Tensor, "rows n"]:
    """Returns the rows of each expert times the expert's matrix, and exact zeros in rows past the sum of the counts.

    An expert may have no row, and no size has to divide anything: counts [3, 0, 4] are fine, for example. Rows of the
    tail are not read, forward or backward, so NaNs in the tail reach no gradient. Where a pipeline's schedule splits
    backwards, the gradients of `x` and of `w` are computed separately, as for torch's products.

    Args:
        x: rows in the order of experts, as from `dispatch`.
        w: a matrix [k, n] for each expert, in the dtype of `x`.
        counts: the rows of each expert.
        transposed: whether `w` has matrices [n, k], as in Hugging Face's experts.
        batch_invariant: whether each row of the forward has the bits of `kernels.row_linear` on any device, for float32
            or float64.

    Raises:
        TypeError: dtypes differ or are not floating point.
        ValueError: shapes do not fit. On a CPU, the counts are no sizes of groups of the rows.

    Example:
        >>> import torch
        >>> x, w = torch.ones(3, 2), torch.ones(2, 2, 1, requires_grad=True)
        >>> grouped(x, w, torch.tensor([0, 2])).sum().backward()
        >>> w.grad.flatten()
        tensor([0., 0., 2., 2.])
    """
    form = FORMS[transposed, batch_invariant]
    if runs_as_ops():
        return run_op(torch.ops.shardfn_kernels.multiplied_rows, x, w, counts, transposed, batch_invariant)
    if has_torch_function((x, w)):  # a lazy leaf, or a mode for split backwards
        product = Product(
            lambda x, w: derivative(form, 2, x, w, counts),
            (
                lambda dy, w, shape: derivative(form, 0, w, dy, counts),
                lambda dy, x, shape: derivative(form, 1, x, dy, counts),
            ),
        )
        return handle_torch_function(product, (x, w), x, w)
    return derivative(form, 2, x, w, counts)


# t(x, w, y) = sum over rows of (x w[group]) . y, and the three derivatives.


def _gradient_of_x(w: Tensor, y: Tensor, counts: Tensor, *, transposed: bool) -> Tensor:
    return grouped_product(y, w, counts, transposed=not transposed)


def _gradient_of_w(x: Tensor, y: Tensor, counts: Tensor, *, transposed: bool) -> Tensor:
    return grouped_outer(y, x, counts) if transposed else grouped_outer(x, y, counts)


def _recompute_product(x: Tensor, w: Tensor, counts: Tensor, *, transposed: bool, batch_invariant: bool) -> Tensor:
    return grouped_product(x, w, counts, transposed=transposed, batch_invariant=batch_invariant)


def _make_form(transposed: bool, batch_invariant: bool) -> Trilinear:
    of_x, of_w = (functools.partial(f, transposed=transposed) for f in (_gradient_of_x, _gradient_of_w))
    return of_x, of_w, functools.partial(_recompute_product, transposed=transposed, batch_invariant=batch_invariant)


# By `transposed` and `batch_invariant`.
FORMS = {
    (transposed, batch_invariant): _make_form(transposed, batch_invariant)
    for transposed in (False, True)
    for batch_invariant in (False, True)
}
