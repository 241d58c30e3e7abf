"""Covers the composition of a step: its parts in order, the fold, donated states, and losses that are not finite."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.core import tree_leaves
from shardfn.engine.execution._step_run import one_step
from shardfn.engine.loss._accumulated import Accumulated, fold, num_microbatches
from shardfn.state._state import taken


class _Noted:
    """An `Executor` that records its calls."""

    def __init__(self, finite: bool) -> None:
        self.finite, self.asked = finite, []

    def differentiate(self) -> str:
        self.asked.append("differentiate")
        return "gradients"

    def measure(self, out: str) -> tuple[dict[str, Tensor], Tensor | None]:
        self.asked.append(f"measure {out}")
        return {"finite": torch.tensor(self.finite)}, torch.tensor(2.0)

    def choose(self, metrics: dict[str, Tensor], update: Callable[[], str]) -> str:
        self.asked.append("choose")
        return update() if metrics["finite"] else "old"

    def update(self, out: str, scale: Tensor | None) -> str:
        self.asked.append(f"update {out} {scale}")
        return "new"


@pytest.mark.parametrize("finite", [True, False])
def test_a_step_is_its_parts_in_order(finite: bool) -> None:
    run = _Noted(finite)
    new, metrics = one_step(run)
    updated = ["update gradients 2.0"] if finite else []
    assert run.asked == ["differentiate", "measure gradients", "choose", *updated]
    assert (new, metrics) == ("new" if finite else "old", {"finite": torch.tensor(finite)})


def _state() -> sf.TrainState:
    step = sf.sharded_step(lambda w, x: (w * x).sum(), optim.sgd(0.1, momentum=0.9))
    return step.init(torch.ones(3))


def _held(state: sf.TrainState) -> list[Any]:
    return [state.params, *(x for x in sf.core.tree_leaves(state.opt_state) if x.shape)]


def test_an_update_that_ends_consumes_a_donated_state() -> None:
    state = _state()
    with torch.no_grad(), taken(state, donate=True) as (params, *_):
        params.add_(1)
    assert all(x.donated for x in _held(state))


def test_an_update_that_fails_before_it_writes_leaves_the_state() -> None:
    state = _state()
    with pytest.raises(ZeroDivisionError), taken(state, donate=True):
        raise ZeroDivisionError
    assert not any(x.donated for x in _held(state))


def test_an_update_that_fails_half_way_consumes_the_state() -> None:
    state = _state()
    with pytest.raises(ZeroDivisionError), torch.no_grad(), taken(state, donate=True) as (params, *_):
        params.add_(1)
        raise ZeroDivisionError
    assert all(x.donated for x in _held(state))


@pytest.mark.parametrize("fails", [True, False])
def test_a_state_that_is_not_donated_is_never_written(fails: bool) -> None:
    state = _state()
    try:
        with torch.no_grad(), taken(state, donate=False) as (params, *_):
            params.add_(1)
            assert not fails
    except AssertionError:
        assert fails
    assert torch.equal(state.params.full_tensor(), torch.ones(3))


def test_a_fold_goes_over_nested_microbatches_in_order() -> None:
    loss = Accumulated(Accumulated(len, 2), 3)
    seen = fold(loss, torch.arange(12), lambda inner, x: [(inner, x.tolist())], lambda a, b: a + b)
    assert seen == [(len, [2 * k, 2 * k + 1]) for k in range(6)]
    assert num_microbatches(loss) == 6
    assert num_microbatches(len) == 1


def _trained(**options: Any) -> tuple[Any, dict[str, Tensor], Any]:
    params = {"w": torch.ones(3), "b": torch.zeros(())}
    step = sf.sharded_step(lambda p, x: ((x @ p["w"] + p["b"]) ** 2).mean(), optim.adamw(0.1), **options)
    return step, params, step.init(params)


def test_without_donation_the_old_state_lives() -> None:
    step, _, old = _trained(donate=False)
    new, again = (step(old, torch.ones(4, 3))[0].params["w"].local for _ in range(2))
    assert torch.equal(old.params["w"].local, torch.ones(3))
    assert torch.equal(new, again)
    assert not torch.equal(new, old.params["w"].local)


def test_the_callers_tensors_are_never_written() -> None:
    step, params, state = _trained()
    step(state, torch.ones(4, 3))
    assert torch.equal(params["w"], torch.ones(3))


def test_a_loss_that_is_not_finite_is_shown_and_skipped_bit_identically() -> None:
    bad = torch.full((4, 3), float("nan"))
    step, _, state = _trained()
    _, metrics = step(state, bad)
    assert torch.isnan(metrics["loss"]) and not metrics["finite"] and not metrics["skipped"]
    step, _, state = _trained(skip_nonfinite=True)
    state, _ = step(state, torch.ones(4, 3))
    before = [x.clone() for x in tree_leaves(sf.unshard(tuple(state)))]
    state, metrics = step(state, bad)
    assert metrics["skipped"] and not metrics["finite"]
    assert all(map(torch.equal, before, tree_leaves(sf.unshard(tuple(state)))))
    _, metrics = step(state, torch.ones(4, 3))
    assert metrics["finite"] and not metrics["skipped"]
