"""Arithmetic of experts as torch ops with a derivative, for graphs of a forward that are differentiated later.

    copied_rows(x, index, back)                       gather_rows(x, index), with the transpose gather_rows(g, back)
    combined_rows(y, weights, source, places)         gather_rows(y, places, weights)
    multiplied_rows(x, w, counts, transposed, exact)  grouped_product

`nn.moe` has the same as functions with derivatives of any order, under every transform of torch.func. Here a backward
is not differentiated again.
"""

from typing import Any

import torch
from torch import Tensor

from . import _gather_rows as gather
from ._grouped_product import GROUPED_PRODUCT, grouped_outer, grouped_product
from ._op import LIBRARY, DimLabels, KernelOp


def combined_to_rows(x: Tensor, weights: Tensor, source: Tensor, places: Tensor) -> Tensor:
    """Returns the transpose of `combined_rows` in its rows.

    Each row is the token's row of `x` times the weight of the choice.

    Args:
        x: rows of tokens.
        weights: weights of the choices.
        source: token of each row, or -1 in the tail.
        places: the row of each choice, or -1 for a choice without a row.

    Example:
        >>> x, source, places = torch.tensor([[2.0], [3.0]]), torch.tensor([1, 0, -1]), torch.tensor([[1], [0]])
        >>> combined_to_rows(x, torch.tensor([[0.5], [1.0]]), source, places).T
        tensor([[3., 1., 0.]])
    """
    token = source.clamp(min=0)
    if not places.shape[0]:
        return gather.gather_rows(x, source[:, None])
    own = places[token] == torch.arange(len(source), device=source.device)[:, None]
    factors = torch.where(own, weights[token], 0).sum(1, keepdim=True)  # at most a single choice of a token has the row
    return gather.gather_rows(x, source[:, None], factors)


COPIED_ROWS = KernelOp(
    schema="copied_rows(Tensor x, Tensor index, Tensor back) -> Tensor",
    abstract=lambda x, index, back: x.new_empty(index.shape[0], x.shape[1]),
    reference=lambda x, index, back: gather.GATHER_ROWS.run(x, index, None),
    scratch=lambda x, index, back: gather.count_gather_scratch(x, index, None),
    sharding=DimLabels(".d,..,..->.d", linear=(0,)),
)
COMBINED_ROWS = KernelOp(
    schema="combined_rows(Tensor y, Tensor weights, Tensor source, Tensor places) -> Tensor",
    abstract=lambda y, weights, source, places: y.new_empty(places.shape[0], y.shape[1]),
    reference=lambda y, weights, source, places: gather.GATHER_ROWS.run(y, places, weights),
    scratch=lambda y, weights, source, places: gather.count_gather_scratch(y, places, weights),
    sharding=DimLabels(".d,..,.,..->.d", linear=(0, 1)),
)
MULTIPLIED_ROWS = KernelOp(
    schema="multiplied_rows(Tensor x, Tensor w, Tensor counts, bool transposed, bool exact) -> Tensor",
    abstract=GROUPED_PRODUCT.abstract,
    reference=GROUPED_PRODUCT.run,
    contiguous=False,
    flops=GROUPED_PRODUCT.flops,
    scratch=GROUPED_PRODUCT.scratch,
    sharding=GROUPED_PRODUCT.sharding,
)


def _keep_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.rest = [x for x in inputs if not isinstance(x, Tensor)]


def _copy_backward(ctx: Any, g: Tensor) -> Any:
    _, index, back = ctx.saved_tensors
    return COPIED_ROWS(g, back, index), None, None


def _combine_backward(ctx: Any, g: Tensor) -> Any:
    y, weights, source, places = ctx.saved_tensors
    wants = ctx.needs_input_grad
    of_y = combined_to_rows(g, weights, source, places).to(y.dtype) if wants[0] else None
    return of_y, gather.row_dots(y, g, places).to(weights.dtype) if wants[1] else None, None, None


def _multiply_backward(ctx: Any, g: Tensor) -> Any:
    (x, w, counts), transposed, wants = ctx.saved_tensors, ctx.rest[0], ctx.needs_input_grad
    of_x = grouped_product(g, w, counts, transposed=not transposed) if wants[0] else None
    of_w = (grouped_outer(g, x, counts) if transposed else grouped_outer(x, g, counts)) if wants[1] else None
    return of_x, of_w, None, None, None


for _kernel, _backward in (
    (COPIED_ROWS, _copy_backward),
    (COMBINED_ROWS, _combine_backward),
    (MULTIPLIED_ROWS, _multiply_backward),
):
    torch.library.register_autograd(
        f"shardfn_kernels::{_kernel.name}", _backward, setup_context=_keep_inputs, lib=LIBRARY
    )
