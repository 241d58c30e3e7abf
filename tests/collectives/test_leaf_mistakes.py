"""Covers mistakes with leaves of a state, which are not tensors to compute with."""

import tempfile
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.testing import distributed
from tests.mistakes import Mistake, after_a_step, cases, check, check_on_all_ranks, using


def _with_leaf(use: Any) -> Any:
    return using(lambda step, state: use(state.params["w"]))


MISTAKES = [
    Mistake("a leaf is multiplied", _with_leaf(lambda w: w * 2),
            TypeError, "__mul__ of a GlobalTensor", "take leaf.full_tensor() ... or leaf.local"),
    Mistake("a leaf is passed to a function of torch", _with_leaf(torch.exp),
            TypeError, "exp got a GlobalTensor", "take leaf.full_tensor() ... or leaf.local"),
    Mistake("a leaf has no methods of a tensor", _with_leaf(lambda w: w.mean()),
            AttributeError, "a GlobalTensor has no attribute 'mean'", "take leaf.full_tensor() ... or leaf.local"),
    Mistake("a leaf is pickled", using(lambda step, state: torch.save(state, tempfile.mkstemp()[1])),
            TypeError, "a GlobalTensor cannot be pickled", "Use full_tensor(), or save a checkpoint"),
    Mistake("a leaf was donated", after_a_step(lambda step, state: state.params["w"].full_tensor()),
            sf.DonatedError, "leaf of shape (3, 2) was donated", "Use that state, or build the step with donate=False"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", cases(MISTAKES))
def test_a_mistake_is_refused_with_its_remedy(mistake: Mistake) -> None:
    check(mistake)


@distributed(world=2)
def test_all_ranks_refuse_a_mistake() -> None:
    check_on_all_ranks(MISTAKES)
