"""Covers `describe`: the same lines in every process for the same value, other lines for another one."""

import dataclasses
import functools
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from shardfn import optim, policies, remat
from shardfn.core import P, describe


def _lines(value, **options) -> str:
    return "\n".join(describe(value, "x", **options))


def _rate(count):
    return 0.1 / (1 + count)


def _slower(count):
    return 0.1 / (2 + count)


RULES = {
    "sgd": lambda: optim.sgd(0.1),
    "rate": lambda: optim.sgd(0.2),
    "momentum": lambda: optim.sgd(0.1, momentum=0.9),
    "adam": lambda: optim.adam(0.1),
    "b1": lambda: optim.adam(0.1, b1=0.8),
    "adamw": lambda: optim.adamw(0.1),
    "mask": lambda: optim.adamw(0.1, mask={"a": True, "b": False}),
    "other mask": lambda: optim.adamw(0.1, mask={"a": False, "b": True}),
    "tensor": lambda: optim.adamw(torch.tensor(0.1)),
    "other tensor": lambda: optim.adamw(torch.tensor(0.2)),
    "clip": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)),
    "other clip": lambda: optim.chain(optim.clip_by_global_norm(2.0), optim.adamw(0.1)),
    "schedule": lambda: optim.lamb(optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100)),
    "other schedule": lambda: optim.lamb(optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 101)),
    "function": lambda: optim.lion(_rate),
    "other function": lambda: optim.lion(_slower),
    "closure": lambda: optim.lion(lambda count, scale=1.0: scale / (1 + count)),
    "masked": lambda: optim.masked(optim.sgd(0.1), {"a": True}),
    "multi": lambda: optim.multi_transform({"a": optim.sgd(0.1), "b": optim.sgd(0.2)}, {"w": "a"}),
    "other multi": lambda: optim.multi_transform({"a": optim.sgd(0.1), "b": optim.sgd(0.3)}, {"w": "a"}),
    "master": lambda: optim.master_weights(optim.sgd(0.1), torch.float32),
    "other master": lambda: optim.master_weights(optim.sgd(0.2), torch.float32),
    "onebit": lambda: optim.onebit_adam(0.1, freeze_step=5),
    "other onebit": lambda: optim.onebit_adam(0.1, freeze_step=6),
}


def test_rules_that_differ_in_anything_have_different_texts_and_equal_ones_the_same() -> None:
    told = {name: _lines(make()) for name, make in RULES.items()}
    assert len(set(told.values())) == len(RULES)
    assert told == {name: _lines(make()) for name, make in RULES.items()}
    assert "x.txs[0].max_norm = 1.0" in told["clip"] and "learning_rate = 0.2" in told["rate"]
    assert "_rate, line " in told["function"] and "0.05" in told["function"]
    assert not any("0x" in text for text in told.values()), "an address"


@pytest.mark.nightly
def test_another_process_has_the_same_text() -> None:
    place = str(pathlib.Path(__file__).parent)
    program = f"import sys; sys.path.insert(0, {place!r}); import test_describe as t\n"
    program += "print('\\n'.join(t._lines(make()) for make in t.RULES.values()))"
    told = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert told[0] and told[0] == told[1]


def test_a_function_of_ones_own_hides_the_values_of_its_closure() -> None:
    def rule_of(rank: int):
        inner = optim.sgd(0.1)

        def update(updates, state, params=None, **extra):
            print(rank)
            return inner.update(updates, state, params, **extra)

        return optim.GradientTransformation(inner.init, update)

    assert _lines(rule_of(0)) == _lines(rule_of(1))  # which rank it is is its own affair
    assert "inner.advance.learning_rate = 0.1" in _lines(rule_of(0))


def test_the_text_of_a_loss_has_only_the_transforms_of_this_package() -> None:
    rank = 1
    loss = functools.partial(lambda rank, p, b: rank, rank)
    assert _lines(loss, strangers=False) == ""
    text = _lines(remat(loss, policies.dots_saveable), strangers=False)
    assert "x: remat" in text and "dots_saveable" in text and "lambda" not in text
    assert text != _lines(remat(loss), strangers=False)


def test_a_value_without_a_text_of_its_own_is_described_by_its_type() -> None:
    text = _lines({"set": {len, 3}, "object": object(), object(): 1, "spec": P("dp"), "device": torch.device("cpu")})
    assert "0x" not in text and "x['set'] = ['3', 'builtin_function_or_method']" in text and "P('dp')" in text


@dataclasses.dataclass
class _Schedule:
    rank: int
    peak: float

    def __call__(self, count: torch.Tensor) -> float:
        return self.peak

    def at(self, count: torch.Tensor) -> float:
        return self.peak


def _peak(count: torch.Tensor, peak: float) -> float:
    return peak


def test_a_schedule_is_described_by_its_values_and_not_by_its_caches() -> None:
    for make in (_Schedule, lambda rank, peak: _Schedule(rank, peak).at, lambda _, p: functools.partial(_peak, peak=p)):
        schedule: Any = make  # of floats, as the schedule is never run
        of = lambda rank, peak, make=schedule: _lines(optim.adam(make(rank, peak)))  # noqa: E731
        assert of(0, 0.1) == of(1, 0.1) != of(1, 0.2)


def test_the_memory_of_a_rule_is_not_described() -> None:
    params = [torch.ones(2, 2), torch.ones(2)]
    tx = optim.adamw(0.1, mask=lambda tree: [x.ndim > 1 for x in tree])
    before = _lines(tx)
    tx.update(params, tx.init(params), params)
    assert _lines(tx) == before
