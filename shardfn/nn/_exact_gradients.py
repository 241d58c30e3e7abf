"""The gradients of exact linear layers.

On a CPU kernels compute the gradients, with the widest vectors, unlike some BLAS libraries. On other devices torch
computes the gradients. A row of the gradient of the input has the same bits next to any other rows. The gradient of the
weight is a sum over rows.
"""

import functools

import torch
from torch import Tensor

from shardfn import kernels

from ._products import OperandGrad, linear_input, linear_weight
from ._trilinear import Trilinear, derivative


@functools.cache
def exact_gradients(chunks: int) -> tuple[OperandGrad, OperandGrad]:
    """Returns the gradients of the input and of the weight of an exact linear layer, both differentiable again.

    Args:
        chunks: chunks of the layer's inputs.
    """
    # t(x, w, y) = sum over rows of (x w^T) . y
    form: Trilinear = (
        lambda w, y: kernels.grouped_product(y, w[None], _count_rows(y)),
        lambda x, y: kernels.grouped_outer(y, x, _count_rows(y))[0],
        lambda x, w: kernels.row_linear(x, kernels.pack_rows(w), w.shape[0], chunks=chunks),
    )

    def input_gradient(dy: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        if dy.device.type != "cpu":
            return linear_input(dy, weight, shape)
        return derivative(form, 0, weight, dy.reshape(-1, dy.shape[-1])).reshape(shape)

    def weight_gradient(dy: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        if dy.device.type != "cpu":
            return linear_weight(dy, x, shape)
        return derivative(form, 1, x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]))

    return input_gradient, weight_gradient


def _count_rows(rows: Tensor) -> Tensor:
    return torch.full((1,), rows.shape[0], device=rows.device)
