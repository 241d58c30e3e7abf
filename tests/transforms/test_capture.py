"""Covers recurrent modules in captured steps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfn as sf


def trained(f: Any, params: Any, x: Tensor) -> dict[str, Tensor]:
    step = sf.sharded_step(f, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 1}))
    state = step.init(params)
    for _ in range(2):
        state = step(state, x)[0]
    return {name: leaf.local for name, leaf in state.params.items()}


def same(module: nn.Module, x: Tensor, of: Any = lambda out: out) -> None:
    params, apply = sf.from_module(module)

    def loss(p: dict, x: Tensor) -> Tensor:
        return of(apply(p, x)).square().mean()

    want, got = trained(loss, params, x), trained(sf.jit(loss, backend="graph"), params, x)
    assert all(torch.equal(want[name], got[name]) for name in params)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_have_the_bits_of_eager_steps(kind: Any) -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32,):
        same(
            kind(4, 5, num_layers=2, bidirectional=True, dtype=dtype), torch.rand(3, 2, 4, dtype=dtype), lambda o: o[0]
        )
