"""Covers kernels.row_linear: the bits of its definition on every processor, and those of a row alone."""

import ctypes
import ctypes.util
import math
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from shardfn import kernels
from shardfn.kernels import _build, _row_linear

NIGHTLY = pytest.mark.nightly
# Odd numbers of inputs and outputs: below a chunk's worth, off every width of a vector, and of one panel.
SHAPES = [(77, 70), (3, 1), pytest.param((512, 130), marks=NIGHTLY), pytest.param((1409, 64), marks=NIGHTLY)]


def _draw(rows: int, k: int, num: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows + k + num)
    x, weight = torch.randn(rows, k, generator=draw), torch.randn(num, k, generator=draw)
    return x, weight.to(dtype), torch.randn(num, generator=draw)


def _own(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, chunks: int = 8) -> Tensor:
    return kernels.row_linear(x, kernels.pack_rows(weight), len(weight), chunks=chunks, bias=bias)


def test_the_fused_sum_is_that_of_the_c_library() -> None:
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    library.fmaf.argtypes, library.fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 4000, generator=draw) * 10.0 ** torch.randint(-25, 12, (2, 4000), generator=draw)
    # Sums that nearly cancel, ties, subnormal results, infinities.
    c = torch.cat([-(a * b)[:2000], torch.randn(1990, generator=draw), torch.tensor([math.inf, -math.inf] * 5)])
    want = torch.tensor([library.fmaf(*map(float, x)) for x in zip(a, b, c, strict=True)])
    got = _row_linear.multiply_add(a, b, c)
    assert torch.equal(got.view(torch.int32)[got == got], want.view(torch.int32)[want == want])
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_processor_has_the_bits_of_the_definition(
    generation: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight, bias = _draw(13, *shape, dtype)
    for chunks in (8, 1, 24):
        got = _own(x, weight, bias, chunks=chunks)
        with kernels.implemented_by("reference"):
            want = _own(x, weight, bias, chunks=chunks)
        assert torch.equal(got, want), (generation, chunks)


@pytest.mark.day("x86-64-v4-(77, 70)-1", "x86-64-v3-(77, 70)-1")
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=NIGHTLY)])
@pytest.mark.parametrize(
    "shape", [(77, 70), *(pytest.param(x, marks=NIGHTLY) for x in ((512, 513), (1409, 77)))], ids=str
)
def test_a_row_has_its_bits_alone(generation: int, shape: tuple[int, int], threads: int) -> None:
    x, weight, bias = _draw(768, *shape)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([_own(row, weight, bias) for row in x.split(1)])
        for rows in (*range(1, 66), 256, 768):
            assert torch.equal(_own(x[:rows], weight, bias), alone[:rows]), rows
        assert torch.equal(_own(x[5:70].view(5, 13, -1), weight, bias).view(65, -1), alone[5:70])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=NIGHTLY)])
def test_several_layers_of_one_input_have_the_bits_of_each(generation: int, threads: int) -> None:
    nums = [70, 3, 130, 64]
    layers = [_draw(33, 77, num, torch.bfloat16 if num == 130 else torch.float32) for num in nums]
    x, packed = layers[0][0], [kernels.pack_rows(weight) for _, weight, _ in layers]
    packed[3] = kernels.pack_rows(layers[3][1], "int4")
    biases = [None, *(bias for *_, bias in layers[1:])]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = kernels.row_linears(x, packed, nums, biases=biases)
    finally:
        torch.set_num_threads(before)
    for y, w, num, bias in zip(got, packed, nums, biases, strict=True):
        assert torch.equal(y, kernels.row_linear(x, w, num, bias=bias)), num


def test_several_layers_under_vmap() -> None:
    x, weights = torch.randn(2, 3, 5), torch.randn(2, 4, 5)
    packed = torch.stack([kernels.pack_rows(w) for w in weights])
    shared = torch.vmap(lambda x: kernels.row_linears(x, [packed[0], packed[1]], [4, 2]))(x)
    apart = torch.vmap(lambda x, w: kernels.row_linears(x, [w, packed[0]], [4, 4]))(x, packed)
    assert all(
        torch.equal(y, kernels.row_linear(x, packed[i], n)) for i, (y, n) in enumerate(zip(shared, (4, 2), strict=True))
    )
    assert all(torch.equal(apart[0][i], kernels.row_linear(x[i], packed[i], 4)) for i in range(2))
    assert torch.equal(apart[1], kernels.row_linear(x, packed[0], 4))


@pytest.mark.parametrize("ranks, chunks", [(2, 8), (4, 8), (3, 24)])
def test_ranks_that_hold_chunks_add_the_nodes_of_one_tree(ranks: int, chunks: int) -> None:
    k, num = 24 * 7, 33
    x, weight, bias = _draw(5, k, num)
    each, size = k // ranks, chunks // ranks
    parts = [
        _own(x[:, r * each : (r + 1) * each], weight[:, r * each : (r + 1) * each], chunks=size) for r in range(ranks)
    ]
    assert torch.equal(_row_linear.sum_chunks(parts) + bias, _own(x, weight, bias, chunks=chunks))


def test_values_that_are_not_finite(generation: int) -> None:
    x, weight, _ = _draw(4, 77, 9)
    x[0, 3], x[1, 5], x[2, 7], weight[2, 7] = math.inf, math.nan, 1e38, 1e38
    got = _own(x, weight)
    with kernels.implemented_by("reference"):
        want = _own(x, weight)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())
    assert got[1].isnan().all() and got[3].isfinite().all()


def test_triton_has_the_bits_of_a_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, weight, bias = _draw(19, 21, 70)
    with kernels.implemented_by("triton"):  # whose interpreter rounds products, so that its bits are its own
        got = _own(x, weight, bias)
        assert torch.equal(torch.cat([_own(row, weight, bias) for row in x.split(1)]), got)
    torch.testing.assert_close(got, _own(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_errors_are_below_those_of_a_single_chain() -> None:
    x, weight, _ = _draw(16, 1024, 64)
    exact = x.double() @ weight.double().T
    error = [float((_own(x, weight, chunks=n) - exact).square().mean().sqrt()) for n in (1, 8)]
    assert error[1] < 0.7 * error[0]


@pytest.mark.parametrize(
    "call, kind, said",
    [
        (
            lambda: kernels.pack_rows(torch.ones(2, 2, dtype=torch.float16)),
            TypeError,
            "weight must be .*, got torch.float16",
        ),
        (lambda: _own(torch.ones(2, 3).double(), torch.ones(2, 3)), TypeError, "got x of torch.float64"),
        (
            lambda: _own(torch.ones(2, 4), torch.ones(2, 3)),
            ValueError,
            r"packed is of shape \(1, 3, 64\), must be \(1, 4, 64\)",
        ),
        (lambda: _own(torch.ones(2, 3), torch.ones(2, 3), chunks=0), ValueError, "chunks must be from 1 to .*, got 0"),
        (lambda: _own(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3)), ValueError, r"bias is of shape \(3,\)"),
        (
            lambda: kernels.row_linears(torch.ones(2, 3), [kernels.pack_rows(torch.ones(2, 3))], [2, 2]),
            ValueError,
            "1 weights, 2 nums and 1 biases. Each layer must have one of each",
        ),
    ],
)
def test_refusals(call, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        call()


def test_no_rows_and_no_inputs() -> None:
    assert _own(torch.ones(0, 3), torch.ones(2, 3)).shape == (0, 2)
    for kind in ("native", "reference") if _build.library() else ("reference",):
        with kernels.implemented_by(kind):
            got = _own(torch.ones(2, 0), torch.ones(3, 0), torch.arange(3.0))
            assert torch.equal(got, torch.arange(3.0).expand(2, 3)), kind
            assert _own(torch.ones(2, 0), torch.ones(0, 0)).shape == (2, 0), kind


def test_a_backward_is_refused() -> None:
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    for y in (_own(x, weight.detach()), _own(x.detach(), weight)):
        with pytest.raises(NotImplementedError, match=r"row_linear has no derivative: call it on x\.detach"):
            y.sum().backward()
    assert x.grad is None and weight.grad is None


NO_ROOM = """
import resource, torch
from shardfn import kernels

torch.set_num_threads(4)
x, packed = torch.randn(64, 300), kernels.pack_rows(torch.randn(700, 300))
alone = torch.cat([kernels.row_linear(row, packed, 700) for row in x.split(1)])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 20), -1))  # less than the stack of one more thread
print(torch.equal(kernels.row_linear(x, packed, 700), alone))
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
def test_without_more_threads_this_one_does_the_work() -> None:
    env = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", NO_ROOM], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]
