"""Covers shardfn/core/_modules.py: the mark of parameters without gradient, and the copies that keep it."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from shardfn.core import deferred, frozen, is_frozen, ones


@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(x, marks=pytest.mark.nightly if i % 3 else ())
        for i, x in enumerate(
            [
                *(torch.clone, Tensor.detach, Tensor.double, Tensor.bfloat16, Tensor.contiguous, copy.deepcopy),
                *(lambda x: x.to("meta"), lambda x: x.clone().detach().to(torch.float64)),
            ]
        )
    ],
)
def test_copies_and_conversions_stay_frozen(copied: object) -> None:
    assert callable(copied)
    x = frozen(torch.ones(2, 3))
    assert is_frozen(copied(x)) and not is_frozen(copied(torch.ones(2, 3)))


def test_a_saved_parameter_is_frozen_when_it_is_loaded() -> None:
    file = io.BytesIO()
    torch.save({"w": frozen(torch.ones(2))}, file)
    file.seek(0)
    assert is_frozen(torch.load(file)["w"])


def test_a_result_computed_from_it_is_a_plain_tensor() -> None:
    x = frozen(torch.arange(3.0))
    assert all(type(y) is Tensor for y in (x + 1, x[0], x.sum(), torch.stack([x, x]), torch.zeros_like(x)))
    assert "tensor([0., 1., 2.])" in repr(x)


def test_a_parameter_with_gradient_is_not_frozen() -> None:
    assert is_frozen(nn.Parameter(torch.ones(2), requires_grad=False))
    assert not is_frozen(nn.Parameter(torch.ones(2)))
    assert not is_frozen(frozen(torch.ones(2)).requires_grad_())


def test_a_deferred_leaf_is_marked_without_drawing_it() -> None:
    with deferred():
        x = frozen(ones((1 << 40,)))
        small = frozen(ones((2,)))
    assert is_frozen(x) and is_frozen(small.clone()) and not is_frozen(small + 1)
