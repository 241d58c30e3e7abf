"""Covers modules in captured steps that bring kernels or compilers of their own: recurrent ones, compiled ones."""

import re
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


@pytest.mark.parametrize("kind", [nn.LSTM, *(pytest.param(x, marks=pytest.mark.nightly) for x in (nn.GRU, nn.RNN))])
def test_recurrent_modules_have_the_bits_of_eager_steps(kind: Any) -> None:
    torch.manual_seed(0)
    same(kind(4, 5, num_layers=2, bidirectional=True), torch.rand(3, 2, 4), lambda out: out[0])


class Compiled(nn.Module):
    """Compiles a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.compile(nn.Linear(4, 5), backend="eager"), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # torch's compiler is imported, and looks at tensors in ways that it deprecates
def test_a_compiled_submodule_is_captured_without_its_compilation() -> None:
    torch.manual_seed(0)
    module = Compiled()
    params, apply = sf.from_module(module)
    x = torch.rand(3, 4)
    loss = sf.jit(lambda p, x: apply(p, x).square().mean(), backend="graph")
    want = torch.func.functional_call(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), _renamed(params), x)
    step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 1}))
    _, metrics = step(step.init(params), x)
    torch.testing.assert_close(metrics["loss"], want.square().mean())


def _renamed(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("a.", "0.").replace("b.", "2."): x for name, x in params.items()}


def test_a_line_of_a_library_is_named_with_the_line_that_called_it() -> None:
    from transformers.activations import ACT2FN

    step = sf.sharded_step(lambda w, x: ACT2FN["relu2"](x * w).mean(), sf.optim.sgd(0.1))
    text = step.lower(torch.ones(3), torch.ones(3)).as_text()
    assert re.search(r"activations.py:\d+ in \w+, called at \S*test_capture.py:\d+", text), text
