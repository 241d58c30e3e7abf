"""Covers `fit_blocks`: less error of weights or outputs than by rounding, and blocks that `quantize_blocks` keeps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn.kernels import dequantize_blocks, fit_blocks, pack_blocks, quantize_blocks, unpack_rows

N, K = 48, 96
CODES: Any = ("int8", "int4")


def weight() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0))


def moments() -> Tensor:
    """Those of inputs that depend on one another, of sizes from 1 to 10."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(400, K, generator=g) @ (torch.eye(K) + torch.randn(K, K, generator=g) / 8) * torch.logspace(0, 1, K)
    return x.T @ x / len(x)


def error_of_outputs(blocks: Tensor) -> float:
    """The mean square of the error of a layer's outputs, up to a factor."""
    d = dequantize_blocks(blocks, K) - weight()
    return float((d @ moments() * d).sum())


@pytest.mark.parametrize("codes", CODES)
def test_each_coder_has_less_of_its_own_error(codes: Any) -> None:
    w, h = weight(), moments()
    rounded, fitted = quantize_blocks(w, codes), fit_blocks(w, codes)
    weighed, compensated = fit_blocks(w, codes, h.diagonal()), fit_blocks(w, codes, h)
    assert len({(x.shape, x.dtype) for x in (rounded, fitted, weighed, compensated)}) == 1
    elements = [float((dequantize_blocks(x, K) - w).square().sum()) for x in (rounded, fitted)]
    assert elements[1] < 0.98 * elements[0]
    by_size = [float(((dequantize_blocks(x, K) - w).square() * h.diagonal()).sum()) for x in (fitted, weighed)]
    assert by_size[1] <= by_size[0]
    outputs = [error_of_outputs(x) for x in (rounded, fitted, weighed, compensated)]
    assert outputs[3] < 0.85 * min(outputs[:3])


@pytest.mark.day(4)
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("spread, middle", [(1.0, 0.0), (1e-3, 0.5), (1e-6, 0.0), (1e4, 0.0)])
def test_rounding_keeps_them(spread: float, middle: float, codes: Any) -> None:
    w = weight() * spread + middle
    for h in (None, moments().diagonal(), moments()):
        blocks = fit_blocks(w, codes, h)
        assert torch.equal(quantize_blocks(dequantize_blocks(blocks, K), codes), blocks)


@pytest.mark.parametrize("codes", CODES)
def test_values_are_those_that_row_linear_reads(codes: Any) -> None:
    blocks = fit_blocks(weight(), codes)
    want = unpack_rows(pack_blocks(blocks, K), N, K)
    assert torch.equal(dequantize_blocks(blocks, K), want)
    assert torch.equal(dequantize_blocks(blocks, K - 5, torch.bfloat16), want[:, :-5].bfloat16())
    assert torch.equal(dequantize_blocks(blocks.view(6, 8, -1), K), want.view(6, 8, K))
    odd = torch.cat([blocks.new_zeros(1), blocks.flatten()])[1:].view(blocks.shape)
    assert torch.equal(dequantize_blocks(odd, K), want)


def test_weights_without_a_spread() -> None:
    assert fit_blocks(torch.zeros(0, 32), "int4").shape[0] == 0
    for w in (torch.zeros(2, 32), torch.ones(2, 32)):
        for h in (None, torch.ones(32), torch.eye(32), torch.zeros(32), torch.zeros(32, 32)):
            assert torch.equal(dequantize_blocks(fit_blocks(w, "int4", h), 32), w)
    w = torch.ones(2, 32).index_fill(1, torch.tensor([3]), torch.inf)
    assert torch.equal(fit_blocks(w, "int4", torch.eye(32)), quantize_blocks(w, "int4"))


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"a multiple of 32, a block of codes, got 95\. Pad with"):
        fit_blocks(weight()[:, :95], "int4")
    with pytest.raises(ValueError, match=r"moments must have the shape \(96,\) .* a weight \(48, 96\), got \(4,\)"):
        fit_blocks(weight(), "int4", torch.ones(4))
    with pytest.raises(ValueError, match=r"rows of 60 bytes, and rows of 32 elements have 34 \(int8\) or 20 \(int4\)"):
        dequantize_blocks(torch.zeros(1, 60, dtype=torch.uint8), 32)
