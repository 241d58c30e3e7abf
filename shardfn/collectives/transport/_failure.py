"""Reports failures to the ranks that wait: a message in the job's store, then closed connections.

A rank that fails writes a message and closes all connections. A waiting rank gets an error of the transport, reads the
message, and closes connections in turn, which wakes further waiting ranks. So no failure ends in a deadlock.
"""

import contextlib
import datetime
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardfn._torch import default_store
from shardfn.core import is_known

# Seconds that a failing rank gives other ranks to leave by separate errors, before it wakes these ranks.
COURTESY = 0.2
# Seconds in which the store answers, if at all.
PATIENCE = 10.0
# The tag of a message that is never sent. Channels use smaller tags.
_NOBODY = (1 << 30) + 1
_INSTANT = datetime.timedelta(milliseconds=1)


class Board:
    """Messages of the ranks of a control plane about failures, kept in the job's store.

    If the store is gone, for example because rank 0, which holds the store, has died, messages are lost and reads are
    empty. The same holds for a store out of reach: the store is asked once, for `PATIENCE` seconds, and then no more.

    Args:
        name: name of the board, the same on all ranks, and different for each board.
        rank: this rank.
        size: the number of ranks.

    Attributes:
        silent: whether the store was out of reach.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._key, self._rank, self._size = f"shardfn/failure/{name}", rank, size
        self.silent = False

    def post(self, text: str, about: Sequence[int] = ()) -> None:
        """Leaves word for all ranks. `about` are ranks that have been waited for in vain."""
        # Appended, not set: several ranks may post at once, and no rank may overwrite another's word.
        self._ask_store(lambda store: store.append(f"{self._key}/told", json.dumps([text, list(about)]) + "\n"), None)

    def put(self, name: str, text: str) -> None:
        """Sets a text that all ranks may get."""
        self._ask_store(lambda store: store.set(f"{self._key}/{name}", text), None)

    def get(self, name: str) -> str:
        """Returns a text that a rank has put, or "" if no rank has."""
        key = f"{self._key}/{name}"
        return self._ask_store(lambda store: store.get(key).decode() if store.check([key]) else "", "")

    def decide(self, name: str, text: str) -> str:
        """Puts a text unless a rank has been quicker. Returns the present text, or `text` without a store."""
        key = f"{self._key}/{name}"
        return self._ask_store(lambda store: store.compare_set(key, "", text).decode(), text)

    def count(self, num: int, name: str = "count") -> int:
        """Adds to a counter of the board, and returns the value, or 0 if the store does not answer."""
        return self._ask_store(lambda store: store.add(f"{self._key}/{name}", num), 0)

    def read(self) -> list[tuple[str, list[int]]]:
        """Returns the posted messages, each with the ranks in question."""
        told = f"{self._key}/told"
        text = self._ask_store(
            lambda store: store.get(told).decode(errors="replace") if store.check([told]) else "", ""
        )
        return [tuple(json.loads(line)) for line in dict.fromkeys(text.splitlines())]  # two may have found out the same

    def leave(self) -> None:
        """Notes that this rank has left the step by an error."""
        self._ask_store(lambda store: store.set(f"{self._key}/{self._rank}", "1"), None)

    def wait_for_all(self, seconds: float) -> None:
        """Waits until every rank has left, for `seconds` at most."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.absent():
            time.sleep(0.02)

    def absent(self) -> list[int]:
        """Returns the other ranks that have not left, or all ranks if the store does not answer."""
        absent = [r for r in range(self._size) if r != self._rank]
        return self._ask_store(lambda store: [r for r in absent if not store.check([f"{self._key}/{r}"])], absent)

    def _ask_store(self, call: Callable[[Any], Any], otherwise: Any) -> Any:
        """Asks the store. Returns `otherwise` if the store is gone or out of reach.

        A store waits for an answer without end, with a lock held: so a thread asks, and stays behind.
        """
        if self.silent:
            return otherwise
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def run(store: Any) -> None:
            try:
                answers.put(call(store))
            except RuntimeError:
                answers.put(otherwise)

        try:
            threading.Thread(target=run, args=(_current_store(),), name="shardfn-store", daemon=True).start()
            return answers.get(timeout=PATIENCE)
        except queue.Empty:
            self.silent = True
        except RuntimeError:
            pass  # the store is gone
        return otherwise


def close(group: "dist.ProcessGroup | None") -> None:
    """Ends a communicator: transfers in flight fail at once, here and on the ranks at the other end.

    gloo has no call for an end (`abort` and `shutdown` do nothing), but closes every connection of a communicator in
    which a wait times out. Other backends, and communicators that have ended, are not touched.
    """
    if group is None or not is_known(group) or dist.get_backend(group) != "gloo":
        return
    for rank in range(group.size()):
        if rank != group.rank():
            # Fails in any case: by the timeout, which closes all connections, or because the connection is closed.
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], rank, _NOBODY).wait(_INSTANT)
    dist.destroy_process_group(group)


class EndedGroup:
    """Placeholder of a communicator that has ended, so that nothing keeps connections and threads."""

    def __getattr__(self, name: str) -> Any:
        raise TransportError(f"{name!r} was called on a communicator that has ended.")


def is_of_the_wire(error: BaseException) -> bool:
    """Returns whether an error reports a broken transfer.

    The transfer is on a channel of this package, or a collective that torch ran on gloo.
    """
    by_text = isinstance(error, RuntimeError) and any(text in str(error) for text in _GLOO)
    return by_text or isinstance(error, TransportError)


class TransportError(RuntimeError):
    """Error of a broken transfer: a peer is gone or did not answer in time."""


# gloo raises plain RuntimeErrors, with a place in gloo's source or the reason noted for a connection.
_GLOO = ("/gloo/transport/", "Application timeout caused pair closure")


def _current_store() -> Any:  # torch declares no append
    return default_store()
