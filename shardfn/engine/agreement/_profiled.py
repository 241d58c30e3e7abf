"""Names the parts of an eager step in torch's profiler, measures the parts for `step.profile`, and traces calls."""

import contextlib
import dataclasses
import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler

from shardfn._torch import is_profiled
from shardfn.capture import capturing
from shardfn.collectives import Traffic
from shardfn.core import Ambient
from shardfn.leaves import LeafLayout
from shardfn.memory import is_recorded, recorded_section

_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


@dataclasses.dataclass
class Spent:
    """Time and bytes of a part of a step, without the parts inside.

    Attributes:
        calls: number of entries.
        seconds: seconds on this rank's clock.
        sent: bytes that this rank sent.
    """

    calls: int = 0
    seconds: float = 0.0
    sent: int = 0


class Spans:
    """Sums of time and bytes of each part of a step. Parts nest, and end in the reverse order.

    Args:
        traffic: an open counter.

    Attributes:
        spent: (part, paths of leaves that travel together) -> time and bytes.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.spent: dict[tuple[str, tuple[str, ...]], Spent] = {}
        self._traffic = traffic
        # For each open part, the time and bytes of the parts inside it.
        self._inside: list[Spent] = []

    @contextlib.contextmanager
    def span(self, what: str, paths: tuple[str, ...]) -> Iterator[None]:
        """Measures a part while the context is open."""
        self._inside.append(Spent())
        start, sent = time.perf_counter(), self._traffic.bytes
        try:
            yield
        finally:
            seconds, sent = time.perf_counter() - start, self._traffic.bytes - sent
            inside = self._inside.pop()
            into = self.spent.setdefault((what, paths), Spent())
            into.calls += 1
            into.seconds += seconds - inside.seconds
            into.sent += sent - inside.sent
            if self._inside:
                self._inside[-1].seconds += seconds
                self._inside[-1].sent += sent


class CallTraces:
    """Spans of OpenTelemetry for each call of a step, and inside for the parts of an eager step.

    Args:
        tracer: tracer of OpenTelemetry.
    """

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def span(self, what: str, paths: tuple[str, ...] = ()) -> AbstractContextManager[Any]:
        """Opens a span while the context is open."""
        attributes = {"shardfn.leaves": paths} if paths else {}
        return self._tracer.start_as_current_span(f"shardfn.{what}", attributes=attributes)


_SPANS = Ambient[Spans | CallTraces]("measured parts of a step")


def measured_into(spans: Spans) -> AbstractContextManager[Any]:
    """Measures the parts of eager steps while the context is open."""
    return _SPANS.bound(spans)


def trace_steps(tracer: Any = None) -> AbstractContextManager[Any]:
    """Makes spans of OpenTelemetry while the context is open: for each step, `evaluate` and call of a sharded function.

    A call's span has spans of the parts of an eager step: forward, backward, update, and gathers and reductions with
    the paths of their leaves. A captured step has only its own span. On a GPU spans have the times of the host.

    Args:
        tracer: tracer of OpenTelemetry. Default: the program's, as `opentelemetry.trace.get_tracer("shardfn")` has it.

    Raises:
        ImportError: OpenTelemetry is missing.

    Example:
        >>> class Tracer:
        ...     def start_as_current_span(self, name, attributes):
        ...         print(name)
        ...         return contextlib.nullcontext()
        >>> with trace_steps(Tracer()), traced_call("step 3"), named_range("forward"):
        ...     pass
        shardfn.step 3
        shardfn.forward
    """
    if tracer is None:
        if importlib.util.find_spec("opentelemetry") is None:
            raise ImportError("trace_steps needs OpenTelemetry, which is missing: pip install 'shardfn[otel]'")
        from opentelemetry import trace

        tracer = trace.get_tracer("shardfn")
    return _SPANS.bound(CallTraces(tracer))


def traced_call(what: str) -> AbstractContextManager[Any]:
    """Opens a span of a call inside of `trace_steps`, and else nothing."""
    spans = _SPANS.innermost()
    return spans.span(what) if isinstance(spans, CallTraces) else _NOTHING


def named_range(
    what: str, leaves: Sequence[LeafLayout] = (), members: Sequence[int] = (), asked: int | None = None
) -> AbstractContextManager[Any]:
    """Opens a range of torch's profiler ("shardfn.gather params['w']"), a span, and a section of a ledger's timeline.

    Captures get no ranges.

    Args:
        what: the part of the step.
        leaves: the layout.
        members: the leaves that travel together.
        asked: the needed leaf, whose path names the range.
    """
    spans = _SPANS.innermost()
    watched, recorded = is_profiled(), is_recorded()
    if not (spans is not None or watched or recorded) or capturing():
        return _NOTHING
    paths = tuple(leaves[i].path for i in members)
    stack = contextlib.ExitStack()
    if recorded:
        stack.enter_context(recorded_section(what, paths if asked is None else (leaves[asked].path,)))
    if watched:
        names = ", ".join(paths) if asked is None else leaves[asked].path
        stack.enter_context(profiler.record_function(f"shardfn.{what} {names}".rstrip()))
    if spans is not None:
        stack.enter_context(spans.span(what, paths))
    return stack
