"""Arguments of every kernel at any size, for the harness.

A case is a size: a number of rows, a width and a dtype. `CASES` makes the arguments of a kernel from a size, and lists
the arguments whose rows are independent of each other.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._block_sparse_attention import Tiles, block_sparse_attention
from ._op import FLOATS
from ._quantize import quantize
from ._row_codes import quantize_blocks
from ._row_linear import pack_rows
from ._signs import pack_signs

EVEN = ((4, 64), (33, 128))
ODD = ((5, 77), (3, 1), (1, 63), (7, 129))
EMPTY = ((0, 64),)


class Size(NamedTuple):
    """Size of a case. Equal sizes have equal arguments.

    Attributes:
        rows: number of rows, for example of tokens.
        width: elements of a row. Kernels of bytes take 8 times the width, kernels of pairs twice the width.
        dtype: dtype of the first tensor.
        device: device of the tensors.
    """

    rows: int
    width: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __str__(self) -> str:
        """Returns the size as text."""
        return f"{self.rows} rows of width {self.width} in {str(self.dtype).removeprefix('torch.')}"

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        """Returns normal numbers of a shape, in the dtype."""
        return torch.randn(shape, generator=self._seed(seed)).to(self.device, self.dtype)

    def uniform(self, *shape: int, seed: int = 0) -> Tensor:
        """Returns float64 numbers from 0 to 1."""
        return torch.rand(shape, generator=self._seed(seed), dtype=torch.float64).to(self.device)

    def whole(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Returns whole numbers from low to high - 1."""
        return torch.randint(low, high, shape, generator=self._seed(7)).to(self.device, dtype)

    def _seed(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * seed + 31 * self.rows + self.width)


class OpCases(NamedTuple):
    """Cases of a kernel.

    Attributes:
        make: function from a size to the arguments of the op by position.
        rows: positions of arguments whose leading dim has the rows. Each row of the results then depends on these rows
            only, and has the same bits in any batch. Empty: the op promises no such rows.
        exact: whether the record promises the bits of the definition.
        dtypes: dtypes of the first tensor, for a record without dtypes.
    """

    make: Callable[[Size], tuple[Any, ...]]
    rows: tuple[int, ...] = ()
    exact: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)


def _linears(s: Size, quantization: Any) -> tuple[Any, ...]:
    nums = [s.width + 5, 3]
    weights = [s.normal(n, s.width, seed=n) for n in nums]
    biases = [s.normal(nums[0], seed=3), None]
    return s.normal(s.rows, s.width), [pack_rows(w, quantization) for w in weights], nums, 8, biases


def _draws(s: Size) -> tuple[Any, ...]:
    vocab = s.width + 3
    return s.normal(s.rows, vocab), *(s.uniform(s.rows, seed=k) for k in (1, 2)), s.whole(
        0, vocab, s.rows), *(s.uniform(s.rows, seed=k) for k in (3, 4)), None  # fmt: skip


def _penalties(s: Size) -> tuple[Any, ...]:
    history = s.whole(-1, s.width, s.rows, 11, dtype=torch.int32)
    prompts = s.whole(0, 12, s.rows, dtype=torch.int32)
    numbers = (0.5 + s.uniform(s.rows, seed=k) for k in (1, 2, 3))
    return s.normal(s.rows, s.width), history, prompts, *numbers


def _codes(s: Size, *lead: int) -> tuple[Tensor, Tensor]:
    codes, scales = quantize(s.normal(math.prod(lead), s.width), bits=4, block=8)
    return codes.view(*lead, codes.shape[1]), scales.view(*lead, scales.shape[1])


def _blocks(s: Size) -> tuple[Any, ...]:
    """Returns blocks: int4 for an odd number of rows, and a last group in part for an odd width."""
    blocks = quantize_blocks(s.normal(s.rows, 32 * s.width), "int4" if s.rows % 2 else "int8")
    return blocks, 32 * s.width - 5 * (s.width % 2), torch.float32


def _signs(s: Size) -> tuple[Tensor, Tensor]:
    return pack_signs(s.normal(s.rows, 8 * s.width)), s.normal(s.rows, seed=1).abs()


def _mean(s: Size) -> tuple[Tensor, ...]:
    bits, scale = _signs(s)
    return bits, scale, s.normal(8 * s.width, seed=2)


def _moments(s: Size) -> tuple[Any, ...]:
    p, m, nu = (s.normal(s.rows, s.width, seed=k) for k in range(3))
    lr, c1, c2 = torch.tensor([0.1, 0.9, 0.01], device=s.device)
    return p, m, nu.square(), lr, c1, c2, 1e-8, 0.1


def _pages(s: Size) -> tuple[Any, ...]:
    """Returns two sequences, the second one with a single token, in blocks of 4 tokens."""
    heads, block, T = 4, 4, s.rows
    first = max(T - 1, 0)
    width = max(-(-first // block), 1)
    tables = torch.arange(2 * width, dtype=torch.int32, device=s.device).flip(0).view(2, width)
    sequences = torch.tensor([0] * first + [1] * (T - first), dtype=torch.int32, device=s.device)
    positions = torch.tensor([*range(first)] + [0] * (T - first), dtype=torch.int32, device=s.device)
    slots = tables[sequences.long(), positions.long() // block] * block + positions % block
    cache = torch.zeros(2 * width, 2, 2, block, s.width, dtype=s.dtype, device=s.device)
    q, k, v = s.normal(T, heads, s.width), s.normal(T, 2, s.width, seed=1), s.normal(T, 2, s.width, seed=2)
    return q, k, v, cache, slots, positions, sequences, tables, 0.25, *[None] * 8, 0


def _tiles(s: Size) -> tuple[Any, ...]:
    """Returns a causal layout of tiles of 4 rows."""
    blocks = -(-s.rows // 4)
    rows = [(i, j) for i in range(blocks) for j in range(i + 1)]
    starts = [[sum(r < i for r, _ in rows) for i in range(blocks + 1)]]
    lower = torch.ones(4, 4, dtype=torch.uint8, device=s.device).tril()[None]
    to = {"dtype": torch.int32, "device": s.device}
    columns, kinds = (
        torch.tensor([j for _, j in rows], **to),
        torch.tensor([0 if i == j else -1 for i, j in rows], **to),
    )
    qkv = (s.normal(2, s.rows, 2, s.width, seed=k) for k in range(3))
    return *qkv, torch.tensor(starts, **to), columns, kinds, lower, *[None] * 5, 0, 0, 0, 0, 4, s.width**-0.5


def _tiles_backward(s: Size) -> tuple[Any, ...]:
    args = _tiles(s)
    q, k, v, *tiles = args[:7]
    y, lse = block_sparse_attention(q, k, v, Tiles(*tiles), block=4, scale=args[-1])
    return s.normal(*y.shape, seed=9).to(y.dtype), *args[:3], y, lse, *args[3:]


def _index(s: Size) -> Tensor:
    return s.whole(-1, s.rows + 2, s.rows, 2)


def _copies(s: Size) -> tuple[Tensor, ...]:
    order = torch.randperm(s.rows, generator=torch.Generator().manual_seed(s.rows)).to(s.device)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(s.rows, device=s.device))
    return s.normal(s.rows, s.width), order[:, None], back[:, None]


def _combined(s: Size) -> tuple[Tensor, ...]:
    places = torch.arange(2 * s.rows, device=s.device).view(s.rows, 2)
    weights = s.uniform(s.rows, 2).to(s.dtype)
    return s.normal(2 * s.rows, s.width), weights, places.flatten() // 2, places


def _groups(s: Size) -> Tensor:
    return torch.tensor([s.rows // 2, 0, s.rows - s.rows // 2], device=s.device)


def _grouped(s: Size) -> tuple[Any, ...]:
    return s.normal(s.rows, s.width), s.normal(3, s.width, s.width + 3, seed=1), _groups(s), False, True


# By name of the op.
CASES: dict[str, OpCases] = {
    "pack_signs": OpCases(lambda s: (s.normal(s.rows, 8 * s.width),), (0,)),
    "unpack_signs": OpCases(_signs, (0, 1)),
    "unpack_signs_into": OpCases(lambda s: (*_signs(s), s.normal(s.rows, 8 * s.width).float()), (0, 1, 2)),
    "sign_compress": OpCases(lambda s: (s.normal(s.rows, 8 * s.width), s.normal(s.rows, 8 * s.width).float(), False)),
    "sign_compress_": OpCases(lambda s: (s.normal(s.rows, 8 * s.width), s.normal(s.rows, 8 * s.width).float(), False)),
    "sign_mean": OpCases(_mean),
    "sign_mean_": OpCases(_mean),
    "quantize": OpCases(lambda s: (s.normal(s.rows, s.width), 4, 8), (0,)),
    "dequantize": OpCases(lambda s: (*_codes(s, s.rows), s.width, 4, 8, torch.bfloat16), (0, 1)),
    "dequantize_into": OpCases(lambda s: (*_codes(s, s.rows), 4, 8, s.normal(s.rows, s.width).float()), (0, 1, 4)),
    "dequantize_sum": OpCases(lambda s: (*_codes(s, 3, s.rows), s.width, 4, 8)),
    "dequantize_sum_quantize": OpCases(lambda s: (*_codes(s, 3, s.rows), s.width, 4, 8)),
    "moving_average_": OpCases(lambda s: (s.normal(s.rows, s.width), s.normal(s.rows, s.width, seed=1), 0.9)),
    "preconditioned_step": OpCases(_moments),
    "preconditioned_step_": OpCases(_moments),
    "block_sparse_attention": OpCases(_tiles, exact=False),
    "block_sparse_attention_backward": OpCases(_tiles_backward, exact=False),
    "draw": OpCases(_draws, (0, 1, 2, 3, 4, 5)),
    "top_logprobs": OpCases(lambda s: (s.normal(s.rows, s.width + 3), 3), (0,)),
    "draw_uniforms": OpCases(lambda s: (s.whole(0, 1 << 40, s.rows), s.whole(0, 1 << 20, s.rows)), (0, 1)),
    "penalise": OpCases(_penalties, (0, 1, 2, 3, 4, 5)),
    "row_linear": OpCases(
        lambda s: (
            s.normal(s.rows, s.width), pack_rows(s.normal(s.width + 5, s.width, seed=1)), s.width + 5, 8,
            s.normal(s.width + 5, seed=2)), (0,),
    ),
    "row_linears": OpCases(lambda s: _linears(s, None), (0,)),
    "integer_linears": OpCases(lambda s: _linears(s, "int8"), (0,)),
    "ragged_attention": OpCases(_pages, (0, 1, 2, 4, 5, 6)),
    "gated_silu": OpCases(lambda s: (s.normal(s.rows, s.width), s.normal(s.rows, s.width, seed=1)), (0, 1)),
    "gated_sigmoid": OpCases(lambda s: (s.normal(s.rows, s.width), s.normal(s.rows, s.width, seed=1)), (0, 1)),
    "gelu": OpCases(lambda s: (s.normal(s.rows, s.width),), (0,)),
    "gated_silu_gradient": OpCases(lambda s: (s.normal(s.rows, 2 * s.width), s.normal(s.rows, s.width, seed=1))),
    "gated_silu_gradient_": OpCases(lambda s: (s.normal(s.rows, 2 * s.width), s.normal(s.rows, s.width, seed=1))),
    "rotate": OpCases(
        lambda s: (
            s.normal(s.rows, 3, 2 * s.width), s.normal(s.rows, 2 * s.width, seed=1),
            s.normal(s.rows, 2 * s.width, seed=2)), (0, 1, 2),
    ),
    "row_norm": OpCases(
        lambda s: (
            s.normal(s.rows, s.width), s.normal(s.width, seed=1), s.normal(s.width, seed=2), 1e-5, True), (0,),
    ),
    "gather_rows": OpCases(
        lambda s: (s.normal(s.rows + 2, s.width), _index(s), s.normal(s.rows, 2, seed=1)), (1, 2), dtypes=FLOATS
    ),
    "row_dots": OpCases(
        lambda s: (s.normal(s.rows + 2, s.width), s.normal(s.rows, s.width, seed=1), _index(s)), exact=False,
        dtypes=FLOATS,
    ),
    "copied_rows": OpCases(_copies),
    "combined_rows": OpCases(_combined),
    "grouped_product": OpCases(_grouped),
    "multiplied_rows": OpCases(_grouped),
    "grouped_outer": OpCases(
        lambda s: (s.normal(s.rows, s.width), s.normal(s.rows, s.width, seed=1), _groups(s)), exact=False
    ),
    "dequantize_blocks": OpCases(_blocks, (0,)),
}  # fmt: skip
