"""A rank's files: written, or linked from the checkpoint before where nothing in them has changed."""

import concurrent.futures
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shardfn.memory import Bytes, sync

from ._contents import FilePlan, Part
from ._manifest import Manifest

# The bytes of a part, in order.
Read = Callable[[Part], Iterator[Bytes]]


class LastFiles(NamedTuple):
    """The checkpoint before."""

    place: pathlib.Path
    manifest: Manifest


class WrittenFile(NamedTuple):
    """What a rank has written.

    Attributes:
        digests: of the parts of each file.
        bytes: that were written.
        linked: bytes of files that were linked.
    """

    digests: list[list[str]]
    bytes: int
    linked: int


def write_files(
    place: pathlib.Path, plans: Sequence[FilePlan], read: Read, before: LastFiles | None, *, durable: bool
) -> WrittenFile:
    """Writes files to a directory that nobody reads yet.

    Args:
        place: the directory.
        plans: the files.
        read: gives the bytes of a part; asked once or twice.
        before: whose files may be linked.
        durable: whether to wait until they have reached the device.

    Raises:
        OSError: it failed; what was written is of no use.
    """
    digests, written, linked = [], 0, 0
    with concurrent.futures.ThreadPoolExecutor(1, "shardfn-digest") as beside:
        for plan in plans:
            same, known = (False, []) if before is None else _unchanged(plan, read, before)
            if same and before is not None and _link(before.place / plan.name, place / plan.name):
                linked += plan.bytes
            else:
                known = _write(place / plan.name, plan, read, known, beside)
                written += plan.bytes
            if durable:
                sync(place / plan.name)
            digests.append(known)
    return WrittenFile(digests, written, linked)


def _unchanged(plan: FilePlan, read: Read, before: LastFiles) -> tuple[bool, list[str]]:
    """Whether the checkpoint before has this very file; and the digests of the parts that were looked at."""
    file = before.manifest.files.get(plan.name)
    if file is None or (file.bytes, file.header) != (plan.bytes, len(plan.header)):
        return False, []
    if file.sha256 != hashlib.sha256(plan.header).hexdigest() or _size(before.place / plan.name) != plan.bytes:
        return False, []
    had = {c.start: c.sha256 for x in before.manifest.leaves.values() for c in x.chunks if c.file == plan.name}
    known = []
    for part in plan.parts:
        digest = hashlib.sha256()
        for piece in read(part):
            digest.update(piece.data)
        known.append(digest.hexdigest())
        if had.get(part.start) != known[-1]:
            return False, known
    return True, known


def _link(old: pathlib.Path, new: pathlib.Path) -> bool:
    """A second name for a file, where the file system has such; else it is written again."""
    try:
        os.link(old, new)
    except OSError:
        return False
    return True


def _write(
    path: pathlib.Path,
    plan: FilePlan,
    read: Read,
    known: Sequence[str],
    beside: concurrent.futures.ThreadPoolExecutor,
) -> list[str]:
    """Writes one file; digests that are not known yet are made beside it, from the bytes that are written."""
    digests = list(known)
    # O_EXCL: the directory is new, so a file that is there would be somebody else's.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write_all(fd, memoryview(plan.header))
        for i, part in enumerate(plan.parts):
            digest = hashlib.sha256() if i >= len(known) else None
            for piece in read(part):
                hashed = None if digest is None else beside.submit(digest.update, piece.data)
                _write_all(fd, piece.data)
                if hashed is not None:
                    hashed.result()
            if digest is not None:
                digests.append(digest.hexdigest())
    finally:
        os.close(fd)
    return digests


def _write_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.is_file() else -1
