"""The next batches, computed by a thread while the step runs."""

import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

from shardfn.core import adopting

T = TypeVar("T")
_POLL = 0.05  # seconds after which a writer to a full queue checks for a reader


def prefetch(iterable: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Yields the same items in the same order, computed up to `depth` ahead by a background thread.

    The thread starts with the first `next` and has ended when the iterator is exhausted, closed (`.close()`, or a `for`
    loop left and the iterator dropped) or has raised. An exception of `iterable` is raised here, at the same place in
    the order. Closing waits for an item that is being computed.

    Args:
        iterable: source of items, read in the thread.
        depth: number of items that may wait.

    Raises:
        ValueError: `depth` is below 1.

    Example:
        >>> list(prefetch(range(4)))
        [0, 1, 2, 3]
    """
    if depth < 1:
        raise ValueError(f"prefetch(depth={depth}): must be at least 1.")
    return _yield_items(iterable, depth)


def _yield_items(iterable: Iterable[T], depth: int) -> Generator[T, None, None]:
    # The thread writes, the iterating thread reads. The last entry is "end" or "error".
    items: queue.Queue[tuple[str, T | BaseException | None]] = queue.Queue(depth)
    left = threading.Event()
    thread = threading.Thread(
        target=adopting(_fill_queue), args=(iterable, items, left), name="shardfn-prefetch", daemon=True
    )
    thread.start()
    try:
        while True:
            kind, item = items.get()
            if kind == "end":
                return
            if kind == "error":
                assert isinstance(item, BaseException)
                raise item
            yield item  # pyright: ignore[reportReturnType] -- `kind` determines the member of the union
    finally:
        # The reader has stopped, possibly early: the thread must not wait for room forever.
        left.set()
        thread.join()


def _fill_queue(
    iterable: Iterable[T], items: "queue.Queue[tuple[str, T | BaseException | None]]", left: threading.Event
) -> None:
    def put_item(kind: str, item: T | BaseException | None) -> bool:
        while not left.is_set():
            try:
                items.put((kind, item), timeout=_POLL)
                return True
            except queue.Full:
                continue
        return False

    try:
        for item in iterable:
            if not put_item("item", item):
                return
        put_item("end", None)
    except BaseException as error:  # the reader gets every exception
        put_item("error", error)
