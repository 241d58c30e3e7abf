"""The ledger: live bytes by kind of memory, and bytes that were moved between kinds.

On a machine without an accelerator `device` and `host` are both RAM, and the ledger separates the two: torch's
allocations are the device's, unless they are made inside `on_host()`. So budgets can be tested anywhere. With an
accelerator, device bytes are the bytes of the allocator, and torch's allocations on the CPU are the host's.

The timeline of a ledger has the live bytes after each allocation and release, by name, with parts of a step.
"""

import collections
import contextlib
import dataclasses
import html
import itertools
import os
import pathlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardfn import core
from shardfn._torch import TorchDispatchMode
from shardfn.core import is_device
from shardfn.kernels import scratch_bytes

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
        """Returns the name of an allocation: the leaf while leaves are packed to be sent, else phase and operation."""
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


KINDS: tuple[core.MemoryKind, ...] = ("device", "host", "disk")


class Ledger:
    """Live and peak bytes by kind, and traffic by direction, from `ledger()`. Readable also after the context's end."""

    def __init__(self, device: torch.device, recorder: TimelineRecorder | None = None) -> None:
        self._device, self.recorder = device, recorder
        self._live: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._peak: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._moved: dict[tuple[str, str], list[int]] = {}
        # A key is an address, and a new owner may get the address of a freed owner. So freed owners are removed before
        # a key is looked up, and a weak reference leaves a note before the address is free.
        self._held: dict[int, tuple[weakref.ref[Any], str, int, str]] = {}
        # Weak references call back at any point, perhaps while the lock is held. So the callbacks only leave a note.
        self._dead: collections.deque[int] = collections.deque()
        self._lock = threading.RLock()

    def live(self, kind: str) -> int:
        """Returns the live bytes in memory of `kind`, among the bytes that the ledger has seen."""
        _check_kind(kind)
        if self._is_cuda(kind):
            return torch.cuda.memory_allocated(self._device)
        with self._lock:
            self._count_freed()
            return self._live[kind]

    def peak(self, kind: str) -> int:
        """Returns the peak of live bytes in memory of `kind`."""
        _check_kind(kind)
        if self._is_cuda(kind):
            return max(self._peak["device"], torch.cuda.max_memory_allocated(self._device))
        return self._peak[kind]

    def _is_cuda(self, kind: str) -> bool:
        return core.is_device(kind) and self._device.type == "cuda"

    def moved(self, src: str, dst: str) -> int:
        """Returns the bytes that were moved from `src` to `dst`."""
        return self._traffic_between(src, dst)[1]

    def transfers(self, src: str, dst: str) -> int:
        """Returns the number of transfers from `src` to `dst`."""
        return self._traffic_between(src, dst)[0]

    def count(self, tree: core.PyTree, kind: str) -> None:
        """Counts values older than the ledger as `kind`: tensors, blocks of a state's leaves, values on disk.

        In a timeline the values are named by the paths of leaves.
        """
        _check_kind(kind)
        for path, leaf in core.named_leaves(tree):
            name, held = path.removeprefix("."), getattr(leaf, "held", leaf)  # the block of a leaf of a state
            if isinstance(held, Tensor):
                storage = held.untyped_storage()
                self.hold(storage, storage._cdata, kind, storage.nbytes(), name)
            elif isinstance(held, core.Stored):
                slot = getattr(held, "slot", held)
                self.hold(slot, id(slot), kind, held.nbytes, name)

    def timeline(self) -> MemoryTimeline:
        """Returns the events so far, by name and with the parts of steps.

        Raises:
            ValueError: the ledger was opened without `timeline=True`.
        """
        if self.recorder is None:
            raise ValueError("this ledger keeps no timeline: open it by memory.ledger(timeline=True).")
        with self._lock:
            self._count_freed()
            return self.recorder.timeline()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline as a picture: phases, messages of leaves, and names of the memory at the peak.

        Args:
            path: file with the ending ".svg", for a browser.

        Raises:
            ValueError: the file has another ending, or the ledger was opened without `timeline=True`.
        """
        if pathlib.Path(path).suffix != ".svg":
            raise ValueError(f"plot({os.fspath(path)!r}): the name must end in .svg, because the picture is SVG.")
        pathlib.Path(path).write_text(as_svg(self.timeline()), encoding="utf-8")

    def table(self) -> str:
        """Returns live bytes and traffic as a table.

        Example:
            >>> with ledger() as book:
            ...     x = torch.zeros(1024)
            >>> print(book.table())
            memory        live       peak
            device       4,096      4,096
            host             0          0
            disk             0          0
        """
        rows = [(kind, f"{self.live(kind):,}", f"{self.peak(kind):,}") for kind in KINDS]
        width = max(10, *(len(cell) for row in rows for cell in row[1:]))
        lines = [f"{'memory':<8}{'live':>{width}} {'peak':>{width}}"]
        lines += [f"{kind:<8}{live:>{width}} {peak:>{width}}" for kind, live, peak in rows]
        if self._moved:
            moves = [(f"{a} -> {b}", f"{n:,}", f"{size:,}") for (a, b), (n, size) in sorted(self._moved.items())]
            width = max(10, *(len(row[2]) for row in moves))
            lines += ["", f"{'traffic':<16}{'transfers':>10} {'bytes':>{width}}"]
            lines += [f"{way:<16}{n:>10} {size:>{width}}" for way, n, size in moves]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return core.as_html(self.table())

    @contextlib.contextmanager
    def section(self, what: str, leaves: Sequence[str]) -> Iterator[None]:
        """Notes a part of a step in the timeline while the context is open."""
        assert self.recorder is not None
        with self._lock:
            self._count_freed()
        with self.recorder.section(what, leaves):
            yield
            with self._lock:
                self._count_freed()

    def hold(self, owner: Any, key: int, kind: str, nbytes: int, name: str = "") -> None:
        """Counts `nbytes` as alive until `owner` is garbage. An owner counts once."""
        with self._lock:
            self._count_freed()
            if key in self._held:
                return
            if self.recorder is not None:
                name = self.recorder.named(name)
                self.recorder.changed(kind, nbytes, name)
            self._held[key] = (weakref.ref(owner, lambda _: self._dead.append(key)), kind, nbytes, name)
            self._live[kind] += nbytes
            self._peak[kind] = max(self._peak[kind], self._live[kind])

    def pass_through(self, kind: str, nbytes: int) -> None:
        """Counts bytes that were alive in addition to the present bytes, and are freed."""
        with self._lock:
            self._count_freed()
            self._peak[kind] = max(self._peak[kind], self._live[kind] + nbytes)

    def knows(self, key: int) -> bool:
        """Returns whether the owner of this key is counted."""
        with self._lock:
            self._count_freed()
            return key in self._held

    def move(self, src: str, dst: str, nbytes: int) -> None:
        """Counts one transfer."""
        with self._lock:
            entry = self._moved.setdefault((src, dst), [0, 0])
            entry[0] += 1
            entry[1] += nbytes

    def keep_device_peak(self) -> None:
        """Saves the allocator's peak before a reset."""
        if self._device.type == "cuda":
            self._peak["device"] = max(self._peak["device"], torch.cuda.max_memory_allocated(self._device))

    def _traffic_between(self, src: str, dst: str) -> list[int]:
        _check_kind(src)
        _check_kind(dst)
        return self._moved.get((src, dst), [0, 0])

    def _count_freed(self) -> None:
        while self._dead:
            _, kind, nbytes, name = self._held.pop(self._dead.popleft())
            self._live[kind] -= nbytes
            if self.recorder is not None:
                self.recorder.changed(kind, -nbytes, name)


_BOOKS = core.Ambient[Ledger]("ledgers")
_ON_HOST = core.Ambient[None]("allocations are host memory", by_thread=True)


@contextlib.contextmanager
def ledger(device: torch.device | str | None = None, *, timeline: bool = False) -> Iterator[Ledger]:
    """Counts live bytes and traffic by memory kind while the context is open.

    Ledgers nest. An outer ledger also counts for the inner contexts.

    Live are the storages that torch's operations return on the calling thread while the ledger is open (on a CPU also
    the backward), allocations of `host_empty` and of the pools, and the arguments of `Ledger.count`. The peak includes
    the workspace of shardfn's kernels, by `kernels.scratch_bytes`. Not counted are the workspace of torch's operations,
    and the internal buffers of compiled code.

    Args:
        device: device of the kind "device". Default: the accelerator if available, else the CPU.
        timeline: whether every allocation and release is kept, for `Ledger.timeline` and `Ledger.plot`.

    Returns:
        A context manager that yields a `Ledger`.

    Raises:
        ValueError: `timeline` is set with an accelerator, where the ledger does not see single allocations.

    Example:
        >>> with ledger() as book:
        ...     x = torch.zeros(8)
        ...     with on_host():
        ...         y = torch.zeros(2)
        ...     del x
        >>> book.live("device"), book.peak("device"), book.live("host")
        (0, 32, 8)
    """
    place = torch.device(device) if device is not None else default_device()
    if timeline and place.type != "cpu":
        raise ValueError(
            f"ledger(timeline=True) is not supported on {place}, whose allocator reports only sums. Use"
            " ledger('cpu', timeline=True) on a CPU, or step.lower(state, batch).plot() for the memory of a captured"
            " step."
        )
    book = Ledger(place, TimelineRecorder() if timeline else None)
    if place.type == "cuda":
        for other in _BOOKS.all:
            other.keep_device_peak()
        torch.cuda.reset_peak_memory_stats(place)
    with _BOOKS.bound(book):
        try:
            with _StorageWatch(book, place):
                yield book
        finally:
            book.keep_device_peak()


def on_host() -> AbstractContextManager[None]:
    """Counts allocations inside as host memory, for ledgers on a machine where device and host are both RAM.

    Example:
        >>> with ledger() as book, on_host():
        ...     x = torch.zeros(4)
        >>> book.live("host")
        16
    """
    return _ON_HOST.bound(None)


def in_host_region() -> bool:
    """Returns whether `on_host()` is open on this thread.

    Example:
        >>> with on_host():
        ...     in_host_region()
        True
    """
    return bool(_ON_HOST)


def default_device() -> torch.device:
    """Returns the accelerator if available, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def record_move(src: core.MemoryKind, dst: core.MemoryKind, nbytes: int) -> None:
    """Reports a transfer to every open ledger. Without an open ledger, the cost is one test of a list."""
    if _BOOKS:
        for book in _BOOKS.all:
            book.move(src, dst, nbytes)


def record_tensor(x: Tensor, kind: core.MemoryKind) -> None:
    """Reports memory that no torch operation allocates, as long as the tensor's storage lives."""
    if _BOOKS:
        storage = x.untyped_storage()
        for book in _BOOKS.all:
            book.hold(storage, storage._cdata, kind, storage.nbytes())


def is_recorded() -> bool:
    """Returns whether an open ledger keeps a timeline."""
    return bool(_BOOKS) and any(book.recorder is not None for book in _BOOKS.all)


def recorded_section(what: str, leaves: Sequence[str]) -> AbstractContextManager[Any]:
    """Returns a context that records a part of a step in the timelines of open ledgers."""
    stack = contextlib.ExitStack()
    for book in _BOOKS.all:
        if book.recorder is not None:
            stack.enter_context(book.section(what, leaves))
    return stack


def record_owner(owner: Any, kind: core.MemoryKind, nbytes: int) -> None:
    """Reports bytes that live as long as `owner` does."""
    if _BOOKS:
        for book in _BOOKS.all:
            book.hold(owner, id(owner), kind, nbytes)


class _StorageWatch(TorchDispatchMode):
    """Reports every new storage that an operation returns to one ledger."""

    supports_higher_order_operators = True

    def __init__(self, book: Ledger, device: torch.device) -> None:
        super().__init__()
        self._book, self._cpu_is_device = book, device.type == "cpu"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for x in (out,) if isinstance(out, Tensor) else core.tree_leaves(out):
            if _has_bytes(x):
                self._record_op(x, func, args, kwargs)
        if self._cpu_is_device and (extra := scratch_bytes(func, args)):
            self._book.pass_through("host" if in_host_region() else "device", extra)
        return out

    def _record_op(self, x: Tensor, func: Any, args: Any, kwargs: Any) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if self._book.knows(key):
            return
        # `torch.tensor` allocates out of sight and then lifts the tensor. Every other result that shares an operand's
        # storage is a view of a value older than the ledger.
        if func is not torch.ops.aten.lift_fresh.default and key in _find_storages((args, kwargs)):
            return
        host = in_host_region() or not self._cpu_is_device
        name = "" if self._book.recorder is None else str(func).removesuffix(".default")
        self._book.hold(storage, key, "host" if host else "device", storage.nbytes(), name)


def _has_bytes(x: Any) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.layout == torch.strided


def _find_storages(tree: core.PyTree) -> set[int]:
    return {x.untyped_storage()._cdata for x in core.tree_leaves(tree) if _has_bytes(x)}


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"memory kind {kind!r} is not one of {', '.join(KINDS)}.{core.did_you_mean(kind, KINDS)}")
