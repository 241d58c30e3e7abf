"""`Arrival`: what a transfer writes into a tensor that somebody has already, and may read once it has come."""

import contextlib
import threading
from collections.abc import Callable

from torch import Tensor

from shardfn.core import Pending

from ._failure import TransportError


class Arrival:
    """A transfer under way, whose destination others have. It may be awaited any number of times, on any thread.

    Args:
        pending: the transfer.
        finish: puts what has come where it belongs; it runs once, in the first wait.
    """

    def __init__(self, pending: Pending[Tensor], finish: Callable[[Tensor], None]) -> None:
        self._pending: Pending[Tensor] | None = pending
        self._finish, self._error = finish, ""
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """Whether `wait` would not have to wait; of a transfer that has come, what it brought is put in its place."""
        with self._lock:
            pending = self._pending
        if pending is None:
            return True
        if pending.done():
            with contextlib.suppress(TransportError):  # `wait` says so
                self.wait()
            return True
        return False

    def wait(self) -> None:
        """Waits until it has come.

        Raises:
            TransportError: it never will; so it says each time.
        """
        with self._lock:
            if self._error:
                raise TransportError(self._error)
            if self._pending is None:
                return
            pending, self._pending = self._pending, None
            try:
                self._finish(pending.result())
            except BaseException as error:
                self._error = str(error) or type(error).__name__
                raise
