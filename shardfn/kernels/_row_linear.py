"""Batch-invariant linear layers: a row's bits do not depend on the number of rows."""

import itertools
import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ._arguments import check_dtype, check_shape, threads_for
from ._build import function
from ._chain import KernelCall, are_dense
from ._fixed_bits import multiply_add
from ._op import EXACT, KernelOp
from ._row_codes import (
    GROUP,
    PANEL,
    Quantization,
    densify_panels,
    has_dense_panels,
    kind_of,
    pack_blocks,
    packed_shape,
    quantize_blocks,
    rows_apart,
    unpack_rows,
)

# Largest number of levels of the tree that adds up chunks.
LEVELS = 16
# Multiply-adds up to which a second thread does not pay.
FEW = 1 << 21
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float64)
_KINDS = {torch.float32: 0, torch.bfloat16: 1, "int8": 2, "int4": 3, "int4_wide": 4}
_SOURCE = "_row_linear.cpp"


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
    return ROW_LINEAR(x, packed, num, chunks, bias)


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
        x: input as of `row_linear`.
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
    return ROW_LINEARS(x, list(packed), list(nums), chunks, given)


def _check_operands(x: Tensor, packed: Tensor, num: int, chunks: int, bias: Tensor | None) -> None:
    ROW_LINEARS.check_dtype("x", x)
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


# The definition.


def compute_rows(x: Tensor, packed: Tensor, num: int, chunks: int, bias: Tensor | None) -> Tensor:
    """Returns [m, num] of x [m, k] and packed [panels, k, 64], or codes: the definition of a layer."""
    k = x.shape[1]
    weight = unpack_rows(packed, num, k)
    chains = []
    for i in range(chunks):
        total = x.new_zeros(x.shape[0], num)
        for j in range(i * k // chunks, (i + 1) * k // chunks):
            total = multiply_add(x[:, j, None], weight[:, j], total)
        chains.append(total)
    out = sum_chunks(chains)
    return out if bias is None else out + bias


def compute_layers(
    x: Tensor,
    packed: Sequence[Tensor],
    nums: Sequence[int],
    chunks: int,
    biases: Sequence[Tensor | None],
    *,
    compute: Callable[..., Tensor] = compute_rows,
) -> list[Tensor]:
    """Returns [*, num] of each layer, of x [*, k]."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    layers = zip(packed, nums, biases, strict=True)
    return [compute(rows, densify_panels(w), n, chunks, bias).view(*x.shape[:-1], n) for w, n, bias in layers]


def sum_chunks(chains: Sequence[Tensor]) -> Tensor:
    """Returns the chains of chunks, added by a binary tree.

    Neighbours come first, and the last remaining nodes from the end. For example 5 chains a to e make ((a + b) + (c +
    d)) + e.

    The list may also hold sums of 2, 4, 8, ... neighbouring chunks, if all sums have equally many chunks.

    Args:
        chains: list with a tensor for each chunk, or for each node.

    Example:
        >>> import torch
        >>> sum_chunks([torch.tensor(float(x)) for x in (1, 2, 3)])  # (1 + 2) + 3
        tensor(6.)
    """
    nodes: list[tuple[int, Tensor]] = []
    for total in chains:
        level = 0
        while nodes and nodes[-1][0] == level:
            total, level = nodes.pop()[1] + total, level + 1
        nodes.append((level, total))
    out = nodes.pop()[1]
    while nodes:
        out = nodes.pop()[1] + out
    return out


# In C++.


def _compute_natively(
    x: Tensor, packed: Sequence[Tensor], nums: Sequence[int], chunks: int, biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """Maps x fp32 [*, k] to fp32 [*, num] of each layer. Neighbours of equal kind are computed in a single call."""
    run = function(_SOURCE, "row_linears", "pp" + "i" * 6)
    *lead, k = x.shape
    m, x = math.prod(lead), x.contiguous()
    ys = [x.new_empty((*lead, num)) for num in nums]
    kinds = [_KINDS[kind_of(w) or w.dtype] for w in packed]
    packed = [densify_panels(w) for w in packed]
    biases = [None if bias is None else bias.contiguous() for bias in biases]
    start = 0
    for kind, same in itertools.groupby(kinds):
        end = start + len(list(same))
        layers = array("q")
        for w, bias, y in zip(packed[start:end], biases[start:end], ys[start:end], strict=True):
            address = 0 if bias is None else bias.data_ptr()
            layers.extend((w.data_ptr(), address, y.data_ptr(), y.shape[-1], rows_apart(w)))
        threads = threads_for(m * k * sum(nums[start:end]), FEW)
        run(x.data_ptr(), layers.buffer_info()[0], end - start, m, k, chunks, kind, threads)
        start = end
    return ys


def _call_layer(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    """Returns the kernel call for `row_linear` in a chain."""
    x, packed, num, chunks, bias = arguments
    return _call_layers((x, [packed], [num], chunks, [bias]), [y])


def _call_layers(arguments: Sequence[Any], ys: Sequence[Tensor]) -> KernelCall | None:
    """Returns the kernel call for `row_linears` in a chain, if the layers are of equal kind."""
    x, packed, nums, chunks, biases = arguments
    kinds = {_KINDS.get(kind_of(w) or w.dtype) for w in packed}
    if len(kinds) != 1 or not are_dense(x, *biases) or not all(map(has_dense_panels, packed)):
        return None
    m, k = x.shape[:-1].numel(), x.shape[-1]
    each = zip(packed, biases, ys, strict=True)
    layers = [part for w, bias, y in each for part in (w, bias, y, y.shape[-1], rows_apart(w))]
    threads = threads_for(m * k * sum(nums), FEW)
    return KernelCall(_SOURCE, "row_linears", (x, len(packed), m, k, chunks, *kinds, threads, *layers))


def map_layers(
    op: KernelOp, info: Any, in_dims: Any, x: Tensor, packed: Any, nums: Any, chunks: int, biases: Any
) -> Any:
    """Applies the rule for vmap of an op with the arguments of `row_linears`.

    A mapped dim of x joins the rows. With a mapped weight, each part has a separate call.
    """
    of_x, of_packed, _, _, of_biases = in_dims
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


ROW_LINEARS = KernelOp(
    schema="row_linears(Tensor x, Tensor[] packed, int[] nums, int chunks, Tensor?[] biases) -> Tensor[]",
    abstract=lambda x, packed, nums, chunks, biases: [x.new_empty(*x.shape[:-1], num) for num in nums],
    reference=compute_layers,
    dtypes=EXACT,
    native=_compute_natively,
    source=_SOURCE,
    triton="_row_linear_triton.row_linears",
    fast_dtypes=(torch.float32,),
    no_derivative="call it on x.detach() or under torch.no_grad().",
    mapped=lambda *args: map_layers(ROW_LINEARS, *args),
    flops=lambda x, packed, nums, *_: 2 * x.numel() * sum(nums),
    chain=_call_layers,
)
ROW_LINEAR = KernelOp(
    schema="row_linear(Tensor x, Tensor packed, int num, int chunks, Tensor? bias) -> Tensor",
    abstract=lambda x, packed, num, chunks, bias: x.new_empty(*x.shape[:-1], num),
    reference=lambda x, packed, num, chunks, bias: compute_layers(x, [packed], [num], chunks, [bias])[0],
    dtypes=EXACT,
    native=lambda x, packed, num, chunks, bias: _compute_natively(x, [packed], [num], chunks, [bias])[0],
    source=_SOURCE,
    triton="_row_linear_triton.row_linear",
    fast_dtypes=(torch.float32,),
    no_derivative="call it on x.detach() or under torch.no_grad(), or train with torch.nn.functional.linear.",
    mapped=1,
    flops=lambda x, packed, num, *_: 2 * x.numel() * num,
    chain=_call_layer,
)
