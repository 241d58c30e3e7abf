"""Covers mistakes with the logger of metrics."""

import tempfile
from typing import Any

import pytest

import shardfn as sf
from shardfn.testing import distributed
from tests.mistakes import Mistake, begun, cases, check, check_on_all_ranks, mesh_of, using


def _log(*args: Any) -> Any:
    with sf.metrics.Logger(tempfile.mkdtemp(), mesh_of()) as logger:
        return logger.write(*args)


MISTAKES = [
    Mistake("the metrics are a state", using(lambda step, state: _log(0, state)),
            TypeError, "expected mappings of metrics, got a TrainState", "logger.write(step, {'loss': loss})"),
    Mistake("the number of the step is left out", lambda: _log({"loss": 1.0}),
            TypeError, "Logger.write: the step's number must come first", "logger.write(step, metrics)"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", cases(MISTAKES))
def test_a_mistake_is_refused_with_its_remedy(mistake: Mistake) -> None:
    check(mistake)


@distributed(world=2)
def test_all_ranks_refuse_a_mistake() -> None:
    check_on_all_ranks(MISTAKES)


def test_the_number_of_a_state_is_a_number() -> None:
    assert _log(begun()[1].step, {"loss": 1.0}) == {"step": 0, "loss": 1.0}
