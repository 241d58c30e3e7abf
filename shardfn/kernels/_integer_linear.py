"""Linear layers of whole numbers: inputs rounded to 8 bits, weights in codes, sums of products in int32.

Each row of inputs is rounded on its own, in groups of 32 inputs as weights are, so a rank with some of the groups
rounds its groups as a rank with all of them:

    top = max |x|,  scale = top / 127,  q = round(x (127 / top))     of the 32 inputs of a group

For group g, output n and a weight of `_row_codes`:

    dot = sum_k q[k] code[n, k]                           in int32: no sum is rounded, so that the order does not matter
    y = fma(scale[g], part, y)                            over ascending groups
    part = weight_scale[n, g] dot                         int8
    part = fma(least[n, g], sum_k q[k], weight_scale[n, g] dot)     int4

The groups are cut in chunks, which a binary tree adds up, as the inputs of `row_linear`.

References:
    Dettmers et al., LLM.int8(), 2022, https://arxiv.org/abs/2208.07339
"""

from array import array
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ._arguments import check_dtype, check_shape, threads_for
from ._build import function
from ._chain import KernelCall, are_dense
from ._fixed_bits import multiply_add
from ._op import KernelOp
from ._row_codes import GROUP, densify_panels, has_dense_panels, kind_of, packed_shape, rows_apart, split_codes
from ._row_linear import LEVELS, compute_layers, map_layers, row_linears, sum_chunks

# Rounding of a layer's inputs.
Activations = Literal["int8"]

# Multiply-adds up to which a second thread does not pay.
FEW = 1 << 22
# Largest magnitude of a group that counts as zero.
TINY = 2.0**-90
_ROUNDED_BYTES = 48  # of a group of a row in C++
_SOURCE = "_integer_linear.cpp"


def integer_linears(
    x: Float[Tensor, "*rows k"],
    packed: Sequence[UInt8[Tensor, "panels groups record"]],
    nums: Sequence[int],
    *,
    chunks: int = 8,
    biases: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """Returns several layers of the same input, rounded to 8 bits, with sums in int32.

    An element's bits depend only on the row of `x` and the row of the weight: neither on the number of rows, nor on
    threads, nor on the processor. Where `chunks` divides the groups of 32 inputs, a rank with the neighbouring chunks
    of a node of the tree computes the node, as in `row_linear`. Each |x - rounded| is at most 1/254 of the largest
    |x| of its group. A group with an infinite or NaN input makes NaN.

    Args:
        x: float32.
        packed: weights in codes, from `pack_rows` or `pack_blocks`, of either kind.
        nums: outputs of each.
        chunks: chunks of the groups, in all layers. Chunk i has the groups from i g / chunks to (i + 1) g / chunks.
        biases: biases of each, float32, or None. A bias is added last.

    Raises:
        TypeError: for other dtypes, and weights of floats.
        ValueError: the numbers of weights, outputs and biases differ, shapes do not fit, or `chunks` is below 1 or
            above 65535.
        NotImplementedError: in a backward.

    Example:
        >>> from shardfn.kernels import pack_rows
        >>> x, weight = torch.tensor([[1.0, 2.0, 127.0]]), torch.ones(2, 3)
        >>> integer_linears(x, [pack_rows(weight, "int4")], [2])
        [tensor([[129.9683, 129.9683]])]
    """
    given = [None] * len(packed) if biases is None else list(biases)
    if not len(packed) == len(nums) == len(given):
        raise ValueError(
            f"{len(packed)} weights, {len(nums)} nums and {len(given)} biases. Each layer must have one of each"
        )
    INTEGER_LINEARS.check_dtype("x", x)
    for w, num, bias in zip(packed, nums, given, strict=True):
        if w.dtype != torch.uint8:
            raise TypeError(f"packed is {w.dtype}, must be codes: pack_rows(weight, 'int8'). Or use row_linears")
        check_shape("packed", w, packed_shape(w, num, x.shape[-1]), f"panels of {num} outputs, of x's last dim")
        if bias is not None:
            check_dtype("bias", bias, torch.float32)
            check_shape("bias", bias, (num,), "one for each output")
    if not 1 <= chunks < 1 << LEVELS:
        raise ValueError(f"chunks must be from 1 to {(1 << LEVELS) - 1}, got {chunks}")
    return INTEGER_LINEARS(x, list(packed), list(nums), chunks, given)


def linears(
    x: Float[Tensor, "*rows k"],
    packed: Sequence[Tensor],
    nums: Sequence[int],
    *,
    chunks: int = 8,
    biases: Sequence[Tensor | None] | None = None,
    activations: Activations | None = None,
) -> list[Tensor]:
    """Returns `integer_linears` for weights in codes if `activations` is "int8", and `row_linears` otherwise.

    Args:
        x: input, float32, or float64 as of `row_linear`.
        packed: the weights, in codes or not.
        nums: outputs of each.
        chunks: chunks of the inputs.
        biases: biases of each, or None.
        activations: "int8", or None.

    Example:
        >>> from shardfn.kernels import pack_rows
        >>> x, weight = torch.ones(1, 3), torch.ones(2, 3)
        >>> linears(x, [pack_rows(weight), pack_rows(weight, "int8")], [2, 2], activations="int8")
        [tensor([[3., 3.]]), tensor([[2.9998, 2.9998]])]
    """
    coded = {w.dtype == torch.uint8 for w in packed}
    if activations is None or coded == {False}:
        return row_linears(x, packed, nums, chunks=chunks, biases=biases)
    if coded == {True}:
        return integer_linears(x, packed, nums, chunks=chunks, biases=biases)
    given = [None] * len(packed) if biases is None else biases
    each = zip(packed, nums, given, strict=True)
    return [linears(x, [w], [n], chunks=chunks, biases=[b], activations=activations)[0] for w, n, b in each]


# The definition.


class RoundedRows(NamedTuple):
    """Rows rounded to 8 bits: codes [m, groups, 32] of int8, scales [m, groups], sums of codes [m, groups]."""

    q: Tensor
    scale: Tensor
    total: Tensor


def round_rows(x: Tensor) -> RoundedRows:
    """Returns the rows of x [m, k], rounded. Inputs after the last are zero.

    Example:
        >>> rounded = round_rows(torch.tensor([[1.0, -127.0]]))
        >>> rounded.q[0, 0, :3].tolist(), rounded.scale.item(), rounded.total.item()
        ([1, -127, 0], 1.0, -126.0)
    """
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    top = groups.abs().amax(-1) if x.shape[1] else groups.new_zeros(groups.shape[:2])
    counts = (top >= TINY) & top.isfinite()
    factor = 127 / torch.where(counts, top, 1.0)
    q = (torch.where(counts[..., None], groups, 0.0) * factor[..., None]).round().to(torch.int8)
    scale = torch.where(counts, top / 127, torch.where(top.isfinite(), 0.0, torch.nan))
    return RoundedRows(q, scale, q.sum(-1, dtype=torch.int32).float())


def compute_rows(x: Tensor, packed: Tensor, num: int, chunks: int, bias: Tensor | None) -> Tensor:
    """Returns [m, num] of x [m, k] and codes [panels, groups, record]: the definition of a layer."""
    rounded = round_rows(x)
    scale, least, codes = split_codes(packed, num)
    chains, groups = [], packed.shape[1]
    for i in range(chunks):
        total = x.new_zeros(x.shape[0], num)
        for g in range(i * groups // chunks, (i + 1) * groups // chunks):
            dot = rounded.q[:, g].double() @ codes[:, g].double().T
            part = scale[:, g] * dot.float()
            if least is not None:
                part = multiply_add(least[:, g], rounded.total[:, g, None], part)
            total = multiply_add(rounded.scale[:, g, None], part, total)
        chains.append(total)
    out = sum_chunks(chains)
    return out if bias is None else out + bias


def _compute_layers(
    x: Tensor, packed: Sequence[Tensor], nums: Sequence[int], chunks: int, biases: Sequence[Tensor | None]
) -> list[Tensor]:
    return compute_layers(x, packed, nums, chunks, biases, compute=compute_rows)


# In C++.


_KINDS = {"int8": 0, "int4": 1, "int4_wide": 2}


def _list_layers(packed: Sequence[Tensor], biases: Sequence[Tensor | None], ys: Sequence[Tensor]) -> list[Any]:
    layers = zip(packed, biases, ys, strict=True)
    return [p for w, bias, y in layers for p in (w, bias, y, y.shape[-1], rows_apart(w), _KINDS[kind_of(w) or ""])]


def _compute_natively(
    x: Tensor, packed: Sequence[Tensor], nums: Sequence[int], chunks: int, biases: Sequence[Tensor | None]
) -> list[Tensor]:
    run = function(_SOURCE, "integer_linears", "pp" + "i" * 5)
    m, k = x.shape[:-1].numel(), x.shape[-1]
    ys = [x.new_empty(*x.shape[:-1], num) for num in nums]
    kept = [densify_panels(w) for w in packed], [None if bias is None else bias.contiguous() for bias in biases]
    parts = _list_layers(*kept, ys)
    layers = array("q", [0 if p is None else p.data_ptr() if isinstance(p, Tensor) else p for p in parts])
    threads = threads_for(m * k * sum(nums), FEW)
    run(x.data_ptr(), layers.buffer_info()[0], len(nums), m, k, chunks, threads)
    return ys


def _call_layers(arguments: Sequence[Any], ys: Sequence[Tensor]) -> KernelCall | None:
    """Returns the call in a chain."""
    x, packed, nums, chunks, biases = arguments
    if not are_dense(x, *biases) or not all(map(has_dense_panels, packed)):
        return None
    m, k = x.shape[:-1].numel(), x.shape[-1]
    layers = _list_layers(packed, biases, ys)
    threads = threads_for(m * k * sum(nums), FEW)
    return KernelCall(_SOURCE, "integer_linears", (x, len(packed), m, k, chunks, threads, *layers))


INTEGER_LINEARS = KernelOp(
    schema="integer_linears(Tensor x, Tensor[] packed, int[] nums, int chunks, Tensor?[] biases) -> Tensor[]",
    abstract=lambda x, packed, nums, chunks, biases: [x.new_empty(*x.shape[:-1], num) for num in nums],
    reference=_compute_layers,
    dtypes=(torch.float32,),
    native=_compute_natively,
    source=_SOURCE,
    triton="_integer_linear_triton.integer_linears",
    no_derivative="rounded inputs have no derivative. Train with torch.nn.functional.linear.",
    mapped=lambda *args: map_layers(INTEGER_LINEARS, *args),
    flops=lambda x, packed, nums, *_: 2 * x.numel() * sum(nums),
    scratch=lambda x, *_: x.shape[:-1].numel() * -(-x.shape[-1] // GROUP) * _ROUNDED_BYTES,
    chain=_call_layers,
)
