"""Covers shardfn/engine/agreement/_profiled.py: the parts of a step, and their leaves, appear in torch's profiler."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import shardfn as sf
from shardfn.collectives import count_traffic
from shardfn.engine.agreement._profiled import Spans, named_range
from shardfn.testing import distributed


def _loss(params: Any, batch: Any) -> torch.Tensor:
    return ((batch @ params["first"]).tanh() @ params["second"]).square().mean()


@distributed(world=[2, pytest.param(3, marks=pytest.mark.nightly)])
def test_parts_are_named_by_leaf_and_change_nothing(world: int) -> None:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    for stage, extra in ((3, "gather"), (1, "refresh")):
        zero = sf.Zero(stage=stage, persist_elements=0)
        step = sf.sharded_step(_loss, sf.optim.sgd(0.1), mesh=mesh, zero=zero, donate=False)
        state = step.init({"first": torch.ones(8, 4) / 9, "second": torch.ones(4, 6) / 7})
        plain, _ = step(state, torch.ones(2, 8))
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
            profiled, _ = step(state, torch.ones(2, 8))
        names = {event.name for event in found.events() or [] if event.name.startswith("shardfn.")}
        assert {"shardfn.forward", "shardfn.backward", "shardfn.update"} <= names
        for what in (extra, "reduce"):
            ranges = [name for name in names if name.startswith(f"shardfn.{what} ")]
            for path in ("params['first']", "params['second']"):
                assert any(path in name for name in ranges), (what, path, sorted(names))
        for a, b in zip(sf.unshard(plain.params).values(), sf.unshard(profiled.params).values(), strict=True):
            assert torch.equal(a, b)


@distributed(world=2)
def test_the_timeline_of_a_ledger_has_phases_and_leaves() -> None:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    step = sf.sharded_step(_loss, sf.optim.adamw(0.1), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))
    state = step.init({"first": torch.ones(8, 4) / 9, "second": torch.ones(4, 6) / 7})
    with sf.memory.ledger(timeline=True) as book:
        book.count(state, "device")
        step(state, torch.ones(2, 8))
    found = book.timeline()
    phases = [x for x in found.sections if x.what in ("forward", "backward", "update")]
    assert [x.what for x in phases] == ["forward", "backward", "update"]
    assert phases[0].end <= phases[1].first and phases[1].end <= phases[2].first
    leaves = {(x.what, path) for x in found.sections for path in x.leaves}
    assert {(what, f"params['{name}']") for what in ("gather", "reduce") for name in ("first", "second")} <= leaves
    picture = sf.memory.as_svg(found)
    assert all(f">{what}</text>" in picture for what in ("forward", "backward", "update", "gather"))
    assert "gather params[" in picture
    names = [name for name, _ in found.largest]
    assert {"params['first']", "opt_state[0].mu['first']"} <= {*names}, names


def test_no_range_is_made_without_a_profiler() -> None:
    assert named_range("gather") is named_range("reduce")


def test_a_span_excludes_the_spans_inside_it() -> None:
    with count_traffic() as traffic:
        spans = Spans(traffic)
        with spans.span("outer", ()):
            sf.collectives.record("psum", ("dp",), 3)
            for _ in range(2):
                with spans.span("inner", ("w",)):
                    sf.collectives.record("psum", ("dp",), 5)
    outer, inner = spans.spent[("outer", ())], spans.spent[("inner", ("w",))]
    assert (outer.calls, outer.sent, inner.calls, inner.sent) == (1, 3, 2, 10)
    assert outer.seconds >= 0 and inner.seconds >= 0
