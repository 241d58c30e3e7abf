"""Covers shardfn/engine/agreement/_profiled.py: the parts of a step, and their leaves, appear in torch's profiler."""

import contextlib
from collections.abc import Iterator
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


class _Tracer:
    """A tracer that keeps the names of its spans, with the span around each."""

    def __init__(self) -> None:
        self.found, self._open = list[tuple[str, str, tuple[str, ...]]](), [""]

    @contextlib.contextmanager
    def start_as_current_span(self, name: str, attributes: dict[str, Any]) -> Iterator[None]:
        self.found.append((name, self._open[-1], attributes.get("shardfn.leaves", ())))
        self._open.append(name)
        yield
        self._open.pop()


@pytest.mark.parametrize("jitted", [False, True])
def test_spans_of_steps_and_their_parts(jitted: bool) -> None:
    step = sf.sharded_step(sf.jit(_loss) if jitted else _loss, sf.optim.sgd(0.1), donate=False)
    state, tracer = step.init({"first": torch.ones(8, 4) / 9, "second": torch.ones(4, 6) / 7}), _Tracer()
    plain, _ = step(state, torch.ones(2, 8))
    with sf.trace_steps(tracer):
        traced, _ = step(state, torch.ones(2, 8))
        step.evaluate(state, [torch.ones(2, 8)])
    calls = [name for name, around, _ in tracer.found if not around]
    assert calls[0] == "shardfn.step 0" and "evaluate" in calls[1], tracer.found
    parts = [name for name, around, _ in tracer.found if around == "shardfn.step 0"]
    assert {"shardfn.forward", "shardfn.backward", "shardfn.update"} <= {*parts} or jitted
    assert not jitted or not parts
    assert torch.equal(plain.params["first"].local, traced.params["first"].local)


def test_spans_are_those_of_opentelemetry() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, spans = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    step = sf.sharded_step(_loss, sf.optim.sgd(0.1))
    state = step.init({"first": torch.ones(8, 4) / 9, "second": torch.ones(4, 6) / 7})
    with sf.trace_steps(provider.get_tracer("mine")):
        step(state, torch.ones(2, 8))
    found: Any = spans.get_finished_spans()
    *parts, call = found
    assert call.name == "shardfn.step 0" and call.parent is None
    assert {x.name for x in parts} >= {"shardfn.forward", "shardfn.backward", "shardfn.update"}
    assert all(x.context.trace_id == call.context.trace_id for x in parts)
    assert all(call.start_time <= x.start_time <= x.end_time <= call.end_time for x in parts)
