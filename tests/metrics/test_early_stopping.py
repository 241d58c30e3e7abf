"""Covers shardfn/metrics/_stopping.py: when it stops, and resuming it from a checkpoint."""

import math
import pathlib

import pytest
import torch

from shardfn import checkpoint
from shardfn.metrics import EarlyStopping


def _stops_at(stopping: EarlyStopping, values: list[float]) -> int | None:
    for n, value in enumerate(values):
        stopping = stopping.update(value)
        if stopping.stop:
            return n
    return None


def test_it_stops_after_patience_evaluations_without_improvement() -> None:
    falling = [3.0, 2.0, 2.0, 1.9, 1.85, 1.8]
    assert _stops_at(EarlyStopping(1), falling) == 2
    assert _stops_at(EarlyStopping(2), falling) is None
    assert _stops_at(EarlyStopping(2, min_delta=0.15), falling) == 3
    # Small steps add up, as each is compared with the best, not with the last.
    assert _stops_at(EarlyStopping(3, min_delta=0.15), falling) == 4
    assert _stops_at(EarlyStopping(2, mode="max"), falling) == 2
    assert _stops_at(EarlyStopping(2, mode="max"), [1.0, 2.0, 2.0, 3.0]) is None
    assert _stops_at(EarlyStopping(2), [1.0, math.nan, math.nan]) == 2
    assert _stops_at(EarlyStopping(2), [math.nan, math.inf]) == 1


def test_a_value_is_never_changed() -> None:
    first = EarlyStopping(2)
    second = first.update(torch.tensor(0.5))
    assert (first.best, second.best, second.waited) == (None, 0.5, 0) and hash(first) != hash(second)


def test_a_resumed_run_stops_where_the_other_does(tmp_path: pathlib.Path) -> None:
    values, tree = [math.nan, 3.0, 1.0, 2.0, 1.5], {"w": torch.ones(2)}
    for cut in range(len(values)):
        stopping = EarlyStopping(2)
        for value in values[:cut]:
            stopping = stopping.update(value)
        checkpoint.save(tmp_path, tree, cut, user={"stopping": stopping.state()})
        restored = checkpoint.restore(tmp_path, {"w": torch.zeros(2)}, step=cut).user["stopping"]
        assert EarlyStopping(2).at(restored) == stopping
        assert _stops_at(EarlyStopping(2).at(restored), values[cut:]) == 4 - cut


def test_mistakes_are_named() -> None:
    for wrong in (EarlyStopping(0), EarlyStopping(1, min_delta=-1.0), EarlyStopping(1, mode="low")):
        with pytest.raises(ValueError, match=r"patience must be at least 1(.|\n)*min_delta at least 0"):
            wrong.update(1.0)
    with pytest.raises(TypeError, match=r"a tensor of shape \(2,\)"):
        EarlyStopping(1).update(torch.ones(2))
    with pytest.raises(ValueError, match=r"got \['next'\]"):
        EarlyStopping(1).at({"next": 1})
