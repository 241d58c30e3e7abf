"""Covers `nn.moe.residual`: the formula of PR-MoE, as DeepSpeed's layer computes it, and its derivatives."""

import torch

from shardfn.nn import moe

DRAW = torch.Generator().manual_seed(0)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=DRAW, dtype=torch.float64, requires_grad=True)


def test_it_mixes_by_the_coefficients_of_each_token() -> None:
    experts, mlp, x = (_randn(5, 4) for _ in range(3))
    layer = torch.nn.Linear(4, 2, dtype=torch.float64)  # DeepSpeed's `coefficient`
    both = torch.stack([experts, mlp], -1)
    want = torch.einsum("sdc,sc->sd", both, torch.nn.functional.softmax(layer(x), -1))
    torch.testing.assert_close(moe.residual(experts, mlp, x, layer.weight, layer.bias), want)


def test_its_derivatives() -> None:
    inputs = (*(_randn(3, 4) for _ in range(3)), _randn(2, 4))
    assert torch.autograd.gradcheck(moe.residual, inputs)
    assert torch.autograd.gradcheck(moe.residual, (*inputs, _randn(2)))


def test_batches_of_sequences() -> None:
    experts, mlp, x = (_randn(2, 3, 4) for _ in range(3))
    w = _randn(2, 4)
    flat = moe.residual(experts.flatten(0, 1), mlp.flatten(0, 1), x.flatten(0, 1), w)
    torch.testing.assert_close(moe.residual(experts, mlp, x, w).flatten(0, 1), flat)
