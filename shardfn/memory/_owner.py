"""Who owns a directory: one pool of one process, told by a lock that the kernel gives back however that ends."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from ._errors import PoolInUseError

_LOCK = "owner"
# Descriptors by which this process owns directories, for a forked child to close.
_LOCKS: set[int] = set()


@contextlib.contextmanager
def locked(directory: pathlib.Path) -> Iterator[int]:
    """Takes a directory: its descriptor, for `unlock`. Given back if the body raises; else by whoever was given it.

    Raises:
        PoolInUseError: another pool owns it, of this process or another.
    """
    fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(fd, f"{os.getpid():<16}".encode(), 0)
        _LOCKS.add(fd)
        yield fd
    except BlockingIOError as problem:
        owner = os.pread(fd, 16, 0).decode().strip() or "?"
        os.close(fd)
        raise PoolInUseError(
            problem.errno,
            f"{directory} belongs to a pool of process {owner}, which is alive. One directory serves one process: give"
            " each rank its own, or end that process.",
        ) from None
    except BaseException:
        unlock(fd)
        raise


def unlock(fd: int) -> None:
    """Gives a directory back: once, as the number may be another file's afterwards."""
    _LOCKS.discard(fd)
    fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that was forked just now, and has not closed its copy yet
    os.close(fd)


def _forget_locks() -> None:
    """A forked child is no owner, and must not keep the directory when its parent has gone."""
    while _LOCKS:
        os.close(_LOCKS.pop())


os.register_at_fork(after_in_child=_forget_locks)
