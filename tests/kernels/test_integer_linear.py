"""Covers kernels.integer_linears: whole-number sums, the bits of the definition in any company, on every processor."""

import math
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shardfn import kernels
from shardfn.kernels import _build, _integer_linear

CODES: tuple[kernels.Quantization, ...] = ("int8", "int4")
# Inputs and outputs that end within a group and a panel.
SHAPES = [(77, 70), (3, 1), (288, 130), pytest.param((1409, 201), marks=pytest.mark.nightly)]


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _pack(n: int, k: int, codes: kernels.Codes) -> Tensor:
    """Codes of all values, -128 too, which GGUF files may hold."""
    random = torch.Generator().manual_seed(n + k)
    groups, size = -(-k // 32), kernels.BLOCK_BYTES[codes]
    blocks = torch.randint(0, 256, (n, groups, size), dtype=torch.uint8, generator=random)
    if codes == "int4_wide":
        numbers = torch.randn(n, groups, 2, generator=random).half().float() * torch.tensor([53.0, 61.0]) / 512
        blocks[..., :8] = numbers.view(torch.uint8)
        return kernels.pack_blocks(blocks.flatten(1), 32 * groups)
    numbers = torch.randn(n, groups, size - (32 if codes == "int8" else 16), generator=random)[..., ::2] / 8
    blocks[..., : 2 * numbers.shape[-1]] = numbers.half().view(torch.uint8)
    return kernels.pack_blocks(blocks.flatten(1), 32 * groups)


def _define(x: Tensor, packed: Tensor, n: int, chunks: int, bias: Tensor | None) -> Tensor:
    with kernels.implemented_by("reference"):
        return kernels.integer_linears(x, [packed], [n], chunks=chunks, biases=[bias])[0]


@pytest.mark.parametrize("generation", [4, 3, 1])
@pytest.mark.parametrize("codes", [*CODES, "int4_wide"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_bits_of_the_definition_in_any_company(
    generation: int, shape: tuple[int, int], codes: kernels.Codes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if _build.library() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(_build, "NEWEST", generation)
    k, n = shape
    x, packed, bias = _draw(34, k), _pack(n, k, codes), _draw(n)
    x[3], x[4, :2] = 0, 1e-30
    for chunks in (8, 1, 3):
        want = _define(x, packed, n, chunks, bias)
        for rows in (*range(1, 14), 33, 34):
            [got] = kernels.integer_linears(x[:rows], [packed], [n], chunks=chunks, biases=[bias])
            assert torch.equal(got, want[:rows]), (chunks, rows)


@pytest.mark.parametrize("codes", [*CODES, "int4_wide"])
def test_triton_has_the_bits_of_the_definition(codes: kernels.Codes, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, packed = _draw(5, 150), _pack(70, 150, codes)
    with kernels.implemented_by("triton"):
        [got] = kernels.integer_linears(x, [packed], [70], chunks=2)
    want = _define(x, packed, 70, 2, None)
    # The interpreter of Triton before 3.9 rounds the product of an `fma`, so that sums differ in their last bits.
    fused = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
    torch.testing.assert_close(got, want, rtol=0 if fused else 1e-6, atol=0 if fused else 1e-4)


@pytest.mark.parametrize("codes", CODES)
def test_the_definition_is_the_product_of_rounded_rows(codes: kernels.Quantization) -> None:
    x, packed = _draw(7, 200) * torch.logspace(-3, 3, 200), _pack(40, 200, codes)
    rounded = _integer_linear.round_rows(x)
    near = (rounded.q * rounded.scale[..., None]).flatten(1)[:, :200]
    top = torch.nn.functional.pad(x, (0, 24)).view(7, 7, 32).abs().amax(-1).repeat_interleave(32, 1)[:, :200]
    assert bool(((near - x).abs() <= top * (0.5001 / 127)).all())
    want = near.double() @ kernels.unpack_rows(packed, 40, 200).double().T
    size = near.double().abs() @ kernels.unpack_rows(packed, 40, 200).double().abs().T
    assert bool(((_define(x, packed, 40, 8, None) - want).abs() <= 2e-6 * size).all())


@pytest.mark.parametrize("codes", CODES)
def test_ranks_with_whole_groups_compute_the_nodes_of_the_tree(codes: kernels.Quantization) -> None:
    x = _draw(3, 384)
    weight = _draw(20, 384)
    [whole] = kernels.integer_linears(x, [kernels.pack_rows(weight, codes)], [20])
    for ranks in (2, 4):
        cut = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
        parts = [kernels.integer_linears(a, [kernels.pack_rows(w, codes)], [20], chunks=8 // ranks)[0] for a, w in cut]
        assert torch.equal(kernels.sum_chunks(parts), whole)


def test_layers_of_both_codes_in_one_call_are_those_of_separate_calls() -> None:
    x, packed, biases = _draw(2, 9, 77), [_pack(70, 77, "int8"), _pack(5, 77, "int4")], [None, _draw(5)]
    got = kernels.integer_linears(x, packed, [70, 5], biases=biases)
    for y, w, n, bias in zip(got, packed, (70, 5), biases, strict=True):
        assert torch.equal(y.flatten(0, 1), _define(x.flatten(0, 1), w, n, 8, bias))
    mapped = torch.vmap(lambda x: kernels.integer_linears(x, packed, [70, 5], biases=biases))(x)
    assert all(map(torch.equal, mapped, got))


def test_values_without_a_code_make_nan_in_the_row_alone() -> None:
    for codes in CODES:
        for wrong in (math.nan, math.inf, -math.inf):
            x, packed = _draw(3, 70), kernels.pack_rows(_draw(66, 70), codes)
            x[1, 40] = wrong
            for y in (kernels.integer_linears(x, [packed], [66])[0], _define(x, packed, 66, 8, None)):
                assert y[1].isnan().all() and y[::2].isfinite().all()


def test_no_rows_and_no_inputs() -> None:
    for codes in CODES:
        packed = kernels.pack_rows(torch.ones(2, 3), codes)
        assert kernels.integer_linears(torch.ones(0, 3), [packed], [2])[0].shape == (0, 2)
        none = kernels.pack_rows(torch.ones(3, 0), codes)
        assert torch.equal(kernels.integer_linears(torch.ones(2, 0), [none], [3])[0], torch.zeros(2, 3))


W = kernels.pack_rows(torch.ones(4, 33), "int8")


@pytest.mark.parametrize(
    "call, kind, said",
    [
        (lambda: kernels.integer_linears(torch.ones(2, 33).double(), [W], [4]), TypeError, "x must be float32"),
        (lambda: kernels.integer_linears(torch.ones(2, 33), [W.float()], [4]), TypeError, "must be codes: pack_rows"),
        (lambda: kernels.integer_linears(torch.ones(2, 3), [W], [4]), ValueError, r"must be \(1, 1, 2176\)"),
        (lambda: kernels.integer_linears(torch.ones(2, 33), [W], [4, 5]), ValueError, "1 weights, 2 nums"),
        (lambda: kernels.integer_linears(torch.ones(2, 33), [W], [4], chunks=0), ValueError, "chunks must be from 1"),
        (
            lambda: kernels.integer_linears(torch.ones(2, 33), [W], [4], biases=[torch.ones(3)]),
            ValueError,
            "bias is of shape",
        ),
        (
            lambda: kernels.integer_linears(torch.ones(2, 33, requires_grad=True), [W], [4])[0].sum().backward(),
            NotImplementedError,
            "no derivative: rounded inputs",
        ),
    ],
)
def test_refusals(call: Callable[[], object], kind: type[Exception], said: str) -> None:
    with cast("Any", sys.modules["shape_checks"]).unchecked(), pytest.raises(kind, match=said):
        call()
