"""Warns while a rank waits for ranks that may never come, such as when a single rank makes a collective call."""

import contextlib
import logging
import threading
from collections.abc import Iterator

_LOG = logging.getLogger("shardfn.collectives")
# Seconds of waiting before the warning. Calls that all ranks make at once take less.
SECONDS = 30.0


@contextlib.contextmanager
def naming_the_wait(what: str) -> Iterator[None]:
    """Logs a warning if the block takes long: `what` names the waiting rank and the awaited event."""
    timer = threading.Timer(SECONDS, _LOG.warning, [f"{what}, and has waited for {SECONDS:g} s."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
