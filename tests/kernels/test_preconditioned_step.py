"""Covers moving averages and Adam's step from its moments: close to float64, and the reference's bits everywhere."""

import math

import pytest
import torch
from torch import Tensor

from shardfn import kernels

LR, C1, C2 = torch.tensor([1e-3, 0.9, 0.01])


def _moments(n: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(n)
    p, m = torch.randn(2, n, generator=draw)
    nu = torch.rand(n, generator=draw) ** 8  # over many orders of magnitude
    nu[::7] = 0
    for x, i, value in ((nu, 3, math.nan), (m, 4, math.inf), (nu, 5, math.inf), (p, 6, math.inf), (nu, 8, -1.0)):
        x[i : i + 1] = value
    return p, m, nu


@pytest.mark.day(27)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("corrections", [(C1, C2), (None, C2), (None, None)], ids=["both", "second", "none"])
@pytest.mark.parametrize("n", [0, 1, 8, 1023, 1025, (1 << 15) + 1])
def test_bits_of_the_reference(n: int, corrections: tuple[Tensor | None, ...], decay: float, kind: str) -> None:
    p, m, nu = _moments(n)
    with kernels.implemented_by("reference"):
        want = kernels.preconditioned_step(p, m, nu, LR, *corrections, eps=1e-8, weight_decay=decay)
    got = kernels.preconditioned_step(p, m, nu, LR, *corrections, eps=1e-8, weight_decay=decay)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    moved = p.clone()
    kernels.preconditioned_step_(moved, m, nu, LR, *corrections, eps=1e-8, weight_decay=decay)
    torch.testing.assert_close(moved, p + want, rtol=0, atol=0, equal_nan=True)


def test_against_float64(kind: str) -> None:
    p, m, nu = (x[9:] for x in _moments(5000))
    got = kernels.preconditioned_step(p, m, nu, LR, C1, C2, eps=1e-8, weight_decay=0.1)
    p, m, nu, lr, c1, c2 = (x.double() for x in (p, m, nu, LR, C1, C2))
    u = torch.where(nu > 0, m / c1 / ((nu / c2).sqrt() + 1e-8), 0.0)
    torch.testing.assert_close(got.double(), -lr * (u + 0.1 * p), rtol=1e-6, atol=1e-9)


def test_an_element_without_a_variance_only_decays(kind: str) -> None:
    p, zeros = torch.tensor([2.0, -3.0]), torch.zeros(2)
    u = kernels.preconditioned_step(p, torch.ones(2), zeros, torch.tensor(0.5), eps=0.0, weight_decay=0.5)
    assert u.tolist() == [-0.5, 0.75]
    kernels.preconditioned_step_(p, torch.ones(2), zeros, torch.tensor(0.5), eps=0.0)
    assert p.tolist() == [2, -3]


@pytest.mark.parametrize("n", [0, 1, 8, 1023, 1025, (1 << 15) + 1])
def test_moving_averages_have_the_bits_of_the_reference(n: int, kind: str) -> None:
    m, x, _ = _moments(n)
    want, got = m.clone(), m.clone()
    with kernels.implemented_by("reference"):
        kernels.moving_average_(want, x, 0.9)
    kernels.moving_average_(got, x, 0.9)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
