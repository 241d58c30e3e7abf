"""Covers shardfn/modules/_call.py: a loop over replacements in the order of their numbers, also in a recomputation."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.modules import _from_module
from shardfn.modules._call import Forwards, ModuleCall, ModuleRun, Replacement

# Each class with the reason for its number in the table of shardfn/modules/_call.py. A new class is a new row.
ORDER = [
    "CallChecks",
    "UncompiledParts",
    "EvalMode",
    "Recomputation",
    "ParamDtypes",
    "NumberedDraws",
    "FunctionWatch",
    "BatchInvariance",
]


class Noted(Replacement):
    """Doubles the results of one submodule, and notes each step of a call."""

    def __init__(self, name: str, order: int, sub: nn.Module, notes: list[str]) -> None:
        self.name, self.order, self.sub, self.notes = name, order, sub, notes  # pyright: ignore

    def check(self, call: ModuleCall) -> None:
        self.notes.append(f"check {self.name}")
        if call.kwargs.get("refused"):
            raise ValueError(f"{self.name} refuses the call.")

    def forwards(self, run: ModuleRun) -> Forwards:
        forward = self.sub.forward

        def doubled(x: Tensor) -> Tensor:
            self.notes.append(f"forward {self.name}{' again' if run.again else ''}")
            return 2 * forward(x)

        return [(self.sub, doubled)]

    @contextlib.contextmanager
    def running(self, run: ModuleRun) -> Iterator[None]:
        del run
        self.notes.append(f"enter {self.name}")
        yield
        self.notes.append(f"exit {self.name}")


def with_noted(module: nn.Module, sub: nn.Module, notes: list[str], **orders: int) -> tuple[dict[str, Tensor], Any]:
    params, apply = sf.from_module(module)
    apply._replacements += tuple(Noted(name, order, sub, notes) for name, order in orders.items())
    return params, apply


def test_each_replacement_of_from_module_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    _, apply = sf.from_module(nn.Linear(2, 3), batch_invariant=True)
    kinds = {type(one).__name__: one.order for one in apply._replacements}
    assert sorted(kinds, key=lambda name: kinds[name]) == ORDER
    assert len(set(kinds.values())) == len(ORDER)
    assert _from_module.AttentionRoute.order in range(kinds["NumberedDraws"] + 1, kinds["FunctionWatch"])
    assert _from_module.ExpertsRoute.order in range(kinds["NumberedDraws"] + 1, kinds["FunctionWatch"])
    assert _from_module.ModuleReplay.order in range(kinds["NumberedDraws"] + 1, kinds["FunctionWatch"])


def test_a_call_enters_by_number_and_leaves_in_reverse() -> None:
    notes: list[str] = []
    module = nn.Linear(3, 2)
    params, apply = with_noted(module, module, notes, inner=85, outer=55)
    x = torch.ones(1, 3)
    assert torch.equal(apply(params, x), 4 * module(x))
    assert notes == [
        *("check inner", "check outer"),
        *("enter outer", "enter inner", "forward inner", "forward outer", "exit inner", "exit outer"),
    ]
    assert "forward" not in module.__dict__


def test_a_check_refuses_before_anything_is_replaced() -> None:
    notes: list[str] = []
    module = nn.Linear(3, 2)
    params, apply = with_noted(module, module, notes, one=85)
    with pytest.raises(ValueError, match="one refuses the call"):
        apply(params, torch.ones(1, 3), refused=True)
    assert notes == ["check one"]
    assert "forward" not in module.__dict__


def test_an_error_of_the_forward_leaves_the_module_as_before() -> None:
    notes: list[str] = []
    module = nn.Linear(3, 2)
    own = module.weight
    params, apply = with_noted(module, module, notes, outer=55, inner=85)
    with pytest.raises(RuntimeError):
        apply(params, torch.ones(1, 4))
    assert "exit outer" not in notes and module.weight is own and "forward" not in module.__dict__


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor, *, plain: bool = False) -> Tensor:
        return self.b(self.a(x).tanh() if plain else checkpoint(lambda x: self.a(x).tanh(), x, use_reentrant=False))


def test_a_part_that_runs_again_has_the_replacements() -> None:
    notes: list[str] = []
    module = Recomputed()
    params, apply = with_noted(module, module.a, notes, one=85)
    params = {name: x.requires_grad_() for name, x in params.items()}
    want = torch.autograd.grad(apply(params, torch.ones(2, 3), plain=True).sum(), list(params.values()))
    notes.clear()
    loss = apply(params, torch.ones(2, 3)).sum()
    assert "forward one again" not in notes
    got = torch.autograd.grad(loss, list(params.values()))
    assert notes.count("forward one again") == 1
    assert all(map(torch.equal, got, want))


def test_a_second_replay_takes_the_place_of_the_first() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=8, num_local_experts=3, num_key_value_heads=2, **sizes)
    params, apply = sf.from_module(transformers.MixtralForCausalLM(config).eval())
    first, second = torch.tensor([[[[2, 1]]]]), torch.tensor([[[[0, 1]]]])
    tokens = torch.tensor([[3]])
    got = apply.replaying(first).replaying(second)(params, tokens).logits
    assert torch.equal(got, apply.replaying(second)(params, tokens).logits)
    assert not torch.equal(got, apply.replaying(first)(params, tokens).logits)
