"""Covers mistakes with axes of the model: a loss that never sums over an axis of its specs, eager and captured."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, optim
from shardfn.graph import AxisTypeError
from shardfn.testing import distributed


def _loss(p: Any, x: Tensor) -> Tensor:
    return (x @ p["up"]).relu().matmul(p["down"]).square().mean()  # of a part of the features


@distributed(world=2)
def test_a_loss_that_never_sums_over_an_axis_of_its_specs_is_refused() -> None:
    mesh, g = sf.make_mesh({"tp": 2}, device="cpu"), torch.Generator().manual_seed(0)
    params = {"up": torch.randn(3, 8, generator=g), "down": torch.randn(8, 3, generator=g)}
    how: Any = {"mesh": mesh, "specs": {"up": P(None, "tp"), "down": P("tp")}, "batch": P()}
    x = torch.randn(4, 3, generator=g)
    step = sf.sharded_step(_loss, optim.sgd(0.1), **how)
    with pytest.raises(
        AxisTypeError, match=r"the loss varies along 'tp'.*test_axes_mistakes.py:16.*sf\.psum\(x, 'tp'\)"
    ):
        step(step.init(params), x)
    step = sf.sharded_step(sf.jit(_loss, backend="graph"), optim.sgd(0.1), **how)
    with pytest.raises((AxisTypeError, sf.RankError), match="tp"):
        step(step.init(params), x)
    step = sf.sharded_step(sf.partition(_loss, axes="tp"), optim.sgd(0.1), **how)  # the remedy
    _, metrics = step(step.init(params), x)
    torch.testing.assert_close(metrics["loss"], _loss(params, x))
