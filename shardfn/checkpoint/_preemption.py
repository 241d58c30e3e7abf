"""`Preemption`: a signal on any rank ends the loop of all ranks, after the same step.

A scheduler announces a preemption by a signal (for example SIGTERM), to some processes or to all, at different times.
Ranks that left the loop at different steps would deadlock. So the handler only notes the signal. The note is part of
the agreement before each step, and after the step all ranks know the note.
"""

import os
import signal
import threading
import time
import types
from collections.abc import Mapping
from typing import Any

from shardfn.collectives import notice_of
from shardfn.core import Mesh, as_mesh
from shardfn.engine import comms_of

# EX_TEMPFAIL of sysexits.h: the job is to be started again. Launchers take 0 for a job that is done.
_TRY_AGAIN: Mapping[signal.Signals, int] = types.MappingProxyType({signal.SIGTERM: 75})


class Preemption:
    """Notices signals while its block runs, and has all ranks stop after the same step.

    No additional message is sent: the note is part of the agreement before each step (eager, captured, or a call of a
    `sharded` function). After the same steps all ranks have the same value.

    A second signal ends the process immediately, as without this block. Signals within `patience` seconds of the first
    count as one, since launchers forward a signal that the whole process group has already received.

    Args:
        mesh: mesh whose ranks stop together. Default: one device.
        signals: the signals to handle, each with the exit code for it. Launchers take 0 for a job that is done. If
            ranks receive different signals, the greatest code counts.
        patience: seconds in which further signals count as the first signal.

    Raises:
        ValueError: not in the main thread, which Python's handlers need, or an exit code outside 0 to 255.

    Example:
        >>> with Preemption() as preemption:
        ...     for step in range(10):
        ...         if step == 3:
        ...             signal.raise_signal(signal.SIGTERM)
        ...         preemption.meet()  # a step of `sharded_step` does
        ...         if preemption.stopping:
        ...             break
        >>> step, preemption.exit_code
        (3, 75)
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        *,
        signals: Mapping[signal.Signals, int] = _TRY_AGAIN,
        patience: float = 5.0,
    ) -> None:
        for number, code in signals.items():
            if not 0 <= code <= 255:
                raise ValueError(f"signals[{number.name}]={code}: a process ends with a number from 0 to 255.")
        self._mesh, self._signals, self._patience = as_mesh(mesh), dict(signals), patience
        self._pid, self._notice = os.getpid(), notice_of(self._mesh)
        self._since: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def stopping(self) -> bool:
        """Returns whether ranks stop now. The result is equal on all ranks that have run the same steps."""
        return self._notice.told > 0

    @property
    def exit_code(self) -> int:
        """Returns the exit code for the process: 0 until ranks stop, then the code of the signal."""
        return max(self._notice.told - 1, 0)

    def stop(self, exit_code: int = 0) -> None:
        """Requests from this rank that all ranks stop, as a signal does, for example when the time is up."""
        self._notice.mine = max(self._notice.mine, exit_code + 1)

    def meet(self) -> None:
        """Exchanges the notes by a separate message, for loops without agreements before steps. Collective."""
        comms_of(self._mesh).control.exchange(0)

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("Preemption handles signals, which Python allows in the main thread only. Enter it there.")
        for number in self._signals:
            self._before[number] = signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # None is a handler that was not set from Python, and that Python cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _handle_signal(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        forked = os.getpid() != self._pid  # a loader's worker has inherited the handler, and is to end
        if forked or (self._since is not None and time.monotonic() - self._since > self._patience):
            signal.signal(number, self._before.get(signal.Signals(number)) or signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._since = time.monotonic() if self._since is None else self._since
        self.stop(self._signals[signal.Signals(number)])
