"""Covers the update: the rows that the optimizer gets, the leaves that are gathered again, and the state returned."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.collectives import bind_mesh
from shardfn.core import tree_leaves, tree_map
from shardfn.engine import StepParts
from shardfn.engine.execution._update import rule_of, update
from shardfn.engine.step._init import first_state
from shardfn.schedules import parse
from shardfn.state import TrainState

from .fakes import Wire, plan_of

SHAPES = {"a": (4, 3), "b": (6, 2)}
LR = 0.5


class Case:
    """A step's update of two leaves on rank 0 of two."""

    def __init__(self, stage: int, rule: Any = None, donate: bool = True) -> None:
        rule = optim.sgd(LR, momentum=0.9) if rule is None else rule
        zero = sf.Zero(stage, persist_elements=0, travel=sf.Travel(bucket_bytes=0))
        self.plan, self.wholes, kept = plan_of(SHAPES, zero)
        self.grads = [torch.full_like(x, i + 1.0) for i, x in enumerate(self.wholes)]
        self.wire = Wire()
        self.parts = StepParts(_loss, rule, False, False, donate, False, None, parse("F0 B0"))
        with bind_mesh(self.plan.mesh):
            self.state: TrainState = first_state(self.plan, rule, lambda i: kept[i].clone(), None, ())

    def rows(self, wholes: list[Tensor]) -> list[Tensor]:
        return [leaf.rows(x, 0).clone() for leaf, x in zip(self.plan.leaves, wholes, strict=True)]

    def after(self, scale: float = 1.0) -> list[Tensor]:
        """The whole leaves after the first step of momentum."""
        return [x - LR * scale * g for x, g in zip(self.wholes, self.grads, strict=True)]

    def run(self, scale: float | None = None) -> TrainState:
        new = self.after(1.0 if scale is None else scale)
        for whole, rows in zip(new, self.rows(new), strict=True):
            self.wire.messages[tuple(rows.reshape(-1).tolist())] = whole.reshape(-1)
        grads: Any = dict(enumerate(self.rows(self.grads)))
        factor = None if scale is None else torch.tensor(scale)
        out = update(self.plan, self.wire, self.parts, self.state, grads.pop, scale=factor)
        assert grads == {}  # consumed
        return out


def _loss(params: Any, batch: Any) -> Tensor:
    raise AssertionError("an update runs no loss")


def _blocks(tree: Any) -> list[Tensor]:
    return [x.local for x in tree_leaves(tree)]


@pytest.mark.parametrize(
    ("stage", "sent"),
    [
        (0, []),
        pytest.param(1, [6, 6], marks=pytest.mark.nightly),
        pytest.param(2, [6, 6], marks=pytest.mark.nightly),
        (3, []),
    ],
)
def test_leaves_that_are_kept_whole_are_gathered_from_the_rows_of_all(stage: int, sent: list[int]) -> None:
    case = Case(stage)
    new = _blocks(case.run().params)
    assert case.wire.log == [("gather", n) for n in sent]
    want = case.rows(case.after()) if stage == 3 else case.after()
    torch.testing.assert_close(new, want, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_optimizer_keeps_the_state_of_this_rank_s_rows(stage: int) -> None:
    case = Case(stage)
    momentum = [x for x in tree_leaves(case.run().opt_state) if x.shape]
    torch.testing.assert_close([x.local for x in momentum], case.rows(case.grads), rtol=0, atol=0)
    assert [x.shape for x in momentum] == [(4, 3), (6, 2)]


def test_gradients_are_multiplied_by_the_scale_first() -> None:
    case = Case(2)
    torch.testing.assert_close(_blocks(case.run(scale=0.25).params), case.after(0.25), rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_donated_state_gives_its_buffers_to_the_next_one(stage: int) -> None:
    case = Case(stage)
    before = [x.data_ptr() for x in _blocks(case.state.params)]
    new = case.run()
    assert [x.data_ptr() for x in _blocks(new.params)] == before
    assert all(x.donated for x in tree_leaves((case.state.params, case.state.opt_state)))
    assert (int(case.state.step), int(new.step)) == (0, 1)


def test_a_state_that_is_not_donated_stays_unchanged() -> None:
    case = Case(1, donate=False)
    before = tree_map(lambda x: x.local.clone(), (case.state.params, case.state.opt_state))
    case.run()
    for x, y in zip(tree_leaves((case.state.params, case.state.opt_state)), tree_leaves(before), strict=True):
        assert torch.equal(x.local, y)


def test_a_rule_that_fails_before_it_writes_leaves_a_donated_state_usable() -> None:
    def fails(updates: Any, state: Any, params: Any = None, *, specs: Any = None) -> Any:
        raise ZeroDivisionError

    case = Case(1, optim.GradientTransformation(lambda params: (), fails))
    with pytest.raises(ZeroDivisionError):
        case.run()
    torch.testing.assert_close(_blocks(case.state.params), case.wholes, rtol=0, atol=0)


def test_a_rule_that_changes_the_structure_of_its_state_is_refused() -> None:
    def grows(updates: Any, state: Any, params: Any = None, *, specs: Any = None) -> Any:
        return updates, {"more": torch.zeros(())}

    case = Case(3, optim.GradientTransformation(lambda params: (), grows))
    with pytest.raises(ValueError, match=r"the optimizer changed the structure of its state from .* to .*more"):
        update(case.plan, case.wire, case.parts, case.state, dict(enumerate(case.rows(case.grads))).pop, scale=None)


def test_a_mask_is_evaluated_once_and_on_whole_leaves() -> None:
    seen: list[Any] = []

    def decayed(params: Any) -> Any:
        seen.append({name: tuple(x.shape) for name, x in params.items()})
        return {name: True for name in params}

    case = Case(3, optim.adamw(LR, weight_decay=0.1, mask=decayed))
    seen.clear()
    first = rule_of(case.plan, case.parts.optimizer)
    assert rule_of(case.plan, case.parts.optimizer) is first
    assert all(shapes == SHAPES for shapes in seen) and len(seen) <= 1
