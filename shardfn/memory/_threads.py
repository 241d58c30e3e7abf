"""Work for other threads, which lets go of what it worked on before it says that it is done."""

import collections
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
_REGION = threading.local()


@contextlib.contextmanager
def background() -> Iterator[None]:
    """Says that what this thread asks of a disk inside is served when nothing else waits for that disk.

    Example:
        >>> with background():
        ...     in_background()
        True
    """
    before = in_background()
    _REGION.background = True
    try:
        yield
    finally:
        _REGION.background = before


def in_background() -> bool:
    """Whether `background()` is open on this thread."""
    return getattr(_REGION, "background", False)


class Threads:
    """A few threads that do what waits, in its order; what may wait longer when nothing else does.

    An executor alone drops the arguments some time after the future is done. Then memory and files would seem to be in
    use a little longer than they are, and a file that is free would not be found.

    Args:
        count: how many.
        name: what their names begin with.
        initializer: called in each of them first.

    Example:
        >>> threads = Threads(1, "example")
        >>> threads.submit(len, "hello").result()
        5
        >>> threads.close(wait=True)
    """

    def __init__(self, count: int, name: str, initializer: Callable[[], None] | None = None) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(count, name, initializer)
        self._first: collections.deque[_Job[Any]] = collections.deque()
        self._later: collections.deque[_Job[Any]] = collections.deque()

    def submit(self, work: Callable[..., T], *args: Any, later: bool = False) -> concurrent.futures.Future[T]:
        """Runs `work(*args)` on one of the threads; if `later`, behind all that is not."""
        lane = self._later if later else self._first
        job = _Job(concurrent.futures.Future(), work, [args])
        lane.append(job)
        try:
            self._executor.submit(self._next)
        except BaseException:  # closed, or interrupted: then nobody may come for the job
            with contextlib.suppress(ValueError):
                lane.remove(job)
            raise
        return job.future

    def close(self, *, wait: bool) -> None:
        """Ends the threads when all is done, and waits for that if told to."""
        self._executor.shutdown(wait=wait)

    def _next(self) -> None:
        """Does one job, if there is one; it is called at least as often as there are jobs."""
        for lane in (self._first, self._later):
            with contextlib.suppress(IndexError):
                return lane.popleft().run()


class _Job(NamedTuple, Generic[T]):
    future: concurrent.futures.Future[T]
    work: Callable[..., T]
    args: list[tuple[Any, ...]]

    def run(self) -> None:
        future = self.future
        try:
            out = self.work(*self.args.pop())
        except BaseException as error:
            del self  # the error knows this frame: in a cycle with its future, what was worked on would live on
            future.set_exception(error)
            del future
        else:
            future.set_result(out)
