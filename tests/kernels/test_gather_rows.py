"""Covers kernels.gather_rows and kernels.row_dots: the bits of the definition, dtypes, threads, refusals."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardfn import kernels

NIGHTLY = pytest.mark.nightly
DTYPES = [torch.float32, torch.float64, torch.bfloat16, pytest.param(torch.float16, marks=NIGHTLY)]


def _drawn(dtype: torch.dtype, n: int = 9, d: int = 37, m: int = 20, j: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(n + d + m)
    x, weights = torch.randn(n, d, generator=draw), torch.randn(m, j, generator=draw)
    index = torch.randint(-1, n, (m, j), generator=draw)
    index[m // 2] = -1
    return x.to(dtype), index, weights.to(dtype)


@pytest.mark.day(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [1, 37, pytest.param(2051, marks=NIGHTLY)])
def test_every_implementation_has_the_bits_of_the_definition(kind: str, d: int, dtype: torch.dtype) -> None:
    x, index, weights = _drawn(dtype, d=d)
    for factors in (None, weights, weights.double()):
        got = kernels.gather_rows(x, index, factors)
        with kernels.implemented_by("reference"):
            want = kernels.gather_rows(x, index, factors)
        assert got.dtype == dtype and not got[10].any()
        if kind == "triton" and dtype == torch.bfloat16:  # the interpreter does not round to it as processors do
            torch.testing.assert_close(got, want)
        else:
            assert torch.equal(got, want)


@pytest.mark.day(5)
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dots_are_those_of_float64(dtype: torch.dtype) -> None:
    x, index, _ = _drawn(dtype, d=70)
    y = torch.randn(20, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = kernels.row_dots(x, y, index)
    want = (x.double()[index] * y.double()[:, None]).sum(2).masked_fill(index < 0, 0)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kind")
def test_rows_that_are_not_named_are_not_read() -> None:
    x, index, weights = _drawn(torch.float32)
    x[4], index[index == 4] = math.nan, -1
    assert kernels.gather_rows(x, index, weights).isfinite().all()
    assert kernels.row_dots(x, torch.ones(20, 37), index).isfinite().all()


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("shape", [(0, 3, 0, 1), (5, 0, 4, 2), (5, 3, 0, 2), (5, 3, 4, 0), (0, 3, 4, 1)])
def test_nothing(shape: tuple[int, int, int, int]) -> None:
    n, d, m, j = shape
    x, index = torch.ones(n, d), torch.full((m, j), -1 if n == 0 else 0)
    got, want = kernels.gather_rows(x, index), j if n else 0
    assert torch.equal(got, torch.full((m, d), float(want)))
    assert torch.equal(kernels.row_dots(x, torch.ones(m, d), index), torch.full((m, j), float(d if n else 0)))


def test_threads_and_runs_have_the_same_bits() -> None:
    x, index, weights = _drawn(torch.float32, 700, 129, 3000, 2)
    before, got = torch.get_num_threads(), []
    y = torch.randn(3000, 129)
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            got.append((kernels.gather_rows(x, index, weights), kernels.row_dots(x, y, index)))
    finally:
        torch.set_num_threads(before)
    for other in got[1:]:
        assert all(map(torch.equal, got[0], other))


def test_mapped_arguments() -> None:
    x, index, weights = _drawn(torch.float32)
    many = torch.stack([x, 2 * x])
    got = torch.func.vmap(kernels.gather_rows, (0, None, 0))(many, index, torch.stack([weights, -weights]))
    assert torch.equal(
        got, torch.stack([kernels.gather_rows(x, index, weights)] * 2) * torch.tensor([1, -2])[:, None, None]
    )


X, INDEX = torch.ones(3, 2), torch.zeros(4, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    "call, kind, said",
    [
        (lambda: kernels.gather_rows(X, INDEX.int()), TypeError, "index is torch.int32, must be torch.int64"),
        (lambda: kernels.gather_rows(X, INDEX, X), ValueError, r"weights is of shape \(3, 2\), must be \(4, 1\)"),
        (lambda: kernels.row_dots(X, X.double(), INDEX), TypeError, "y is torch.float64, must be torch.float32"),
        (lambda: kernels.row_dots(X, X, INDEX), ValueError, r"y is of shape \(3, 2\), must be \(4, 2\)"),
        (lambda: kernels.gather_rows(X, INDEX + 3), IndexError, "an index must be from -1 to 2, the last row of x"),
        (lambda: kernels.row_dots(X, torch.ones(4, 2), INDEX - 2), IndexError, "-1 adds nothing"),
        (
            lambda: kernels.gather_rows(X.clone().requires_grad_(), INDEX).sum().backward(),
            NotImplementedError,
            r"gather_rows has no derivative: use nn\.moe\.dispatch",
        ),
    ],
)
def test_refusals(call: Callable[[], object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        call()
    with kernels.implemented_by("reference"), pytest.raises(kind, match=said):
        call()
