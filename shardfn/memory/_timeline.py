"""The timeline of a ledger: live bytes after each allocation and release, by name, with parts of a step. As SVG."""

import contextlib
import dataclasses
import html
import itertools
from collections.abc import Iterator, Mapping, Sequence

from shardfn.core import is_device

_COLORS = {"device": "#5b93d3", "host": "#e58a3c", "disk": "#9a7bc0"}
_PHASES = {"forward": "#eaf2fb", "backward": "#fdf1e5", "update": "#eef7ec"}
_MESSAGES = {"gather": "#e58a3c", "reduce": "#6fb35f", "refresh": "#9a7bc0"}
_LEFT, _TOP, _HIGH, _LANE, _ROW = 84, 44, 220, 16, 16


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a step in a timeline: a phase, or the messages of leaves within a phase.

    Attributes:
        what: "forward", "backward", "update", "gather", "reduce", "refresh" or "waits".
        leaves: the paths of the leaves that are sent.
        first: number of the first event.
        end: number of the event after the last.
    """

    what: str
    leaves: tuple[str, ...]
    first: int
    end: int

    def __str__(self) -> str:
        more = f" and {len(self.leaves) - 1} more" if self.leaves[1:] else ""
        return " ".join([self.what, *self.leaves[:1]]) + more


@dataclasses.dataclass(frozen=True)
class MemoryTimeline:
    """The events of a ledger: an event is an allocation, or a release of memory.

    Attributes:
        live: kind of memory -> live bytes before the first event, and after each event.
        sections: the parts of steps, in the order in which they ended.
        largest: pieces that are alive at the peak of the device, as (name, bytes), for example ("params['w']", 4096).
            The largest comes first. The bytes of equal names are summed.
    """

    live: Mapping[str, tuple[int, ...]]
    sections: tuple[Section, ...]
    largest: tuple[tuple[str, int], ...]

    @property
    def peak(self) -> int:
        """Returns the event after which most bytes of the device are alive."""
        return max(range(len(self.live["device"])), key=self.live["device"].__getitem__)


class TimelineRecorder:
    """Collects the events of a ledger, in order."""

    def __init__(self) -> None:
        self._events: list[tuple[str, int, str]] = []
        self._sections: list[Section] = []
        self._open: list[Section] = []

    def named(self, name: str) -> str:
        """Returns the name of a piece: the leaf if a message of leaves is being made, else phase and operation."""
        inner = self._open[-1] if self._open else None
        if inner is None:
            return name or "other"
        return str(inner) if inner.leaves else f"{inner.what}: {name or 'other'}"

    def changed(self, kind: str, nbytes: int, name: str) -> None:
        """Adds an event. `nbytes` is negative for a release."""
        self._events.append((kind, nbytes, name))

    @contextlib.contextmanager
    def section(self, what: str, leaves: Sequence[str]) -> Iterator[None]:
        """Notes a part of a step while the context is open."""
        self._open.append(Section(what, tuple(leaves), len(self._events), 0))
        try:
            yield
        finally:
            self._sections.append(dataclasses.replace(self._open.pop(), end=len(self._events)))

    def timeline(self) -> MemoryTimeline:
        """Returns the events so far."""
        live = {
            kind: tuple(itertools.accumulate((n if k == kind else 0 for k, n, _ in self._events), initial=0))
            for kind in _COLORS
        }
        found = MemoryTimeline(live, tuple(self._sections), ())
        pieces: dict[str, int] = {}
        for kind, nbytes, name in self._events[: found.peak]:
            if is_device(kind):
                pieces[name] = pieces.get(name, 0) + nbytes
        largest = sorted(((name, n) for name, n in pieces.items() if n), key=lambda piece: -piece[1])
        return dataclasses.replace(found, largest=tuple(largest))


def as_svg(found: MemoryTimeline, width: int = 900, names: int = 12) -> str:
    """Returns an SVG of a timeline: live bytes, phases, messages, and names at the peak.

    A mark below the curve is a message. The message's leaves are shown under the pointer.

    Args:
        found: the timeline.
        width: width of the picture, in pixels.
        names: number of the largest pieces at the peak that are listed.

    Example:
        >>> import torch
        >>> from shardfn.memory import as_svg, ledger
        >>> with ledger(timeline=True) as book:
        ...     x = torch.zeros(1024)
        >>> "aten.zeros" in as_svg(book.timeline())
        True
    """
    listed = found.largest[:names]
    below = _TOP + _HIGH + _LANE * len(_MESSAGES) + 28
    height = below + _ROW * (len(listed) + 1) + 12
    top = max(1, *(max(values) for values in found.live.values()))
    places = _event_places(found, top, width)
    most = found.live["device"][found.peak]
    at = next((str(x) for x in found.sections if x.what in _PHASES and x.first < found.peak <= x.end), "")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
            ' font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            _draw_text(8, 18, f"peak {_show_mib(most)} of the device" + (f", in {at}" if at else ""), 14),
            *_draw_phases(found, places),
            *_draw_curves(found, places, top, width),
            *_draw_messages(found, places),
            _draw_text(8, below + 12, f"alive at the peak, the largest {len(listed)}:"),
            *(
                _draw_text(24, below + 12 + _ROW * i, f"{_show_mib(nbytes)}   {name}")
                for i, (name, nbytes) in enumerate(listed, 1)
            ),
            "</svg>",
            "",
        ]
    )


def _event_places(found: MemoryTimeline, top: int, width: int) -> list[float]:
    """Returns the horizontal positions of events. Events below a thousandth of the peak take little room."""
    changes = [
        sum(abs(b - a) for a, b in pairs) for pairs in zip(*map(itertools.pairwise, found.live.values()), strict=True)
    ]
    room = [*itertools.accumulate((1.0 if change * 1000 >= top else 0.02 for change in changes), initial=0.0)]
    return [_LEFT + x / max(1.0, room[-1]) * (width - _LEFT - 12) for x in room]


def _draw_phases(found: MemoryTimeline, places: Sequence[float]) -> Iterator[str]:
    """Draws a band for each phase, with the name above."""
    for x in found.sections:
        if x.what in _PHASES:
            left, wide = places[x.first], max(1.0, places[x.end] - places[x.first])
            yield _draw_box(left, _TOP, wide, _HIGH, _PHASES[x.what], x.what)
            yield _draw_text(left + wide / 2, _TOP - 6, x.what, anchor="middle")


def _draw_curves(found: MemoryTimeline, places: Sequence[float], top: int, width: int) -> Iterator[str]:
    """Draws a line for each kind of memory in use, and the axis of bytes."""
    for part in range(5):
        y = _TOP + _HIGH * (1 - part / 4)
        yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{width - 12}" y2="{y:.1f}" stroke="#ddd"/>'
        yield _draw_text(_LEFT - 6, y + 4, _show_mib(top * part / 4), anchor="end")
    used = [kind for kind, values in found.live.items() if any(values)]
    for row, kind in enumerate(used):
        points = [(x, _TOP + _HIGH * (1 - n / top)) for x, n in zip(places, found.live[kind], strict=True)]
        steps = [points[0], *(p for a, b in itertools.pairwise(points) for p in ((b[0], a[1]), b))]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in steps)
        yield f'<polyline points="{path}" fill="none" stroke="{_COLORS[kind]}" stroke-width="1.5"/>'
        yield _draw_box(width - 90, _TOP + 6 + 16 * row, 10, 10, _COLORS[kind], kind)
        yield _draw_text(width - 74, _TOP + 15 + 16 * row, kind)


def _draw_messages(found: MemoryTimeline, places: Sequence[float]) -> Iterator[str]:
    """Draws a lane for each kind of message, with a mark for each message."""
    for row, (what, color) in enumerate(_MESSAGES.items()):
        y = _TOP + _HIGH + 12 + _LANE * row
        yield _draw_text(_LEFT - 6, y + 10, what, anchor="end")
        for x in found.sections:
            if x.what == what and x.leaves:
                wide = max(1.5, places[x.end] - places[x.first])
                yield _draw_box(places[x.first], y, wide, _LANE - 4, color, f"{what} {', '.join(x.leaves)}")


def _draw_box(x: float, y: float, wide: float, high: float, color: str, title: str) -> str:
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high}" fill="{color}">'
    return f"{shape}<title>{html.escape(title)}</title></rect>"


def _draw_text(x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {where}>{html.escape(words)}</text>"


def _show_mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):,.3g} MiB"
