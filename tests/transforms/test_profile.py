"""Covers shardfn/engine/step/_lower.py: the times in a profile were measured, and add up."""

import re
import types
from typing import Any
from unittest import mock

import pytest
import torch

import shardfn as sf
from shardfn.core import RankError
from shardfn.engine.agreement import _profiled
from shardfn.engine.step import _lower
from shardfn.engine.transfers import _gather
from shardfn.graph import cluster
from shardfn.testing import distributed
from shardfn.transforms import ShardedStep, StepProfile


def _loss(params: Any, batch: Any) -> torch.Tensor:
    return ((batch @ params["first"]).tanh() @ params["second"]).square().mean()


def _step(stage: int, loss: Any = _loss, **how: Any) -> tuple[ShardedStep, Any]:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    zero = sf.Zero(stage=stage, persist_elements=0, travel=sf.core.Travel(bucket_bytes=1))
    step = sf.sharded_step(loss, sf.optim.adamw(0.1), mesh=mesh, zero=zero, **how)
    return step, step.init({"first": torch.ones(8, 5) / 9, "second": torch.ones(5, 7) / 7})


class _Clock:
    """A clock that only a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@distributed(world=[2, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_gather_that_is_slow_shows_at_its_leaf(world: int) -> None:
    clock, step_state = _Clock(), _step(3)
    arrive = _gather.GatheredUnit.arrive

    def slowly(unit: Any) -> None:
        if unit._pending is not None and unit._wire.packing.leaves[0].whole == (5, 7):  # the second leaf
            clock.now += 1.0
        arrive(unit)

    fake: Any = types.SimpleNamespace(perf_counter=clock.perf_counter)
    with mock.patch.object(_profiled, "time", fake), mock.patch.object(_lower, "time", fake):
        with mock.patch.object(_gather.GatheredUnit, "arrive", slowly):
            _, found = step_state[0].profile(step_state[1], torch.ones(2, 8), steps=2)
    slow = {paths: spent.seconds for (what, paths), spent in found.leaves.items() if what == "gather"}
    assert slow[("params['second']",)] == found.phases["gather"].seconds == 2 * found.seconds >= 2
    assert slow[("params['first']",)] == 0 and found.phases["rest"].seconds == 0


@pytest.mark.nightly
@distributed(world=[1, 2, 3])
def test_seconds_and_bytes_add_up_to_the_step(world: int) -> None:
    for stage in (0, 1, 3):
        step, state = _step(stage)
        state, _ = step(state, torch.ones(2, 8))
        with sf.count_traffic() as counted:
            state, _ = step(state, torch.ones(2, 8))
        state, found = step.profile(state, torch.ones(2, 8), steps=2)
        assert int(state.step) == 5 and found.steps == 2
        assert found.sent == counted.bytes == sum(x.sent for x in found.phases.values()) / 2
        assert sum(x.seconds for x in found.phases.values()) == pytest.approx(2 * found.seconds)
        assert all(x.seconds >= 0 for x in found.phases.values()), found.phases
        gathers = [x.sent for (what, _), x in found.leaves.items() if what in ("gather", "refresh")]
        if stage == 3:
            assert sum(gathers) == 2 * counted.by_op.get(("all_gather", ("dp",)), [0, 0])[1]
        assert "params['first']" in str(found), found


@distributed(world=2)
def test_a_profile_trains_as_steps_do_and_loses_nothing_without_donation() -> None:
    step, state = _step(3, donate=False)
    wanted = state
    for _ in range(3):
        wanted, _ = step(wanted, torch.ones(2, 8))
    new, _ = step.profile(state, torch.ones(2, 8), steps=2)
    for a, b in zip(sf.unshard(new.params).values(), sf.unshard(wanted.params).values(), strict=True):
        assert torch.equal(a, b)
    assert not state.params["first"].donated


@pytest.mark.nightly
@distributed(world=2)
def test_predictions_are_beside_the_measured_times() -> None:
    step, state = _step(3)
    _, found = step.profile(state, torch.ones(2, 8), steps=1, cluster=cluster("h100"))
    says = found.predicted
    assert says is not None and says.seconds > 0 and sum(says.phases.values()) <= says.seconds * (1 + 1e-9)
    gathered = [path for (what, paths) in says.leaves if what == "gather" for path in paths]
    assert {*gathered} == {"params['first']", "params['second']"} and all(x > 0 for x in says.leaves.values())
    rows = [line for line in str(found).splitlines() if line.startswith("gather params")]
    assert len(rows) == 2 and all(line.split()[-1] == "ms" and line.count(" ms") == 2 for line in rows), rows
    head = next(line for line in str(found).splitlines() if line.startswith("leaf"))
    assert head.split() == ["leaf", "calls", "bytes", "sent", "measured", "predicted"]
    lines = str(found).splitlines()
    empty = {line.split()[0]: line[-3:] for line in lines if re.search(r"- \[[a-d]\]$", line)}
    assert {"waits", "rest"} <= empty.keys() and empty["waits"] != empty["rest"]
    for mark in empty.values():  # each has its reason below the tables, once
        assert sum(line.startswith(f"{mark} not predicted: ") for line in lines) == 1, (mark, lines)
    assert found._repr_html_().startswith("<pre>a step, the mean of 1")


@pytest.mark.nightly
@distributed(world=2)
def test_the_total_of_a_jitted_step_is_measured_and_the_profile_notes_it() -> None:
    step, state = _step(3, sf.jit(_loss, backend="graph"))
    state, found = step.profile(state, torch.ones(2, 8), steps=1)
    with sf.count_traffic() as counted:
        step(state, torch.ones(2, 8))
    assert found.sent == counted.bytes > 0 and found.seconds > 0
    assert not found.phases and not found.leaves and "the step is jitted" in str(found)


@distributed(world=2)
def test_mistakes_raise_on_all_ranks() -> None:
    step, state = _step(3)
    with pytest.raises(ValueError, match=r"profile\(steps=0\): at least one step must be measured. Pass steps=1"):
        step.profile(state, torch.ones(2, 8), steps=0)
    step, state = _step(3)
    with pytest.raises((ValueError, RankError), match=r"step.profile\(steps=\d\)"):
        step.profile(state, torch.ones(2, 8), steps=1 + step.mesh.rank)


def test_a_profile_prints_without_ranks() -> None:
    step = sf.sharded_step(_loss, sf.optim.sgd(0.1))
    state = step.init({"first": torch.ones(8, 5), "second": torch.ones(5, 7)})
    _, found = step.profile(state, torch.ones(2, 8), steps=1)
    assert isinstance(found, StepProfile) and repr(found) == str(found)
    assert [line.split()[0] for line in str(found).split("\n\n")[1].splitlines()] == ["phase", *_lower.PHASES]
