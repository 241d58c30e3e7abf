"""Covers weights in codes: bits of kernels.row_linear are those of the decoded weights, blocks those of GGUF."""

import math
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shardfn import kernels

NIGHTLY = pytest.mark.nightly
CODES: tuple[kernels.Quantization, ...] = ("int8", "int4")
# Inputs that end within a group, and chunks of them that begin within one, on odd and even inputs.
SHAPES = [(77, 70), (3, 1), (96, 64), pytest.param((1409, 130), marks=NIGHTLY)]


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _pack(weight: Tensor, codes: kernels.Codes) -> Tensor:
    """A weight in codes. Scales of "int4_wide" are products with a number of 6 bits, as of GGUF's Q4_K."""
    if codes != "int4_wide":
        return kernels.pack_rows(weight, codes)
    k = -(-weight.shape[1] // 32) * 32
    return kernels.pack_blocks(_make_wide(torch.nn.functional.pad(weight, (0, k - weight.shape[1]))), k)


def _make_wide(weight: Tensor) -> Tensor:
    parts = kernels.quantize_blocks(weight, "int4").view(len(weight), -1, 20)
    numbers = parts[..., :4].contiguous().view(torch.float16).float() * torch.tensor([53.0, 61.0]) / 64
    return torch.cat([numbers.view(torch.uint8), parts[..., 4:]], -1).flatten(1)


def _of_gguf(blocks: Tensor, codes: str) -> Tensor:
    """GGUF's definition of Q8_0 and Q4_1, block by block."""
    n, size = blocks.shape[0], 34 if codes == "int8" else 20
    block = blocks.view(n, -1, size)
    scale = block[..., :2].contiguous().view(torch.float16).float()
    if codes == "int8":
        return (scale * block[..., 2:].contiguous().view(torch.int8).float()).view(n, -1)
    least = block[..., 2:4].contiguous().view(torch.float16).float()
    q = torch.cat([block[..., 4:] % 16, block[..., 4:] // 16], -1)
    return (scale * q.float() + least).view(n, -1)


@pytest.mark.parametrize("codes", [*CODES, "int4_wide"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_the_decoded_weight(generation: int, shape: tuple[int, int], codes: kernels.Codes) -> None:
    k, n = shape
    x, weight, bias = _draw(34, k), _draw(n, k), _draw(n)
    packed = _pack(weight, codes)
    whole = kernels.pack_rows(kernels.unpack_rows(packed, n, k))
    for chunks in (8, 1, 24):
        want = kernels.row_linear(x, whole, n, chunks=chunks, bias=bias)
        for rows in (*range(1, 19), 33, 34):  # from 9, 17 or 33 on panels are decoded once
            got = kernels.row_linear(x[:rows], packed, n, chunks=chunks, bias=bias)
            assert torch.equal(got, want[:rows]), (chunks, rows)


@pytest.mark.parametrize("codes", [*CODES, "int4_wide"])
def test_decoded_blocks_have_the_dtype_that_is_asked_for(codes: kernels.Codes) -> None:
    blocks = _make_wide(_draw(5, 64)) if codes == "int4_wide" else kernels.quantize_blocks(_draw(5, 64), codes)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        with kernels.implemented_by("reference"):
            want = kernels.dequantize_blocks(blocks, 50, dtype=dtype)
        assert want.dtype == dtype and torch.equal(kernels.dequantize_blocks(blocks, 50, dtype=dtype), want)


@pytest.mark.day("int8-reference", "int8-triton", "int4-reference")
@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("codes", [*CODES, "int4_wide"])
def test_every_implementation_multiplies_by_the_decoded_weight(
    kind: str, codes: kernels.Codes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, weight = _draw(5, 45), _draw(70, 45)
    packed = _pack(weight, codes)
    decoded = kernels.unpack_rows(packed, 70, 45)
    with kernels.implemented_by(kind):
        got = kernels.row_linear(x, packed, 70)
        assert torch.equal(got, kernels.row_linear(x, kernels.pack_rows(decoded), 70))
    if kind == "reference":
        assert torch.equal(got, kernels.row_linear(x, packed, 70))


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e4])
def test_errors_are_within_their_bounds(codes: kernels.Quantization, size: float) -> None:
    weight = _draw(40, 320) * size + (0 if codes == "int8" else size)
    weight[3, 32:64], weight[4] = 0, size
    decoded = kernels.unpack_rows(kernels.pack_rows(weight, codes), 40, 320)
    groups, error = weight.view(40, 10, 32), (decoded - weight).view(40, 10, 32).abs()
    most = groups.abs().amax(-1, keepdim=True)
    scale = most / 127 if codes == "int8" else (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
    assert bool((error <= 0.5005 * scale + 2**-11 * most + (2**-18 if codes == "int8" else 2**-21)).all())
    assert not decoded[3, 32:64].any()


@pytest.mark.parametrize("codes", CODES)
def test_blocks_of_gguf_are_read_without_change(codes: kernels.Quantization) -> None:
    size = 34 if codes == "int8" else 20
    blocks = torch.randint(0, 256, (70, 3 * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    # Scales and least values: the smallest and the largest numbers, subnormal ones, both signs.
    numbers = torch.tensor([6e-8, 6.1e-5, 0.0, -3e-6, 65504.0, 1.5, -0.25]).half().repeat(30)[: 70 * 3].view(70, 3, 1)
    for at in (0, 2)[: 1 if codes == "int8" else 2]:
        blocks.view(70, 3, size)[..., at : at + 2] = numbers.view(torch.uint8)
    packed = kernels.pack_blocks(blocks, 96)
    decoded = kernels.unpack_rows(packed, 70, 96)
    assert torch.equal(decoded, _of_gguf(blocks, codes))
    assert packed.nbytes == 128 * 3 * size
    x = _draw(3, 96)
    assert torch.equal(kernels.row_linear(x, packed, 70), kernels.row_linear(x, kernels.pack_rows(decoded), 70))
    index = torch.tensor([[0, 69], [64, 3]])
    assert torch.equal(kernels.take_rows(packed, index, 96), decoded[index])


@pytest.mark.parametrize("codes", CODES)
def test_blocks_that_are_decoded_become_the_same_blocks(codes: kernels.Quantization) -> None:
    blocks = kernels.quantize_blocks(_draw(9, 64), codes)
    decoded = _of_gguf(blocks, codes)
    again = kernels.unpack_rows(kernels.pack_rows(decoded, codes), 9, 64)
    torch.testing.assert_close(again, decoded, rtol=0, atol=1e-3)
    if codes == "int8":
        assert torch.equal(again, decoded)


@pytest.mark.parametrize("codes", CODES)
def test_values_without_a_code_are_nan(codes: kernels.Quantization) -> None:
    for wrong in (math.nan, math.inf, -math.inf, 1e30):
        weight = _draw(2, 64)
        weight[1, 40] = wrong
        packed = kernels.pack_rows(weight, codes)
        decoded = kernels.unpack_rows(packed, 2, 64)
        assert decoded[1, 32:].isnan().all() and decoded[0].isfinite().all() and decoded[1, :32].isfinite().all()
        y = kernels.row_linear(_draw(3, 64), packed, 2)
        assert y[:, 1].isnan().all() and y[:, 0].isfinite().all()


def test_scales_are_read_where_subnormal_numbers_are_flushed() -> None:
    packed, x = kernels.pack_rows(_draw(4, 32) * 1e-4, "int8"), _draw(2, 32)
    want = kernels.row_linear(x, packed, 4)
    assert want.abs().min() > 0
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush them")
    try:
        assert torch.equal(kernels.row_linear(x, packed, 4), want)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    "call, kind, said",
    [
        (lambda: kernels.pack_rows(torch.ones(2, 2), cast("Any", "int3")), ValueError, "codes must be .*, got 'int3'"),
        (
            lambda: kernels.quantize_blocks(torch.ones(2, 33), "int8"),
            ValueError,
            "rows of weight must be a multiple of 32, .*, got 33",
        ),
        (lambda: kernels.pack_blocks(torch.ones(2, 34), 32), TypeError, "blocks are torch.float32"),
        (
            lambda: kernels.pack_blocks(torch.ones(2, 35, dtype=torch.uint8), 32),
            ValueError,
            r"rows of 35 bytes, and rows of 32 elements have 34 \(Q8_0\) or 20 \(Q4_1\)",
        ),
        (
            lambda: kernels.row_linear(torch.ones(2, 3), torch.ones(1, 3, 64, dtype=torch.uint8), 4),
            ValueError,
            "packed must be from pack_rows or pack_blocks, got bytes",
        ),
        (
            lambda: kernels.row_linear(torch.ones(2, 33), kernels.pack_rows(torch.ones(4, 32), "int8"), 4),
            ValueError,
            r"packed is of shape \(1, 1, 2176\), must be \(1, 2, 2176\)",
        ),
    ],
)
def test_refusals(call: Callable[[], object], kind: type[Exception], said: str) -> None:
    with sys.modules["shape_checks"].unchecked(), pytest.raises(kind, match=said):
        call()


def test_no_rows_and_no_inputs() -> None:
    for codes in CODES:
        packed = kernels.pack_rows(torch.ones(2, 3), codes)
        assert kernels.row_linear(torch.ones(0, 3), packed, 2).shape == (0, 2)
        none = kernels.pack_rows(torch.ones(3, 0), codes)
        assert torch.equal(kernels.row_linear(torch.ones(2, 0), none, 3), torch.zeros(2, 3))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_part_of_a_weight_is_read_in_place(quantization: kernels.Quantization | None) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(150, 256, generator=draw), torch.randn(7, 64, generator=draw)
    part, skipped = kernels.slice_panels(kernels.pack_rows(weight, quantization), (70, 140), (64, 128))
    assert skipped == 6 and not part.is_contiguous()
    want = kernels.row_linear(x, kernels.pack_rows(weight[64:140, 64:128], quantization), 76)
    assert torch.equal(kernels.row_linear(x, part, 76), want)
    [rounded] = kernels.linears(x, [part], [76], activations="int8")
    assert torch.equal(rounded, kernels.linears(x, [part.contiguous()], [76], activations="int8")[0])
