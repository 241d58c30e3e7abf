"""A rank's files: written, or linked from the previous checkpoint if unchanged."""

import concurrent.futures
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shardfn.core import adopting
from shardfn.memory import Bytes

from ._contents import FilePlan, Part
from ._manifest import Manifest
from ._place import Location, NewLocation

# The token of a draft in the name of a file. Only files in object stores have a token.
_TOKEN = re.compile(r"-[0-9a-f]{8}(?=\.safetensors$)", re.ASCII)
# Files that are written at a time. Hashing is slower than writing, so several cores help.
_THREADS = 2
# The bytes of a part, in order.
Read = Callable[[Part], Iterator[Bytes]]


class LastFiles(NamedTuple):
    """Files of the previous checkpoint."""

    place: Location
    manifest: Manifest

    def named(self, name: str) -> str | None:
        """Returns the name of the same file in the previous checkpoint, with its token, or None."""
        base = _TOKEN.sub("", name)
        return next((x for x in self.manifest.files if _TOKEN.sub("", x) == base), None)


class WrittenFile(NamedTuple):
    """A rank's written files.

    Attributes:
        digests: digests of the parts of each file.
        bytes: the number of bytes written.
        linked: bytes of linked files.
    """

    digests: list[list[str]]
    bytes: int
    linked: int


def write_files(
    place: NewLocation,
    plans: Sequence[FilePlan],
    read: Read,
    before: LastFiles | None,
    *,
    durable: bool,
    done: Callable[[int], object],
) -> WrittenFile:
    """Writes the files of an unpublished checkpoint.

    Args:
        place: files of the unpublished checkpoint.
        plans: the files.
        read: function that returns the bytes of a part. Called once or twice for each part.
        before: previous checkpoint, for linking unchanged files.
        durable: whether to wait until the device has the files.
        done: function that is called with the number of bytes of each written or linked file.

    Raises:
        OSError: a write failed. The files are then incomplete.
    """
    with _open_threads("digest") as beside, _open_threads("write") as writers, _open_threads("settle") as settling:

        def write_file(plan: FilePlan) -> _FileOutcome:
            old, known = (None, []) if before is None else _find_unchanged(plan, read, before)
            taken = old is not None and before is not None and place.take(before.place, old, plan.name)
            if not taken:
                known = _write_plan(place, plan, read, known, beside)
            done(plan.bytes)
            # The device finishes this file while the next one is written.
            return _FileOutcome(known, taken, settling.submit(place.settle, plan.name) if durable else None)

        running = [writers.submit(adopting(write_file), plan) for plan in plans]
        try:
            files = [x.result() for x in running]
        except BaseException:
            writers.shutdown(cancel_futures=True)
            raise
        for x in files:
            if x.settled is not None:
                x.settled.result()
    linked = sum(plan.bytes for plan, x in zip(plans, files, strict=True) if x.taken)
    return WrittenFile([x.digests for x in files], sum(x.bytes for x in plans) - linked, linked)


class _FileOutcome(NamedTuple):
    """File that has been written or linked. When `settled` is done, the device has the file."""

    digests: list[str]
    taken: bool
    settled: concurrent.futures.Future[None] | None


def _open_threads(task: str) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_THREADS, f"shardfn-{task}")


def _find_unchanged(plan: FilePlan, read: Read, before: LastFiles) -> tuple[str | None, list[str]]:
    """Returns the unchanged file's name in the previous checkpoint, or None, and the digests computed so far."""
    name = before.named(plan.name)
    if name is None:
        return None, []
    file = before.manifest.files[name]
    if (file.bytes, file.header, file.sha256) != (
        plan.bytes,
        len(plan.header),
        hashlib.sha256(plan.header).hexdigest(),
    ) or before.place.size(name) != plan.bytes:
        return None, []
    had = {c.start: c.sha256 for x in before.manifest.leaves.values() for c in x.chunks if c.file == name}
    known = []
    for part in plan.parts:
        digest = hashlib.sha256()
        for piece in read(part):
            digest.update(piece.data)
        known.append(digest.hexdigest())
        if had.get(part.start) != known[-1]:
            return None, known
    return name, known


def _write_plan(
    place: NewLocation,
    plan: FilePlan,
    read: Read,
    known: Sequence[str],
    beside: concurrent.futures.ThreadPoolExecutor,
) -> list[str]:
    """Writes one file. Unknown digests are computed in parallel, from the written bytes."""
    digests = list(known)
    with place.create(plan.name) as file:
        file.write(memoryview(plan.header))
        for i, part in enumerate(plan.parts):
            digest = hashlib.sha256() if i >= len(known) else None
            for piece in read(part):
                hashed = None if digest is None else beside.submit(digest.update, piece.data)
                file.write(piece.data)
                if hashed is not None:
                    hashed.result()
            if digest is not None:
                digests.append(digest.hexdigest())
    return digests
