"""Batch-invariant linear layers: a row's bits do not depend on the number of rows."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from shardfn.kernels._arguments import check_dtype, check_exact, check_shape
from shardfn.kernels._chain import define_call
from shardfn.kernels._dispatch import implementation_of_rows
from shardfn.kernels._library import LIBRARY, define, map_rows, refuse_backward

from . import _native
from ._codes import GROUP, PANEL, Quantization, pack_blocks, packed_shape, quantize_blocks

# Largest number of levels of the tree that adds up chunks.
LEVELS = 16
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float64)


def pack_rows(
    weight: Float[Tensor, "n k"], quantization: Quantization | None = None
) -> Shaped[Tensor, "panels inputs columns"]:
    """Returns a weight of `torch.nn.functional.linear` in the order in which `row_linear` reads weights.

    Args:
        weight: float32, bfloat16 or float64.
        quantization: codes "int8" or "int4", to which `quantize_blocks` rounds. None keeps the weight's dtype. A
            float64 weight is not rounded.

    Returns:
        Panels of 64 outputs, padded with zeros, in the weight's dtype, or the panels of `pack_blocks`. For example 100
        outputs make 2 panels.

    Raises:
        TypeError: for other dtypes, and float64 with codes.
        ValueError: for other codes.

    Example:
        >>> pack_rows(torch.ones(3, 5)).shape
        torch.Size([1, 5, 64])
        >>> pack_rows(torch.ones(3, 5), "int4").nbytes  # 20 for 32 inputs of each of 64 outputs
        1280
    """
    if weight.dtype not in _WEIGHTS:
        raise TypeError(f"weight must be {', '.join(map(str, _WEIGHTS))}, got {weight.dtype}. Convert the weight")
    if quantization is not None and weight.dtype == torch.float64:
        raise TypeError(
            f"weight is {weight.dtype}, with quantization={quantization!r}, which hold float32: pass weight.float()"
        )
    n, k = weight.shape
    if quantization is not None:
        padded = torch.nn.functional.pad(weight, (0, -k % GROUP))
        return pack_blocks(quantize_blocks(padded, quantization), padded.shape[1])
    rows = torch.nn.functional.pad(weight, (0, 0, 0, -n % PANEL))
    return rows.view(-(-n // PANEL), PANEL, k).transpose(1, 2).contiguous()


def row_linear(
    x: Float[Tensor, "*rows k"],
    packed: Shaped[Tensor, "panels inputs columns"],
    num: int,
    *,
    chunks: int = 8,
    bias: Float[Tensor, " outputs"] | None = None,
) -> Float[Tensor, "*rows num"]:
    """Returns `x @ weight.T + bias`, each element by the same fixed expression.

    K is cut in `chunks`. An element is a chain of fused multiply-adds over ascending k for each chunk, and the chains
    are added by a binary tree. So an element's bits depend only on the row of `x` and the row of the weight: neither on
    the number of rows, nor on threads, nor on the processor. Where `chunks` divides K, a rank with the neighbouring
    chunks of a node of the tree computes the node, for example 4 of 8 chunks on each of 2 ranks. Errors are about half
    as large as with a single chain. In float64, products are rounded before the addition, and the op is slow: for tests
    and small models. There is no derivative yet.

    Args:
        x: float32, or float64 with a weight in float64.
        packed: weight [num, k] from `pack_rows` or `pack_blocks`. bfloat16 is widened exactly, and codes are decoded in
            registers, so bits equal the bits with the float32 weight of `unpack_rows`.
        num: outputs.
        chunks: number of chunks of k. Chunk i has the elements from i k / chunks to (i + 1) k / chunks.
        bias: bias in the dtype of x, added last.

    Raises:
        TypeError: for other dtypes.
        ValueError: shapes do not fit, or `chunks` is below 1 or above 65535.
        NotImplementedError: in a backward.

    Example:
        >>> x, weight = torch.ones(2, 5), torch.arange(15.0).view(3, 5)
        >>> row_linear(x, pack_rows(weight), 3)
        tensor([[10., 35., 60.],
                [10., 35., 60.]])
    """
    _check_operands(x, packed, num, chunks, bias)
    return torch.ops.shardfn_kernels.row_linear(x, packed, num, chunks, bias)


def row_linears(
    x: Float[Tensor, "*rows k"],
    packed: Sequence[Shaped[Tensor, "panels inputs columns"]],
    nums: Sequence[int],
    *,
    chunks: int = 8,
    biases: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """Returns several layers of the same input: `[row_linear(x, w, n, bias=b) for w, n, b in ...]`, with equal bits.

    In a single call a layer's weights are fetched while another layer's weights are multiplied. Weights may be in
    different dtypes and codes.

    Args:
        x: as of `row_linear`.
        packed: the weights.
        nums: outputs of each.
        chunks: chunks of k, in all layers.
        biases: biases of each, or None.

    Raises:
        TypeError: for other dtypes.
        ValueError: the numbers of weights, outputs and biases differ, or as `row_linear`.
        NotImplementedError: in a backward.

    Example:
        >>> x, weight = torch.ones(1, 5), torch.arange(15.0).view(3, 5)
        >>> row_linears(x, [pack_rows(weight), pack_rows(weight[:1])], [3, 1])
        [tensor([[10., 35., 60.]]), tensor([[10.]])]
    """
    given = [None] * len(packed) if biases is None else list(biases)
    if not len(packed) == len(nums) == len(given):
        raise ValueError(
            f"{len(packed)} weights, {len(nums)} nums and {len(given)} biases. Each layer must have one of each"
        )
    for w, num, bias in zip(packed, nums, given, strict=True):
        _check_operands(x, w, num, chunks, bias)
    return torch.ops.shardfn_kernels.row_linears(x, list(packed), list(nums), chunks, given)


def _check_operands(x: Tensor, packed: Tensor, num: int, chunks: int, bias: Tensor | None) -> None:
    check_exact("x", x)
    if packed.dtype not in (*_WEIGHTS, torch.uint8):
        raise TypeError(f"packed is {packed.dtype}, must be from pack_rows")
    if torch.float64 in (x.dtype, packed.dtype) and x.dtype != packed.dtype:
        raise TypeError(
            f"float64 must be multiplied by float64, got x of {x.dtype} and packed of {packed.dtype}. Convert either"
        )
    want = packed_shape(packed, num, x.shape[-1])
    check_shape("packed", packed, want, f"panels of {num} outputs, of x's last dim")
    if not 1 <= chunks < 1 << LEVELS:
        raise ValueError(f"chunks must be from 1 to {(1 << LEVELS) - 1}, got {chunks}")
    if bias is not None:
        check_dtype("bias", bias, x.dtype)
        check_shape("bias", bias, (num,), "one for each output")


def _row_linear(x: Tensor, packed: Tensor, num: int, chunks: int, bias: Tensor | None) -> Tensor:
    return _row_linears(x, [packed], [num], chunks, [bias])[0]


def _row_linears(
    x: Tensor, packed: list[Tensor], nums: list[int], chunks: int, biases: list[Tensor | None]
) -> list[Tensor]:
    return implementation_of_rows("row_linear", "row_linears", x)(x, packed, nums, chunks, biases)


def _map_op(info: Any, in_dims: Any, x: Tensor, packed: Any, nums: Any, chunks: int, biases: Any) -> Any:
    """Applies the rule for vmap.

    A mapped dim of x joins the rows. With a mapped weight, each part has a separate call.
    """
    op, (of_x, of_packed, _, _, of_biases) = torch.ops.shardfn_kernels.row_linears, in_dims
    none = [None] * len(nums)
    of_packed, of_biases = of_packed or none, of_biases or none
    if of_packed == of_biases == none:
        return op(x.movedim(of_x, 0), packed, nums, chunks, biases), [0] * len(nums)

    def select_part(t: Any, dim: int | None, i: int) -> Any:
        return t if dim is None else t.select(dim, i)

    def call_op(i: int) -> list[Tensor]:
        own, added = (
            list(map(select_part, *pair, [i] * len(nums))) for pair in ((packed, of_packed), (biases, of_biases))
        )
        return op(select_part(x, of_x, i), own, nums, chunks, added)

    each = zip(*map(call_op, range(info.batch_size)), strict=True)
    return [torch.stack(ys) for ys in each], [0] * len(nums)


define(
    "row_linear(Tensor x, Tensor packed, int num, int chunks, Tensor? bias) -> Tensor",
    _row_linear,
    lambda x, packed, num, chunks, bias: x.new_empty(*x.shape[:-1], num),
)
map_rows("row_linear", 1)
refuse_backward(
    "row_linear", "call it on x.detach() or under torch.no_grad(), or train with torch.nn.functional.linear."
)
define(
    "row_linears(Tensor x, Tensor[] packed, int[] nums, int chunks, Tensor?[] biases) -> Tensor[]",
    _row_linears,
    lambda x, packed, nums, chunks, biases: [x.new_empty(*x.shape[:-1], num) for num in nums],
)
torch.library.register_vmap("shardfn_kernels::row_linears", _map_op, lib=LIBRARY)
refuse_backward("row_linears", "call it on x.detach() or under torch.no_grad().")
define_call("shardfn_kernels::row_linear.default", _native.call_one)
define_call("shardfn_kernels::row_linears.default", _native.call)
