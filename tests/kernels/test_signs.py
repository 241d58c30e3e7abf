"""Covers signs: golden values, zeros and NaN, every implementation with the reference's bits, scales, memory reused."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardfn import kernels
from shardfn.kernels._fixed_bits import SPAN

X0 = torch.tensor([[1, -2, 3, -4, 0.5, 0.5, -0.5, 0]])
X1 = torch.tensor([[-1, -2, 1, 4, 0.25, -0.5, -0.75, 2]])
E0 = [-0.96054839, -0.03945161, 1.03945161, -2.03945161, -1.46054839, -1.46054839, 1.46054839, -1.96054839]
LARGE = 1 << 15
E1 = [0.83285979, -0.16714021, -0.83285979, 2.16714021, -1.58285979, 1.33285979, 1.08285979, 0.16714021]


def test_golden_values_of_workers_and_servers(kind: str) -> None:
    zeros = torch.zeros(1, 8)
    (b0, s0, e0), (b1, s1, e1) = (kernels.sign_compress(x, zeros) for x in (X0, X1))
    assert (s0.item(), s1.item()) == tuple(map(pytest.approx, (1.960548392669765, 1.8328597873268972)))
    torch.testing.assert_close(e0[0], torch.tensor(E0))
    torch.testing.assert_close(e1[0], torch.tensor(E1))
    again = [kernels.sign_compress(x, e)[1].item() for x, e in ((X0, e0), (X1, e1))]
    assert again == list(map(pytest.approx, (2.8187934905, 2.5015857417)))
    # Chunks have four elements there, and here each of them twice: means are the same.
    chunks = [torch.tensor([[b >> 4 | b & 240] for b in map(int, (b0, b1))], dtype=torch.uint8)]
    chunks += [torch.tensor([[b & 15 | (b & 15) << 4] for b in map(int, (b0, b1))], dtype=torch.uint8)]
    want = [[-1.27808761, -0.55477218, 0.55477218, 1.27808761], [0.25380001, -1.57905978, -0.25380001, 0.25380001]]
    for bits, root, error in zip(chunks, (1.341931909598993, 1.6429040834778512), want, strict=True):
        _, scale, left = kernels.sign_mean(bits, torch.cat([s0, s1]), torch.zeros(8))
        assert scale.item() == pytest.approx(root)
        torch.testing.assert_close(left, torch.tensor(error * 2))


def test_signs_of_zeros_and_nans(kind: str) -> None:
    x = torch.tensor([[0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -1e-45, -math.nan]])
    bits = kernels.pack_signs(x)
    assert bits.tolist() == [[0b11010100]]
    out = kernels.unpack_signs(bits, torch.tensor([2.0]))
    assert out.tolist() == [[2, 2, -2, 2, -2, 2, -2, -2]]
    y = torch.tensor([[-0.0, 0, 3, -4, 0, 0, 0, 0]])
    bits, scale, error = kernels.sign_compress(y, -torch.zeros(1, 8))
    assert torch.equal(kernels.unpack_signs(bits, scale) + error, y)
    bits, scale, error = kernels.sign_compress(torch.full((2, 8), math.nan)[:1], torch.zeros(2, 8))
    assert scale[0].isnan() and error[0].isnan().all() and not bits[0].any()  # and the other row is unaffected
    assert (scale[1], bits[1].item(), error[1].any()) == (0, 255, False)


def _same(run: Callable[[], Any], asked: str) -> None:
    with kernels.implemented_by("reference"):
        want = run()
    with kernels.implemented_by(asked):
        got = run()
    for a, b in zip(*((t,) if isinstance(t, Tensor) else t for t in (want, got)), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.day(11)
@pytest.mark.parametrize(
    "shape",
    [
        (0, 8),
        (2, 0),
        (1, 8),
        (3, 1000),
        (2, 1032),
        (2, LARGE + 8),
        pytest.param((1, SPAN + 8), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_bits_of_the_reference(shape: tuple[int, int], kind: str) -> None:
    if kind == "triton" and shape == (2, LARGE + 8):
        pytest.skip("no edge of Triton's")
    draw = torch.Generator().manual_seed(0)
    x, error = torch.randn(2, *shape, generator=draw)
    x[:, ::3], error[:, ::3] = -0.0, -0.0
    short = x.flatten()[: max(0, x.numel() - 5)]
    cases = [(x, False), (x.bfloat16(), True), (short.half(), False), (short, True)]
    for part, whole in cases if x.numel() < SPAN else cases[3:]:
        _same(lambda part=part, whole=whole: kernels.sign_compress(part, error, whole=whole), kind)
    bits, scale, _ = kernels.sign_compress(x, error)
    _same(lambda: kernels.unpack_signs(bits, scale), kind)
    _same(lambda: kernels.pack_signs(x.half()), kind)
    for k in (1, 2, 3) if shape[0] and x.numel() < SPAN else ():
        codes, scales = bits[torch.arange(k) % shape[0]], torch.rand(k, generator=draw)
        _same(lambda codes=codes, scales=scales: kernels.sign_mean(codes, scales, error[0]), kind)


def test_scale_is_the_number_next_to_the_true_one(kind: str) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4096, generator=draw) * torch.tensor([[1e-30], [1e30]])
    x[1, 0] = 3e37  # beside which the others are lost in fp32
    _, scale, _ = kernels.sign_compress(x, torch.zeros_like(x))
    want = np.sqrt(np.mean(x.numpy().astype(np.float64) ** 2, axis=1)).astype(np.float32)
    assert scale.tolist() == want.tolist()
    _, scale, _ = kernels.sign_compress(x, torch.zeros_like(x), whole=True)
    assert scale.tolist() == [np.float32(np.sqrt(np.mean(x.numpy().astype(np.float64) ** 2)))] * 2


def test_memory_is_written_where_asked(kind: str) -> None:
    x, error = torch.randn(2, 3, 16).unbind()
    bits, scale, left = kernels.sign_compress(x.t().contiguous().t(), error)  # x in another order in memory
    old = error.clone()
    assert torch.equal(kernels.sign_compress_(x, error)[0], bits) and torch.equal(error, left)
    assert not torch.equal(old, error)
    out = torch.empty(3, 16)
    assert kernels.unpack_signs(bits, scale, out=out) is out
    torch.testing.assert_close(out + left, x + old)
    server = torch.randn(16)
    before = server.clone()
    codes, root, rest = kernels.sign_mean(bits, scale, server)
    assert torch.equal(server, before)
    got = kernels.sign_mean_(bits, scale, server)
    assert torch.equal(server, rest) and torch.equal(got[0], codes) and torch.equal(got[1], root)
    torch.testing.assert_close(kernels.unpack_signs(codes[None], root)[0] + rest, out.mean(0) + before)
