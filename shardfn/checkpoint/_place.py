"""Protocols of the places of checkpoints, for their readers and writers: file systems and object stores.

    Store          a run's checkpoints
    Location       the files of a single checkpoint. `str(location)` is the path or URL
    NewLocation    the files of a draft, not yet listed in `Store.steps`

Both kinds guarantee that `Store.steps` lists only complete checkpoints.
"""

import pathlib
import re
from contextlib import AbstractContextManager
from typing import Protocol

from shardfn.memory import Bytes, DamagedError

from ._manifest import Manifest, decoded

MANIFEST = "manifest.json"
STEP = re.compile(r"step_(\d{1,18})", re.ASCII)
_REMEDY = "Use another checkpoint, and have the disk checked."


class OpenedFile(Protocol):
    """A file that is open for reading."""

    def into(self, data: Bytes, start: int) -> int:
        """Fills `data` with bytes from `start` on, up to the end of the file, and returns their number."""
        ...

    def close(self) -> None:
        """Releases the resources."""
        ...


class Location(Protocol):
    """The files of a single checkpoint.

    Attributes:
        name: `step_000100`, or the name of the directory of a single checkpoint.
    """

    @property
    def name(self) -> str: ...

    def text(self) -> bytes:
        """Returns the bytes of the manifest.

        Raises:
            FileNotFoundError: the manifest is missing.
        """
        ...

    def opened(self, name: str, size: int) -> OpenedFile:
        """Opens a file.

        Raises:
            DamagedError: the file is missing, is not a plain file, or has another size.
        """
        ...

    def size(self, name: str) -> int:
        """Returns the bytes of a file, or -1 if it does not exist."""
        ...


class FileSink(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview) -> None:
        """Writes all of the bytes."""
        ...


class NewLocation(Location, Protocol):
    """The files of a checkpoint that is being written.

    Each rank has a `NewLocation`. Rank 0 publishes or discards the draft.
    """

    def seen(self) -> bool:
        """Returns whether this rank sees the draft that rank 0 has begun."""
        ...

    def called(self, name: str) -> str:
        """Returns the name of a file in this draft: two drafts of a single step must not write the same object."""
        ...

    def create(self, name: str) -> AbstractContextManager[FileSink]:
        """Returns a new file, complete when the context ends."""
        ...

    def take(self, other: Location, old: str, name: str) -> bool:
        """Links or copies a file of another checkpoint without reading, and returns whether this was possible."""
        ...

    def settle(self, name: str) -> None:
        """Waits until the device has a file."""
        ...

    def publish(self, manifest: Manifest, *, durable: bool, replace: bool) -> None:
        """Writes the manifest, last. After an error, or a kill, the checkpoint is listed as a whole or not at all."""
        ...

    def discard(self) -> None:
        """Removes the files, unless the checkpoint was published."""
        ...


class Store(Protocol):
    """Checkpoints of a run, in a directory or at a URL."""

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, in order, for example [100, 200]."""
        ...

    def at(self, step: int) -> Location:
        """Returns the location of a step, which need not exist."""
        ...

    def itself(self) -> Location:
        """Returns the place as a single checkpoint, instead of a run's checkpoints."""
        ...

    def absent(self, step: int | None, found: list[int]) -> FileNotFoundError:
        """Returns the error of a step (None: any step) that the store lacks."""
        ...

    def path(self, step: int) -> pathlib.Path | str:
        """Returns the path or URL of the checkpoint of a step."""
        ...

    def owning(self) -> AbstractContextManager[None]:
        """Takes ownership for this process while the body runs, and removes remains of killed processes.

        Raises:
            InUseError: another process writes there.
            OSError: the place cannot be written to.
        """
        ...

    def begin(self, step: int, token: str, *, replace: bool) -> None:
        """Begins a checkpoint. Ranks then have `draft(step, token)`.

        Raises:
            FileExistsError: the checkpoint exists, and `replace` is False.
        """
        ...

    def draft(self, step: int, token: str) -> NewLocation:
        """Returns the draft that rank 0 has begun."""
        ...

    def remove(self, step: int) -> None:
        """Removes a checkpoint. The listing ends first, so no incomplete checkpoint is ever listed."""
        ...

    def explained(self, problem: OSError) -> OSError:
        """Returns the error with an explanation for checkpoints, where possible."""
        ...


def step_name(step: int) -> str:
    """Returns the name of the checkpoint of a step.

    Example:
        >>> step_name(100)
        'step_000100'
    """
    return f"step_{step:06d}"


def read_manifest(place: Location) -> Manifest:
    """Returns the manifest of one checkpoint.

    Raises:
        DamagedError: the manifest has changed since the save.
        ValueError: the manifest is of a newer version.
    """
    try:
        text = place.text().decode()
    except UnicodeDecodeError:
        raise DamagedError(f"{place}/{MANIFEST} has changed since it was written. Use another checkpoint.") from None
    return decoded(text, f"{place}/{MANIFEST}")


def there_already(where: str) -> FileExistsError:
    """Returns the error of a step that is saved twice."""
    return FileExistsError(
        f"{where} is there already: step numbers name checkpoints. Save under another step, with replace=True, or"
        " remove it."
    )


def no_checkpoint(store: Store, step: int | None, found: list[int], missing: str = "") -> FileNotFoundError:
    """Returns the error of a checkpoint that a store lacks.

    `missing` is a clause with a special reason, or empty.
    """
    what = missing or (f"has checkpoints of steps {found}" if found else "has none")
    return FileNotFoundError(
        f"no checkpoint{'' if step is None else f' of step {step}'} in {store}, which {what}."
        " Pass the directory that was given to save or Manager; steps(directory) lists those of a run."
    )


def damaged(what: str) -> DamagedError:
    """Returns the error of a file that has changed since the save."""
    return DamagedError(f"{what}. {_REMEDY}")
