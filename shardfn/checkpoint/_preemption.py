"""`Preemption`: a signal on any rank ends the loop of all of them, after the same step.

A scheduler that wants its machine back sends a signal, to some processes or to all, at different times. Ranks that left
the loop at different steps would wait for one another. So the handler only notes the signal. The note is part of the
agreement before each step, and after that step all ranks know of it.
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

    Costs no message: the note is part of the agreement before each step, be it eager, captured or a call of a `sharded`
    function. After the same steps it has the same value on all ranks.

    A second signal ends the process at once, as it would have without this block. Signals within `patience` seconds of
    the first count as one, since launchers forward a signal that the whole process group has already received.

    Args:
        mesh: whose ranks stop together; default one device.
        signals: the signals to handle, each with the exit code for it. Launchers take 0 for a job that is done. If
            ranks receive different signals, the greatest code counts.
        patience: seconds.

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
        """Returns whether ranks stop now; equal on all ranks that have run the same steps."""
        return self._notice.told > 0

    @property
    def exit_code(self) -> int:
        """Returns the exit code for the process: 0 until ranks stop, then that of the signal."""
        return max(self._notice.told - 1, 0)

    def stop(self, exit_code: int = 0) -> None:
        """Requests from this rank that all ranks stop, as a signal does, for instance when the time is up."""
        self._notice.mine = max(self._notice.mine, exit_code + 1)

    def meet(self) -> None:
        """Exchanges the notes by a message of its own: for loops whose steps have no agreement. Collective."""
        comms_of(self._mesh).control.exchange(0)

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("Preemption handles signals, which Python allows in the main thread only; enter it there.")
        for number in self._signals:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # None is a handler that was not set from Python, and cannot be set again from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        forked = os.getpid() != self._pid  # a loader's worker has inherited the handler, and is to end
        if forked or (self._since is not None and time.monotonic() - self._since > self._patience):
            signal.signal(number, self._before.get(signal.Signals(number)) or signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._since = time.monotonic() if self._since is None else self._since
        self.stop(self._signals[signal.Signals(number)])
