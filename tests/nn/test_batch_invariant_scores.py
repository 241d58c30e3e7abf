"""Covers exact softmax, sigmoid and sums: values, rows alone, derivatives."""

import pytest
import torch
from torch import Tensor

from shardfn.nn import batch_invariant_sigmoid, batch_invariant_softmax
from shardfn.nn._batch_invariant_scores import batch_invariant_sum


@pytest.mark.parametrize("E", [1, 2, 5, 8, 61, 128])
def test_rows_are_those_of_torch_and_have_the_bits_that_they_have_alone(E: int) -> None:
    x_SE = 9 * torch.randn(33, E, generator=torch.Generator().manual_seed(E))
    for f, other in ((batch_invariant_softmax, lambda x: x.softmax(-1)), (batch_invariant_sigmoid, torch.sigmoid)):
        y_SE = f(x_SE)
        torch.testing.assert_close(y_SE, other(x_SE.double()).float(), rtol=5e-6, atol=1e-37)
        for rows in (slice(0, 1), slice(32, 33), slice(3, 20)):
            assert torch.equal(f(x_SE[rows].clone()), y_SE[rows])
    torch.testing.assert_close(batch_invariant_sum(x_SE), x_SE.sum(-1, keepdim=True), rtol=1e-5, atol=1e-4)


def test_extremes() -> None:
    least = torch.finfo(torch.float32).min
    assert batch_invariant_softmax(torch.tensor([3.0, least, 3.0, -90.0])).tolist() == [0.5, 0.0, 0.5, 0.0]
    x = torch.tensor([1e-45, -1e-45, 1e-30, 0.0, 1e30, -1e30, 88.0])
    assert batch_invariant_sigmoid(x).tolist() == [0.5, 0.5, 0.5, 0.5, 1.0, 0.0, 1.0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
def test_derivatives_are_those_of_torch() -> None:
    draw = torch.Generator().manual_seed(0)
    x_SE, w_SE = (torch.randn(3, 5, generator=draw) for _ in range(2))
    for f, other in ((batch_invariant_softmax, lambda x: x.softmax(-1)), (batch_invariant_sigmoid, torch.sigmoid)):

        def got(x: Tensor, f=f) -> Tensor:
            return (f(x) * w_SE).square().sum()

        def want(x: Tensor, other=other) -> Tensor:
            return (other(x) * w_SE).square().sum()

        torch.testing.assert_close(torch.func.grad(got)(x_SE), torch.func.grad(want)(x_SE))
        torch.testing.assert_close(torch.func.hessian(got)(x_SE), torch.func.hessian(want)(x_SE))
