"""Covers block quantizers: golden values, the error's bound, every implementation with the reference's bits, sums."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import kernels

X = torch.tensor([[-1.0, -0.5, 0, 0.25, 0.75, 1]])
SHAPES = [(0, 4), (2, 0), (1, 1), (3, 7), (3, 8), (2, 255), (2, 256), (1, 257), (1, 1501)]


def test_golden_values(kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        codes, scales = kernels.quantize(X.to(dtype))
        assert codes.tolist() == [[-128, -64, 0, 32, 96, 127]] and scales.tolist() == [[2 / 256]]
        codes, scales = kernels.quantize(X.to(dtype), bits=4)
        # -8 -4, 0 2, 6 7: the first of two in the high nibble
        assert codes.tolist() == [[0x8C, 0x02, 0x67]] and scales.tolist() == [[2 / 16]]
    assert kernels.dequantize(codes, scales, 6, bits=4).tolist() == [[-1, -0.5, 0, 0.25, 0.75, 0.875]]
    ties = torch.tensor([[-128.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert kernels.quantize(ties)[0].tolist() == [[-128, 0, 2, 2, 0, -2]]


def test_zeros_and_values_that_are_not_finite(kind: str) -> None:
    x = torch.tensor([[0, 0, 1e-40, -1e-36, math.nan, 1, math.inf, -1, -4, 4, 0, 0, 1]])
    for bits in (8, 4):
        codes, scales = kernels.quantize(x, bits=bits, block=2)
        assert scales[0, :2].tolist() == [1, 1] and scales[0, 2].isnan() and scales[0, 3].isinf()
        back = kernels.dequantize(codes, scales, 13, bits=bits, block=2)[0]
        assert not back[:4].any() and back[4:8].isnan().all() and back[8:12].isfinite().all()
        assert back[8] == -4 and back[12] == 1 - 2.0 ** (1 - bits)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32) if x.dtype == torch.float32 else x


def _same(asked: Any, run: Any, *args: Any, **options: Any) -> Any:
    with kernels.implemented_by("reference"):
        want = run(*args, **options)
    with kernels.implemented_by(asked):
        got = run(*args, **options)
    for a, b in zip(*((t,) if isinstance(t, Tensor) else t for t in (want, got)), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    return want


@pytest.mark.day(4)
@pytest.mark.parametrize(
    "shape",
    [pytest.param(x, marks=pytest.mark.nightly if x in ((1, 1501), (3, 8), (2, 255)) else ()) for x in SHAPES],
    ids=str,
)
def test_bits_of_the_reference_and_bound_of_the_error(shape: tuple[int, int], kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    r, c = shape
    for bits, block in ((8, 256), (4, 256), (8, 101), (4, 1500)):
        like: list[Any] = []
        options: dict[str, Any] = {"bits": bits, "block": block}
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = (torch.randn(shape, generator=draw) * 10 ** torch.randn(r, 1, generator=draw)).to(dtype)
            like.append(_same(kind, kernels.quantize, x, **options))
            back = _same(kind, kernels.dequantize, *like[-1], c, **options)
            _check_bound(x.float(), back, bits, block)
        # Triton's interpreter cuts bits off where a GPU rounds to bf16.
        for dtype in (torch.float16,) if kind == "triton" else (torch.float16, torch.bfloat16):
            half = _same(kind, kernels.dequantize, *like[0], c, dtype=dtype, **options)
            out = torch.empty_like(half)
            codes, scales = like[0]
            assert kernels.dequantize(codes, scales, c, out=out, **options) is out and torch.equal(out, half)
        codes, scales = (torch.stack(parts) for parts in zip(*like, strict=True))
        total = _same(kind, kernels.dequantize_sum, codes, scales, c, **options)
        again = _same(kind, kernels.dequantize_sum_quantize, codes, scales, c, **options)
        assert all(torch.equal(a, b) for a, b in zip(again, kernels.quantize(total, **options), strict=True))


def _check_bound(x: Tensor, back: Tensor, bits: int, block: int) -> None:
    for lo in range(0, x.shape[1], block):
        part, got = x[:, lo : lo + block], back[:, lo : lo + block]
        top = part.abs().amax(1, keepdim=True)
        bound = torch.where(part > top * (1 - 1.5 * 2.0**-bits), 2 * top / 2**bits, top / 2**bits)
        assert ((part - got).abs() <= bound + top * 2**-22).all()  # the rounding of fp32


@pytest.mark.nightly
def test_rows_longer_than_a_core_remembers(kind: str) -> None:
    if kind == "triton":
        pytest.skip("no edge of Triton's")
    x = torch.randn(2, 70_001, generator=torch.Generator().manual_seed(0))
    for part in (x, x.bfloat16(), x[:, ::2], x[:, :300].repeat(300, 1)):
        for bits, block in ((8, 256), (4, 40_000)):
            codes, scales = _same(kind, kernels.quantize, part, bits=bits, block=block)
            size = {"bits": bits, "block": block}
            _same(kind, kernels.dequantize, codes, scales, part.shape[1], dtype=part.dtype, **size)
            twice = torch.stack([codes, codes]), torch.stack([scales, scales])
            _same(kind, kernels.dequantize_sum_quantize, *twice, part.shape[1], **size)
