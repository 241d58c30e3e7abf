"""Covers kernels.grouped_product and kernels.grouped_outer: groups of any size, tails, bits, dtypes, refusals."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardfn import kernels

NIGHTLY = pytest.mark.nightly
DTYPES = [torch.float32, torch.float64, torch.bfloat16, pytest.param(torch.float16, marks=NIGHTLY)]
COUNTS = [[3, 0, 17, 5], [0, 0, 0, 0], [0, 0, 0, 29], [29, 0, 0, 0], [1, 6, 7, 8]]
SOME = [pytest.param(x, marks=NIGHTLY if i in (3, 4) else ()) for i, x in enumerate(COUNTS)]
# Of sums of 75 products, relative to the largest element.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def _drawn(dtype: torch.dtype, counts: list[int], k: int = 75, n: int = 67, m: int = 29) -> tuple[Tensor, ...]:
    """X, w [e, k, n], y and counts; x and y are NaN past the groups."""
    draw = torch.Generator().manual_seed(k + n + m)
    x, y = torch.randn(m, k, generator=draw), torch.randn(m, n, generator=draw)
    w = torch.randn(len(counts), k, n, generator=draw)
    x[sum(counts) :], y[sum(counts) :] = math.nan, math.nan
    return x.to(dtype), w.to(dtype), y.to(dtype), torch.tensor(counts)


def _oracle(x: Tensor, w: Tensor, y: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The two products, in float64."""
    out = torch.zeros(len(x), w.shape[2], dtype=torch.float64)
    outer, start = torch.zeros(w.shape, dtype=torch.float64), 0
    for g, size in enumerate(counts.tolist()):
        rows = slice(start, start + size)
        out[rows], outer[g] = x[rows].double() @ w[g].double(), x[rows].double().T @ y[rows].double()
        start += size
    return out, outer


def _close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.double() - want).abs().max() <= TOLERANCE[dtype] * max(float(want.abs().max()), 1)


@pytest.mark.day(24)
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", SOME, ids=str)
def test_products_are_those_of_each_group(counts: list[int], dtype: torch.dtype, transposed: bool) -> None:
    x, w, y, sizes = _drawn(dtype, counts)
    out, outer = _oracle(x, w, y, sizes)
    layout = w.mT.contiguous() if transposed else w
    got = kernels.grouped_product(x, layout, sizes, transposed=transposed)
    _close(got, out, dtype)
    assert torch.equal(got[sum(counts) :], torch.zeros_like(got[sum(counts) :]))
    assert torch.equal(kernels.grouped_product(x, layout.mT, sizes, transposed=not transposed), got)
    _close(kernels.grouped_outer(x, y, sizes), outer, dtype)


@pytest.mark.usefixtures("generation")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sides", [(75, 67), (3, 1), (64, 128), pytest.param((513, 130), marks=NIGHTLY)], ids=str)
def test_every_processor_has_the_bits_of_row_linear(sides: tuple[int, int], transposed: bool) -> None:
    counts = [0, 1, 2, 3, 4, 5, 7, 8, 20]
    x, w, *_ = _drawn(torch.float32, counts, *sides, m=sum(counts) + 3)
    layout = w.mT.contiguous() if transposed else w
    got = kernels.grouped_product(x, layout, torch.tensor(counts), transposed=transposed, batch_invariant=True)
    parts = [
        kernels.row_linear(rows, kernels.pack_rows(matrix.T), sides[1])
        for rows, matrix in zip(x[: sum(counts)].split(counts), w, strict=True)
    ]
    assert torch.equal(got[: sum(counts)], torch.cat(parts))
    assert torch.equal(kernels.grouped_product(x, layout, torch.tensor(counts), transposed=transposed), got)


@pytest.mark.usefixtures("generation")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_processor_multiplies(dtype: torch.dtype) -> None:
    x, w, y, sizes = _drawn(dtype, [70, 0, 9], 64, 130, m=80)
    out, outer = _oracle(x, w, y, sizes)
    _close(kernels.grouped_product(x, w, sizes), out, dtype)
    _close(kernels.grouped_outer(x, y, sizes), outer, dtype)


@pytest.mark.day("native")
@pytest.mark.usefixtures("kind")
def test_an_exact_row_has_its_bits_alone() -> None:
    x, w, _, sizes = _drawn(torch.float32, [3, 0, 17, 5], k=27)
    got = kernels.grouped_product(x, w, sizes, batch_invariant=True)
    alone = [
        kernels.grouped_product(x[i : i + 1], w, torch.eye(4, dtype=torch.int64)[g], batch_invariant=True)
        for i, g in ((0, 0), (2, 0), (3, 2), (24, 3))
    ]
    assert torch.equal(torch.cat(alone), got[[0, 2, 3, 24]])


def test_threads_and_runs_have_the_same_bits() -> None:
    x, w, y, sizes = _drawn(torch.float32, [300, 1, 0, 170], 130, 90, m=500)
    before, got = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            got.append((kernels.grouped_product(x, w, sizes), kernels.grouped_outer(x, y, sizes)))
    finally:
        torch.set_num_threads(before)
    for other in got[1:]:
        assert torch.equal(got[0][0], other[0]) and torch.equal(got[0][1], other[1])


@pytest.mark.day(6)
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (4, 0, 2, 2), (4, 3, 0, 2), (4, 3, 2, 0)], ids=str)
def test_nothing(shape: tuple[int, int, int, int]) -> None:
    m, k, n, e = shape
    counts = torch.zeros(e, dtype=torch.int64)
    if e:
        counts[0] = m
    got = kernels.grouped_product(torch.ones(m, k), torch.ones(e, k, n), counts)
    assert torch.equal(got, torch.full((m, n), float(k) if e else 0.0))
    outer = kernels.grouped_outer(torch.ones(m, k), torch.ones(m, n), counts)
    assert torch.equal(outer, counts[:, None, None].expand(e, k, n).float())


X, W, COUNTS_2 = torch.ones(4, 3), torch.ones(2, 3, 5), torch.tensor([1, 2])


@pytest.mark.parametrize(
    "call, kind, said",
    [
        (lambda: kernels.grouped_product(X, W.double(), COUNTS_2), TypeError, "w is torch.float64, must be torch.fl"),
        (lambda: kernels.grouped_product(X, W, COUNTS_2.int()), TypeError, "counts is torch.int32"),
        (
            lambda: kernels.grouped_product(X, W.mT, COUNTS_2),
            ValueError,
            r"w must be of shape \(e, k, n\) with k = 3, the last dim of x, got \(2, 5, 3\). Pass transposed=True",
        ),
        (lambda: kernels.grouped_product(X, W, COUNTS_2[:1]), ValueError, r"counts is of shape \(1,\), must be \(2,\)"),
        (lambda: kernels.grouped_product(X, W, COUNTS_2 + 1), ValueError, r"4 rows, got \[2, 3\], of sum 5"),
        (lambda: kernels.grouped_product(X, W, -COUNTS_2), ValueError, r"got \[-1, -2\]"),
        (
            lambda: kernels.grouped_product(X.half(), W.half(), COUNTS_2, batch_invariant=True),
            TypeError,
            "x must be float32 or float64 for batch-invariant products, got torch.float16",
        ),
        (lambda: kernels.grouped_outer(X, X[:3], COUNTS_2), ValueError, r"y is of shape \(3, 3\), must be \(4, 3\)"),
        (
            lambda: kernels.grouped_product(X.clone().requires_grad_(), W, COUNTS_2).sum().backward(),
            NotImplementedError,
            r"grouped_product has no derivative: use nn\.moe\.grouped",
        ),
    ],
)
def test_refusals(call: Callable[[], object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        call()
    with kernels.implemented_by("reference"), pytest.raises(kind, match=said):
        call()


def test_an_outer_product_of_many_rows_is_that_of_few() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(9000, 7, generator=draw), torch.randn(9000, 3, generator=draw)
    counts = torch.tensor([4100, 4890])  # the kernel computes the transpose
    got = kernels.grouped_outer(x, y, counts)
    assert got.is_contiguous() and got.shape == (2, 7, 3)
    want = [x[:4100].double().T @ y[:4100].double(), x[4100:8990].double().T @ y[4100:8990].double()]
    torch.testing.assert_close(got.double(), torch.stack(want), rtol=1e-4, atol=1e-3)
