"""Where checkpoints are, as what writes and reads them sees it: a directory of a file system, or an object store.

    Store          a run's checkpoints
    Location       the files of one of them; `str` of it is where it is
    NewLocation    the files of one that is being written, which no `Store.steps` has yet

Both kinds promise that a step is listed from the moment on when all of it is there, and never before.
"""

import pathlib
import re
from contextlib import AbstractContextManager
from typing import Protocol

from shardfn.memory import Bytes, DamagedError

from ._manifest import Manifest, decoded

MANIFEST = "manifest.json"
STEP = re.compile(r"step_(\d{1,18})", re.ASCII)
_REMEDY = "Take another checkpoint, and have the disk checked."


class OpenedFile(Protocol):
    """A file that is open for reading."""

    def into(self, data: Bytes, start: int) -> int:
        """Reads bytes from `start` on, as many as are there and as fit; how many they were."""
        ...

    def close(self) -> None:
        """Gives up what it holds."""
        ...


class Location(Protocol):
    """The files of one checkpoint.

    Attributes:
        name: `step_000100`; what a directory of one's own is called.
    """

    @property
    def name(self) -> str: ...

    def text(self) -> bytes:
        """The bytes of the manifest.

        Raises:
            FileNotFoundError: it has none.
        """
        ...

    def opened(self, name: str, size: int) -> OpenedFile:
        """Opens a file.

        Raises:
            DamagedError: it is gone, no plain file, or of another size.
        """
        ...

    def size(self, name: str) -> int:
        """The bytes of a file; -1 if there is none."""
        ...


class Sink(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview) -> None:
        """Writes all of the bytes."""
        ...


class NewLocation(Location, Protocol):
    """The files of a checkpoint that is being written. Each rank has one; rank 0 publishes or discards it."""

    def seen(self) -> bool:
        """Whether this rank sees what rank 0 has begun."""
        ...

    def called(self, name: str) -> str:
        """What a file is called here: two drafts of one step must not write the same object."""
        ...

    def create(self, name: str) -> AbstractContextManager[Sink]:
        """A new file, complete when the context ends."""
        ...

    def take(self, other: Location, old: str, name: str) -> bool:
        """Takes a file over from another checkpoint without reading it; whether that could be done."""
        ...

    def settle(self, name: str) -> None:
        """Waits until the device has a file."""
        ...

    def publish(self, manifest: Manifest, *, durable: bool, replace: bool) -> None:
        """Writes the manifest, last. After an error, or a kill, the checkpoint is listed as a whole or not at all."""
        ...

    def discard(self) -> None:
        """Removes the files; of one that was published, nothing."""
        ...


class Store(Protocol):
    """A run's checkpoints."""

    def steps(self) -> list[int]:
        """The steps of the complete ones, in order."""
        ...

    def at(self, step: int) -> Location:
        """The one of a step, whether it is there or not."""
        ...

    def itself(self) -> Location:
        """What it would be if it were one checkpoint, and not a run's."""
        ...

    def absent(self, step: int | None, found: list[int]) -> FileNotFoundError:
        """The error of a step (None = any) that is not among those that were found."""
        ...

    def path(self, step: int) -> pathlib.Path | str:
        """Where the one of a step is, for whoever wants to open it: a path, or a URL."""
        ...

    def owning(self) -> AbstractContextManager[None]:
        """Makes it this process's while the body runs, and clears away what killed processes have left.

        Raises:
            InUseError: another process writes there.
            OSError: it cannot be written to.
        """
        ...

    def begin(self, step: int, token: str, *, replace: bool) -> None:
        """Begins a checkpoint; ranks then have `draft(step, token)`.

        Raises:
            FileExistsError: it is there, and is not to give way.
        """
        ...

    def draft(self, step: int, token: str) -> NewLocation:
        """The draft that rank 0 has begun."""
        ...

    def remove(self, step: int) -> None:
        """Removes a checkpoint, which is none any more from the first moment on."""
        ...

    def explained(self, problem: OSError) -> OSError:
        """The same error, with what it means for checkpoints."""
        ...


def step_name(step: int) -> str:
    """What the checkpoint of a step is called.

    Example:
        >>> step_name(100)
        'step_000100'
    """
    return f"step_{step:06d}"


def read_manifest(place: Location) -> Manifest:
    """The manifest of one checkpoint.

    Raises:
        DamagedError: it is not what was written.
        ValueError: it is of a newer version.
    """
    try:
        text = place.text().decode()
    except UnicodeDecodeError:
        raise DamagedError(f"{place}/{MANIFEST} has changed since it was written. Take another checkpoint.") from None
    return decoded(text, f"{place}/{MANIFEST}")


def there_already(where: str) -> FileExistsError:
    """The error of a step that is saved twice."""
    return FileExistsError(
        f"{where} is there already: step numbers name checkpoints. Save under another step, with replace=True, or"
        " remove it."
    )


def no_checkpoint(store: Store, step: int | None, found: list[int], missing: str = "") -> FileNotFoundError:
    """The error of a checkpoint that a store has not; `missing` is what it is instead of one that could have it."""
    what = missing or (f"has checkpoints of steps {found}" if found else "has none")
    return FileNotFoundError(
        f"no checkpoint{'' if step is None else f' of step {step}'} in {store}, which {what}."
        " Pass the directory that was given to save or Manager; steps(directory) says which a run has."
    )


def damaged(what: str) -> DamagedError:
    """The error of a file that is not what was written."""
    return DamagedError(f"{what}. {_REMEDY}")
