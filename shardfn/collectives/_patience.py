"""A word where a rank waits for others that may never come, as where only the first one calls what all must."""

import contextlib
import logging
import threading
from collections.abc import Iterator

_LOG = logging.getLogger("shardfn.collectives")
# After so many seconds of waiting; what all ranks call at once takes less.
SECONDS = 30.0


@contextlib.contextmanager
def naming_the_wait(what: str) -> Iterator[None]:
    """Logs a warning if the block takes long: `what` is waiting, and on what it depends."""
    timer = threading.Timer(SECONDS, _LOG.warning, [f"{what}, and has waited for {SECONDS:g} s."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
