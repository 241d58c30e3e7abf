"""Directories that a single process owns at a time, errors of a disk, and threads for the work.

Threads drop a job's arguments before the job's future is done. A job runs for the program of the submitting thread.
"""

import collections
import concurrent.futures
import contextlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
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


class DiskFullError(OSError):
    """No room for a value. Earlier values on disk are untouched."""


class DamagedError(OSError):
    """A file differs from the written file: truncated, changed, or gone."""


class InUseError(OSError):
    """Another process owns a directory that only one may write to."""


class PoolInUseError(InUseError):
    """Another pool, of this process or of another, owns the directory."""


_NAME = "owner"
# Descriptors by which this process owns directories, for a forked child to close.
_LOCKS: set[int] = set()


@contextlib.contextmanager
def locked(directory: pathlib.Path, what: str, remedy: str, kind: type[InUseError] = InUseError) -> Iterator[int]:
    """Locks a directory until `unlock`, or until the body raises.

    Args:
        directory: existing directory.
        what: the name of the owner, for the error.
        remedy: remedy for the error, if another process or owner has the directory.
        kind: the type of the error.

    Raises:
        InUseError: another process, or another owner of this process, has the directory.
        NotImplementedError: the system has no `flock`, for example Windows.
    """
    try:
        import fcntl
    except ImportError:
        raise NotImplementedError(
            f"{directory} cannot be taken for {what}: this system has no flock. Checkpoints and leaves on disk need"
            " Linux or macOS."
        ) from None
    fd = os.open(directory / _NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(fd, f"{os.getpid():<16}".encode(), 0)
        _LOCKS.add(fd)
        yield fd
    except BlockingIOError as problem:
        owner = os.pread(fd, 16, 0).decode().strip() or "?"
        os.close(fd)
        raise kind(
            problem.errno, f"{directory} belongs to {what} of process {owner}, which is alive. {remedy}"
        ) from None
    except BaseException:
        unlock(fd)
        raise


def unlock(fd: int) -> None:
    """Releases a directory. Call once, because the descriptor may belong to another file afterwards."""
    import fcntl

    _LOCKS.discard(fd)
    fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that was forked just now, with the copy still open
    os.close(fd)


def _forget_locks() -> None:
    """Closes the locks in a forked child, so that the child does not keep a directory after the parent's end."""
    while _LOCKS:
        os.close(_LOCKS.pop())


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_forget_locks)
