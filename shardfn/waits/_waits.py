"""Waits that a user sees: their parts, and the wait of a command of `shardfn` that loads a model."""

import contextlib
import gc
import itertools
import os
import sys
import threading
import time
from typing import Any

PERIOD = 1.5  # seconds between two lines where there is no terminal; a busy machine may be late
_TICK = 0.25


class Wait:
    """Wait in progress, and a context manager that ends the wait. See `waiting`.

    Attributes:
        text: words for the work, such as "building C++".
        name: name of the part in progress, such as an op, empty without parts.
        total: number of parts of the wait, or 0 if the number is not known.
        done: number of finished parts.
        start: time at which the wait began.
        whole: whether the wait is for the whole program, and reported only without another wait.
    """

    def __init__(self, text: str, name: str, total: int, whole: bool) -> None:
        self.text, self.name, self.total, self.whole, self.done = text, name, total, whole, 0
        self.start = time.monotonic()

    def update(self, num: int = 1) -> None:
        """Adds to the number of finished parts."""
        self.done += num

    def end(self) -> None:
        """Ends the wait. A second call does nothing."""
        _board.remove(self)

    def __enter__(self) -> "Wait":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def waiting(text: str, name: str = "", *, total: int = 0, at_once: bool = False, whole: bool = False) -> Wait:
    """Begins a wait with reports: on a terminal as a bar, elsewhere as a line every two seconds.

    The first rank of a machine reports. Simultaneous waits share a line. `TQDM_DISABLE=1` hides all reports.

    Args:
        text: words for the work, such as "building C++".
        name: name of a part, such as an op. Waits of equal text are reported together, with all names.
        total: number of parts, counted by `update`.
        at_once: whether the first report comes now. Without it, a wait of a second is not reported.
        whole: whether the wait is for the whole program, and reported only without another wait.

    Returns:
        The wait: a context manager.

    Example:
        >>> with waiting("reading files", total=2) as files:
        ...     files.update()
    """
    wait = Wait(text, name, total, whole)
    if is_first():
        _board.add(wait, at_once)
    return wait


def is_first() -> bool:
    """Returns whether this process is the first rank of its machine."""
    for name in ("LOCAL_RANK", "RANK"):
        if name in os.environ:
            return os.environ[name] == "0"
    dist = sys.modules.get("torch.distributed")  # not imported here: the import takes seconds
    return dist is None or not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def text_of(waits: list[Wait], now: float) -> str:
    """Returns the words for several waits."""
    groups: dict[str, list[Wait]] = {}
    for wait in [wait for wait in waits if not wait.whole] or waits:
        groups.setdefault(wait.text, []).append(wait)
    return "; ".join(_describe_group(text, group, now) for text, group in groups.items())


def _describe_group(text: str, group: list[Wait], now: float) -> str:
    names = ", ".join(wait.name for wait in group if wait.name)
    done, total = (sum(getattr(wait, key) for wait in group) for key in ("done", "total"))
    count = f", {done} of {total}" if total else ""
    return f"{text} {names}".rstrip() + f"{count}, {now - min(wait.start for wait in group):.0f} s"


class _WaitBoard:
    """Waits of this process, and the thread that reports. The thread ends with the last wait."""

    def __init__(self) -> None:
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._waits, self._said = list[Wait](), 0.0
        self._thread: threading.Thread | None = None
        self._bar: Any = None

    def add(self, wait: Wait, at_once: bool) -> None:
        if os.environ.get("TQDM_DISABLE", "0") not in ("", "0") or sys.stderr is None:
            return
        with self._lock:
            if not self._waits:
                self._said = wait.start
            self._waits.append(wait)
            if at_once:
                self._said = wait.start - PERIOD
            if self._thread is None:
                self._thread = threading.Thread(target=self._report_waits, name="shardfn-waits", daemon=True)
                self._thread.start()
        self._wake.set()

    def remove(self, wait: Wait) -> None:
        with self._lock:
            with contextlib.suppress(ValueError):
                self._waits.remove(wait)
            thread = self._thread if not self._waits else None
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)  # its bar is gone before the program prints

    def _report_waits(self) -> None:
        while True:
            with self._lock:
                if not self._waits:
                    self._thread = None
                    self._close_bar()
                    return
                waits = list(self._waits)
            with contextlib.suppress(OSError, ValueError):  # stderr is closed
                self._show_waits(waits, time.monotonic())
            self._wake.wait(_TICK)
            self._wake.clear()

    def _show_waits(self, waits: list[Wait], now: float) -> None:
        if self._bar is None and now - self._said < PERIOD:
            return
        if not sys.stderr.isatty():
            self._said = now
            print(f"shardfn: {text_of(waits, now)}", file=sys.stderr, flush=True)
            return
        done, total = (sum(getattr(wait, key) for wait in waits) for key in ("done", "total"))
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(bar_format="shardfn: {desc} {bar:20}", dynamic_ncols=True, leave=False, total=total or 1)
        self._bar.total, self._bar.n = total or 1, done
        self._bar.set_description_str(text_of(waits, now))

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


_board = _WaitBoard()


def _reset_board() -> None:
    """Gives a forked process a new board: threads do not survive a fork."""
    vars(_board).update(vars(_WaitBoard()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_board)


_COMMANDS = {"generate", "serve"}
_RANK = "shardfn.cli._serve_rank"

_STARTED: list[Wait] = []  # of this process: at most one


def announce_start() -> None:
    """Begins the wait of this process if the process is a command with imports that take seconds.

    `end_start` ends the wait. This file calls the function when imported, before any other import of the package. Until
    `end_imports` Python collects no garbage: imports make many objects that stay, and looking for garbage among them
    takes a fifth of the time of a start.
    """
    if _is_command(sys.orig_argv):
        gc.disable()
        _STARTED.append(waiting("starting", whole=True))


def end_imports() -> None:
    """Lets Python collect garbage again after `announce_start`, but not among the objects of the imports."""
    if _STARTED and not gc.isenabled():
        gc.freeze()
        gc.enable()


def end_start() -> None:
    """Ends the wait of `announce_start`."""
    end_imports()
    while _STARTED:
        _STARTED.pop().end()


def _is_command(argv: list[str]) -> bool:
    """Returns whether Python's arguments begin `shardfn generate`, `shardfn serve` or a rank of a server.

    Example:
        >>> _is_command(["python", "/usr/bin/shardfn", "generate", "MODEL"]), _is_command(["python", "-m", "pytest"])
        (True, False)
    """
    pairs = itertools.pairwise(argv[1:])  # the program's name comes after Python's
    return _RANK in argv or any(word.rpartition("/")[2] == "shardfn" and then in _COMMANDS for word, then in pairs)


announce_start()
