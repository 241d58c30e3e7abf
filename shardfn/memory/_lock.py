"""Directories that a single process owns at a time, and errors of a disk."""

import contextlib
import os
import pathlib
from collections.abc import Iterator


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
