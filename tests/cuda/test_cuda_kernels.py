"""Covers Triton's kernels on a GPU: the bits of the reference on the CPU. Never run so far.

Under the interpreter and as text they are covered by `tests/kernels`.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import kernels

SHAPES = [(1, 8), (2, 256), (3, 1504), (5, 4096)]


def _bits(x: Tensor) -> Tensor:
    """The bits as integers, so that `torch.equal` compares NaN with NaN."""
    kind = {4: torch.int32, 2: torch.int16, 8: torch.int64}.get(x.element_size())
    return x.view(kind) if kind is not None and x.is_floating_point() else x


def _tensors(found: Any) -> list[Tensor]:
    return [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, Tensor)]


def _same(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The CPU's reference, after a check that the GPU gives the same bits, also of tensors written in place."""
    pytest.importorskip("triton")
    here = [x.clone() if isinstance(x, Tensor) else x for x in args]
    there = [x.cuda() if isinstance(x, Tensor) else x for x in args]
    with kernels.implemented_by("reference"):
        want = run(*here, **options)
    got = run(*there, **options)  # other devices than a CPU use Triton by default
    pairs = zip([*_tensors(got), *_tensors(tuple(there))], [*_tensors(want), *_tensors(tuple(here))], strict=True)
    for a, b in pairs:
        assert a.is_cuda and a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(_bits(a.cpu()), _bits(b))
    return want


def _draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(math.prod(shape))
    return (torch.randn(shape, generator=g) * 10 ** torch.randn(shape[0], *(1,) * (len(shape) - 1), generator=g)).to(
        dtype
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_signs(shape: tuple[int, int], dtype: torch.dtype) -> None:
    bits = _same(kernels.pack_signs, _draw(*shape, dtype=dtype))
    _same(kernels.unpack_signs, bits, torch.rand(shape[0]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sign_compress_and_mean(shape: tuple[int, int]) -> None:
    x, error = _draw(*shape), _draw(*shape) / 8
    _same(kernels.sign_compress, x, error)
    _same(kernels.sign_compress_, x, error)
    bits, scales = kernels.pack_signs(x), torch.rand(shape[0])
    _same(kernels.sign_mean, bits, scales, error[0])
    _same(kernels.sign_mean_, bits, scales, error[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantizers(shape: tuple[int, int], bits: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        codes, scales = _same(kernels.quantize, _draw(*shape, dtype=dtype), bits=bits)
        for out in (torch.float32, torch.bfloat16, torch.float16):
            _same(kernels.dequantize, codes, scales, shape[1], bits=bits, dtype=out)
    many = [torch.stack([x, x, x]) for x in kernels.quantize(_draw(*shape), bits=bits)]
    _same(kernels.dequantize_sum, *many, shape[1], bits=bits)
    _same(kernels.dequantize_sum_quantize, *many, shape[1], bits=bits)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moments(shape: tuple[int, int]) -> None:
    m, x = _draw(*shape), _draw(*shape) / 3
    _same(kernels.moving_average_, m, x, 0.9)
    scalars = tuple(torch.tensor([0.1, 0.9, 0.01]))
    _same(kernels.preconditioned_step, m, x, m.square(), *scalars, eps=1e-8)
    _same(kernels.preconditioned_step_, m, x, m.square(), *scalars, eps=1e-8)
