"""Covers mistakes with checkpoints: arguments swapped, and directories without one."""

import pathlib
from typing import Any

import pytest

import shardfn
from shardfn.testing import distributed
from tests.mistakes import Mistake, begun, cases, check, check_on_all_ranks, made, params_of, using

sf: Any = shardfn  # many of these are errors of types, too
_WHERE, _HERE = "/a/directory/that/is/missing", pathlib.Path(__file__).parent

_FIRST = "the directory of checkpoints must be a path or a URL, got a TrainState"
MISTAKES = [
    Mistake("save has its arguments swapped", using(lambda step, state: sf.checkpoint.save(state, _WHERE)),
            TypeError, _FIRST, "save(directory, state)"),
    Mistake("restore has its arguments swapped", using(lambda step, state: sf.checkpoint.restore(state, _WHERE)),
            TypeError, _FIRST, "restore(directory, state)"),
    Mistake("a step is restored", lambda: sf.checkpoint.restore(_WHERE, made()),
            TypeError, "expected a tree of tensors, got a ShardedStep", "restore(directory, step.init(params))"),
    Mistake("the directory does not exist", using(lambda step, state: sf.checkpoint.restore(_WHERE, state)),
            FileNotFoundError, f"no checkpoint in {_WHERE}, which does not exist", "steps(directory)"),
    Mistake("the directory has other files", using(lambda step, state: sf.checkpoint.restore(_HERE, state)),
            FileNotFoundError, f"no checkpoint in {_HERE}, which has none", "steps(directory)"),
    Mistake("the state is asked for a dict", using(lambda step, state: state.state_dict()),
            AttributeError, "'TrainState' object has no attribute 'state_dict'", "sf.checkpoint.save(directory, "),
]  # fmt: skip


@pytest.mark.parametrize("mistake", cases(MISTAKES))
def test_a_mistake_is_refused_with_its_remedy(mistake: Mistake) -> None:
    check(mistake)


def test_another_optimizer_is_named_and_can_start_afresh(tmp_path: pathlib.Path) -> None:
    sf.checkpoint.save(tmp_path, made(optimizer=sf.optim.sgd(0.1)).init(params_of()))
    _, other = begun()
    remedy = r"Only states of the optimizer differ.*keep='opt_state' keeps.*opt_state\[0\]\.mu\['w'\]"
    with pytest.raises(ValueError, match=f"(?s){remedy}"):
        sf.checkpoint.restore(tmp_path, other)
    assert sf.checkpoint.restore(tmp_path, other, keep="opt_state").step == 0


@distributed(world=2)
def test_all_ranks_refuse_a_mistake() -> None:
    check_on_all_ranks(MISTAKES)
