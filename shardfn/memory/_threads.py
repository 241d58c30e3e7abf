"""Threads that drop a job's arguments before the job's future is done.

A job runs for the program of the submitting thread.
"""

import collections
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar

from shardfn import core

T = TypeVar("T")
_BACKGROUND = core.Ambient[None]("requests to a disk wait for all others", by_thread=True)


def background() -> AbstractContextManager[None]:
    """Gives this thread's requests to a disk the lowest priority while the context is open.

    Example:
        >>> with background():
        ...     in_background()
        True
    """
    return _BACKGROUND.bound(None)


def in_background() -> bool:
    """Returns whether `background()` is open on this thread."""
    return bool(_BACKGROUND)


class Threads:
    """A few threads that run jobs in order. Jobs submitted with `later` run when no other jobs wait.

    A `ThreadPoolExecutor` drops the arguments some time after the future is done. Then memory and files would seem to
    be in use for too long. For example, a pool would make a new file although a file is free.

    Args:
        count: number of threads.
        name: prefix of the threads' names.

    Example:
        >>> threads = Threads(1, "example")
        >>> threads.submit(len, "hello").result()
        5
        >>> threads.close(wait=True)
    """

    def __init__(self, count: int, name: str) -> None:
        self._executor, self._name = concurrent.futures.ThreadPoolExecutor(count, name), name
        self._first: collections.deque[_Job[Any]] = collections.deque()
        self._later: collections.deque[_Job[Any]] = collections.deque()

    def submit(self, work: Callable[..., T], *args: Any, later: bool = False) -> concurrent.futures.Future[T]:
        """Runs `work(*args)` on one of the threads. With `later`, all other jobs run first."""
        lane = self._later if later else self._first
        job = _Job(concurrent.futures.Future(), work, [args], core.this_program())
        lane.append(job)
        try:
            self._executor.submit(self._run_next)
        except BaseException:  # closed, or interrupted: then no thread may run the job
            with contextlib.suppress(ValueError):
                lane.remove(job)
            raise
        return job.future

    def close(self, *, wait: bool) -> None:
        """Ends the threads when all jobs are done. With `wait`, returns after the end.

        On one of these threads, for example in the garbage collector, the call does not wait: a thread that waits for
        itself would deadlock.
        """
        here = threading.current_thread().name.startswith(self._name)
        self._executor.shutdown(wait=wait and not here)

    def _run_next(self) -> None:
        """Runs the next job, if any. Called at least once for each job."""
        for lane in (self._first, self._later):
            with contextlib.suppress(IndexError):
                return lane.popleft().run()


class _Job(NamedTuple, Generic[T]):
    future: concurrent.futures.Future[T]
    work: Callable[..., T]
    args: list[tuple[Any, ...]]
    program: core.Program

    def run(self) -> None:
        future = self.future
        try:
            with core.adopted(self.program):
                out = self.work(*self.args.pop())
        except BaseException as error:
            del self  # the error knows this frame: in a cycle with its future, the arguments would live on
            future.set_exception(error)
            del future
        else:
            future.set_result(out)
