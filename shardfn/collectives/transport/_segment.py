"""A segment: memory of a process that other processes on the host can read, without a name in any file system.

A segment is a memfd, opened by other processes through the owner's entry in /proc. The segment ends with the last
process that holds the file, after any end of the process, so there is nothing to clean up. Whether two ranks share
memory is shown by reading: a host's name or a process's number may mean something else in another container, but a
random word cannot be guessed.
"""

import mmap
import os
import secrets
from typing import NamedTuple

_WORD = 16
# The first page holds the word, so that the bytes of use begin at a page.
_HEAD = mmap.PAGESIZE


class NotSharedError(Exception):
    """Two processes cannot share memory. The message has the reason."""


class Offer(NamedTuple):
    """Data by which other processes read a segment.

    Attributes:
        pid: the owner.
        descriptor: the segment's number among the owner's open files.
        size: bytes that can be used, after the first page.
        word: the bytes at the start of the segment, drawn for each segment.
    """

    pid: int
    descriptor: int
    size: int
    word: bytes


class Segment:
    """Memory that this process writes and other processes read, until `close`, or the end of the process.

    Attributes:
        offer: the data for reading by other processes.
        view: bytes.
    """

    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise NotSharedError("this system has no memory without a name (memfd_create)")
        import fcntl  # only POSIX has it

        word = secrets.token_bytes(_WORD)
        fd = os.memfd_create("shardfn", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, _HEAD + size)
            os.posix_fallocate(fd, 0, _HEAD + size)  # with too little memory, an error now and not a signal later
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _size_seals())
            self._map = mmap.mmap(fd, _HEAD + size)
        except BaseException:
            os.close(fd)
            raise
        self._map[:_WORD] = word
        self._fd = fd
        self.offer = Offer(os.getpid(), fd, size, word)
        self.view = memoryview(self._map)[_HEAD:]

    def close(self) -> None:
        """Gives the memory back once the readers have closed, too. No view may be left."""
        self.view.release()
        self._map.close()
        os.close(self._fd)


class Reader:
    """Segment of another process, which cannot be written here.

    Attributes:
        view: bytes, as the owner writes.

    Raises:
        NotSharedError: the offer leads to no segment, or to a segment of another size or with another word, or is
            refused.
    """

    def __init__(self, offer: Offer) -> None:
        path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
        try:
            # Should the number belong to another file here, such as a pipe, opening the file must not wait.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise NotSharedError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            self._map = _map_segment(fd, offer, path)
        finally:
            os.close(fd)
        self.view = memoryview(self._map)[_HEAD:]

    def close(self) -> None:
        """Unmaps the shared memory. All views must have been released."""
        self.view.release()
        self._map.close()


def _size_seals() -> int:
    """Returns the seals that fix a segment's size for good.

    No reader can be killed by a page that the owner took away.
    """
    import fcntl

    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _map_segment(fd: int, offer: Offer, path: str) -> mmap.mmap:
    import fcntl

    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise NotSharedError(f"{path} is not a memfd: {error.strerror}") from error
    if seals & _size_seals() != _size_seals():
        raise NotSharedError(f"{path} may change its size: its seals are {seals}, not {_size_seals()}")
    size = os.fstat(fd).st_size - _HEAD
    if size != offer.size:
        raise NotSharedError(f"{path} has {size} bytes, its owner announced {offer.size}")
    try:
        pages = mmap.mmap(fd, _HEAD + size, prot=mmap.PROT_READ)
    except OSError as error:
        raise NotSharedError(f"{path} cannot be mapped: {error.strerror}") from error
    if pages[:_WORD] != offer.word:
        pages.close()
        raise NotSharedError(f"{path} is another process's memory: it holds another word than its owner announced")
    return pages
