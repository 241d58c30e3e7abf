"""A rank's files: written, or linked from the checkpoint before where nothing in them has changed."""

import concurrent.futures
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shardfn.memory import Bytes

from ._contents import FilePlan, Part
from ._manifest import Manifest
from ._place import Location, NewLocation

# The token of a draft in the name of a file; those of directories have none.
_TOKEN = re.compile(r"-[0-9a-f]{8}(?=\.safetensors$)", re.ASCII)
# The bytes of a part, in order.
Read = Callable[[Part], Iterator[Bytes]]


class LastFiles(NamedTuple):
    """The checkpoint before."""

    place: Location
    manifest: Manifest

    def named(self, name: str) -> str | None:
        """What it calls the file that a draft calls `name`."""
        base = _TOKEN.sub("", name)
        return next((x for x in self.manifest.files if _TOKEN.sub("", x) == base), None)


class WrittenFile(NamedTuple):
    """What a rank has written.

    Attributes:
        digests: of the parts of each file.
        bytes: that were written.
        linked: bytes of files that were taken over.
    """

    digests: list[list[str]]
    bytes: int
    linked: int


def write_files(
    place: NewLocation, plans: Sequence[FilePlan], read: Read, before: LastFiles | None, *, durable: bool
) -> WrittenFile:
    """Writes files that nobody reads yet.

    Args:
        place: where.
        plans: the files.
        read: gives the bytes of a part; asked once or twice.
        before: whose files may be taken over.
        durable: whether to wait until they have reached the device.

    Raises:
        OSError: it failed; what was written is of no use.
    """
    digests, written, linked = [], 0, 0
    with concurrent.futures.ThreadPoolExecutor(1, "shardfn-digest") as beside:
        for plan in plans:
            old, known = (None, []) if before is None else _unchanged(plan, read, before)
            if old is not None and before is not None and place.take(before.place, old, plan.name):
                linked += plan.bytes
            else:
                known = _write(place, plan, read, known, beside)
                written += plan.bytes
            if durable:
                place.settle(plan.name)
            digests.append(known)
    return WrittenFile(digests, written, linked)


def _unchanged(plan: FilePlan, read: Read, before: LastFiles) -> tuple[str | None, list[str]]:
    """What the checkpoint before calls this very file, if it has it; and the digests of the parts looked at."""
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


def _write(
    place: NewLocation,
    plan: FilePlan,
    read: Read,
    known: Sequence[str],
    beside: concurrent.futures.ThreadPoolExecutor,
) -> list[str]:
    """Writes one file; digests that are not known yet are made beside it, from the bytes that are written."""
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
