"""Finds checkpoints by the caller's path or URL.

Checkpoints in an object store, or at any other URL that fsspec supports: s3://, gs://, memory://, file://.

    writer.json                                         the token of the job that came last, which may publish
    step_000100/draft-5f3a91c0                          a checkpoint of that number is being written
    step_000100/params-00003-0001-5f3a91c0.safetensors  the files
    step_000100/manifest.json                           put last, as one object: from now on the checkpoint is complete

An object store has no rename, so the manifest makes a checkpoint complete, and file names contain the draft's token. An
old checkpoint stays complete until the new manifest replaces the old manifest. An object store also lacks locks that
end with the process. So a later job takes the store over, and the earlier job gets an error at the next publication.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardfn.memory import Bytes, InUseError

from ._directory import DirectoryStore
from ._manifest import Manifest, decoded, encoded
from ._place import MANIFEST, STEP, Location, Store, damaged, no_checkpoint, read_manifest, step_name, there_already

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(::|://)")
_BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/[^/]")


def store_of(directory: str | os.PathLike[str]) -> Store:
    """Returns the checkpoints of a run.

    Args:
        directory: a path, or a URL that fsspec knows, as a string.

    Raises:
        TypeError: the value is neither a path nor a string.
        ValueError: a URL was converted to a path (a slash is lost), or the protocol is unknown.
        ImportError: the package for the protocol is missing.
    """
    check_directory(directory)
    text = os.fspath(directory)
    if not isinstance(directory, str) and _BROKEN_URL.match(text):
        raise ValueError(f"{directory!r} was a URL before it was made a path. Pass it as a string.")
    return _ObjectStore(text) if _URL.match(text) else DirectoryStore(directory)


def check_directory(directory: Any) -> None:
    """Refuses a value that is neither a path nor a URL, such as a state in swapped arguments.

    Raises:
        TypeError: the value is neither. The message shows the correct order of the arguments.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(
            f"the directory of checkpoints must be a path or a URL, got a {type(directory).__name__}. The directory"
            " comes first: save(directory, state) and restore(directory, state)."
        )


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """Returns the steps of the complete checkpoints of a directory, or of a URL, in order.

    Example:
        >>> import tempfile
        >>> steps(tempfile.mkdtemp())
        []
    """
    return store_of(directory).steps()


def find_checkpoint(directory: str | os.PathLike[str], step: int | None = None) -> Location:
    """Returns the checkpoint at a directory, or in the directory.

    Args:
        directory: directory or URL of a single checkpoint, or of a run's checkpoints.
        step: step of the checkpoint. Default: the newest step.

    Raises:
        FileNotFoundError: no such checkpoint exists. The message lists the existing checkpoints.
        DamagedError: `step` is given for the directory of a single checkpoint, but the manifest with the number has
            changed.
    """
    store = store_of(directory)
    one = store.itself()
    if one.size(MANIFEST) >= 0:
        if step is not None and (own := read_manifest(one).step) != step:
            raise FileNotFoundError(
                f"{one} is the checkpoint of step {own}, not of step {step}. Pass the directory of the run, or leave"
                " the step out."
            )
        return one
    found = store.steps()
    if found and (step is None or step in found):
        return store.at(found[-1] if step is None else step)
    raise store.absent(step, found)


_WRITER = "writer.json"
# Objects that drafts write. Other objects are never removed.
_OURS = re.compile(r"draft-[0-9a-f]{8}|.+-[0-9a-f]{8}\.safetensors", re.ASCII)


class _ObjectSource:
    """An object that is read by ranges."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path

    def into(self, data: Bytes, start: int) -> int:
        """Reads bytes from `start` on, and returns the number of bytes read."""
        got = np.frombuffer(self._fs.cat_file(self._path, start=start, end=start + len(data)), np.uint8)
        data[: len(got)] = got[: len(data)]
        return min(len(got), len(data))

    def close(self) -> None:
        """Does nothing, because no resources are held."""


class _ObjectPlace:
    """The objects of a single checkpoint.

    Args:
        fs: an fsspec file system.
        root: prefix of the objects' names, without a protocol.
    """

    def __init__(self, fs: Any, root: str) -> None:
        self.fs, self.root = fs, root

    def __str__(self) -> str:
        return self.fs.unstrip_protocol(self.root)

    @property
    def name(self) -> str:
        """Returns the last part of the URL."""
        return self.root.rpartition("/")[2]

    def text(self) -> bytes:
        """Returns the bytes of the manifest."""
        return self.fs.cat_file(f"{self.root}/{MANIFEST}")

    def opened(self, name: str, size: int) -> _ObjectSource:
        """Looks up an object."""
        there = self.size(name)
        if there < 0:
            raise damaged(f"{self}/{name} is gone")
        if there != size:
            raise damaged(f"{self}/{name} has {there} bytes, {size} were written")
        return _ObjectSource(self.fs, f"{self.root}/{name}")

    def size(self, name: str) -> int:
        """Returns the bytes of an object, or -1 if it does not exist."""
        try:
            about = self.fs.info(f"{self.root}/{name}")
        except FileNotFoundError:
            return -1
        return int(about["size"]) if about["type"] == "file" else -1

    def complete(self) -> bool:
        """Returns whether there is a manifest."""
        return self.size(MANIFEST) >= 0

    def named(self) -> set[str]:
        """Returns the objects that the manifest lists. Empty without a manifest.

        Raises:
            DamagedError: the manifest has changed since the save.
            ValueError: the manifest is of a newer version.
        """
        return set(read_manifest(self).files) if self.complete() else set()


class ObjectDraft(_ObjectPlace):
    """The objects of a checkpoint that has no manifest yet."""

    def __init__(self, store: "_ObjectStore", step: int, token: str) -> None:
        super().__init__(store.fs, store.at(step).root)
        self._store, self._token = store, token

    @property
    def marker(self) -> str:
        """Returns the path of the object that marks the draft as started."""
        return f"{self.root}/draft-{self._token}"

    def seen(self) -> bool:
        """Returns whether this rank sees the marker: stores show an object to all clients after the put."""
        self.fs.invalidate_cache()
        return self.fs.exists(self.marker)

    def called(self, name: str) -> str:
        """Returns the name with the draft's token."""
        stem, dot, kind = name.rpartition(".")
        return f"{stem}-{self._token}{dot}{kind}"

    def create(self, name: str) -> Any:
        """Returns a new object. No manifest lists a half-written object."""
        return self.fs.open(f"{self.root}/{name}", "wb")

    def take(self, other: Location, old: str, name: str) -> bool:
        """Copies an object inside the store, without a download."""
        if not isinstance(other, _ObjectPlace) or other.fs is not self.fs:
            return False
        self.fs.cp_file(f"{other.root}/{old}", f"{self.root}/{name}")
        return True

    def settle(self, name: str) -> None:
        """Does nothing: a put returns when the store has the object."""

    def publish(self, manifest: Manifest, *, durable: bool, replace: bool) -> None:
        """Puts the manifest, in place of an existing one, and removes the files of the old manifest."""
        text = encoded(manifest)
        decoded(text, str(self))  # an unreadable manifest must not be put
        self._store.check_owner()
        self.fs.pipe_file(f"{self.root}/{MANIFEST}", text.encode())
        try:
            self._store.check_owner()
        except InUseError:
            # The job that took over in between may have removed the files already.
            self.fs.rm_file(f"{self.root}/{MANIFEST}")
            raise
        self._store.tidy(self.root)

    def discard(self) -> None:
        """Removes this draft's objects, unless a manifest lists the objects: a failed put may have arrived."""
        with contextlib.suppress(OSError):  # the next writer removes the remains
            kept = self.named()
            mine = [p for p in _paths_below(self.fs, self.root) if p == self.marker or f"-{self._token}." in p]
            _remove_objects(self.fs, [p for p in mine if p.rpartition("/")[2] not in kept])


class _ObjectStore:
    """A run's checkpoints in an object store.

    Args:
        url: URL of the run, such as "s3://bucket/run". Credentials are configured for fsspec, or in the environment.

    Raises:
        ImportError: the package for the protocol is missing. The message has the name of the package.
        ValueError: no such protocol.
    """

    def __init__(self, url: str) -> None:
        import fsspec.core

        self.fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self.root, self._token = str(root).rstrip("/"), os.urandom(8).hex()

    def __str__(self) -> str:
        return self.fs.unstrip_protocol(self.root)

    def steps(self) -> list[int]:
        """Returns the steps that have a manifest, in order."""
        self.fs.invalidate_cache()
        names = [p.split("/")[-2] for p in self.fs.glob(f"{self.root}/step_*/{MANIFEST}")]
        return sorted(int(m[1]) for name in names if (m := STEP.fullmatch(name)))

    def at(self, step: int) -> _ObjectPlace:
        """Returns the checkpoint of a step."""
        return _ObjectPlace(self.fs, f"{self.root}/{step_name(step)}")

    def itself(self) -> _ObjectPlace:
        """Returns the objects below the URL as a single checkpoint."""
        return _ObjectPlace(self.fs, self.root)

    def absent(self, step: int | None, found: list[int]) -> FileNotFoundError:
        """Returns the error of a step that the store lacks."""
        return no_checkpoint(self, step, found)

    def path(self, step: int) -> str:
        """Returns the URL of the checkpoint of a step."""
        return str(self.at(step))

    @contextlib.contextmanager
    def owning(self) -> Iterator[None]:
        """Takes the store over while the body runs, and removes remains of earlier jobs."""
        self.fs.makedirs(self.root, exist_ok=True)
        self.fs.pipe_file(f"{self.root}/{_WRITER}", self._token.encode())
        for path in sorted({p.rpartition("/")[0] for p in _paths_below(self.fs, self.root)}):
            if STEP.fullmatch(path.rpartition("/")[2]) and path.rpartition("/")[0] == self.root:
                self.tidy(path)
        try:
            yield
        finally:
            if self._owner_object() == self._token.encode():
                self.fs.rm_file(f"{self.root}/{_WRITER}")

    def check_owner(self) -> None:
        """Raises if another job has taken the store over.

        Raises:
            InUseError: another job owns the store.
        """
        if self._owner_object() != self._token.encode():
            raise InUseError(
                f"another job has started to write checkpoints to {self}, so this job publishes no more checkpoints."
                " Give each job a separate URL, or end the other job and start this job again."
            )

    def begin(self, step: int, token: str, *, replace: bool) -> None:
        """Puts the marker of a draft."""
        self.check_owner()
        if self.at(step).complete() and not replace:
            raise there_already(self.path(step))
        draft = self.draft(step, token)
        self.fs.makedirs(draft.root, exist_ok=True)
        self.fs.pipe_file(draft.marker, b"")

    def draft(self, step: int, token: str) -> ObjectDraft:
        """Returns the draft that rank 0 has begun."""
        return ObjectDraft(self, step, token)

    def remove(self, step: int) -> None:
        """Removes a checkpoint, beginning with the manifest."""
        self.fs.rm_file(f"{self.at(step).root}/{MANIFEST}")
        self.tidy(self.at(step).root)

    def tidy(self, root: str) -> None:
        """Removes our objects below a step that the manifest does not list.

        An unreadable manifest stops the removal.
        """
        try:
            kept = _ObjectPlace(self.fs, root).named()
        except (OSError, ValueError):
            return  # damaged, or of a newer version: left for inspection
        left = [
            p for p in _paths_below(self.fs, root) if _OURS.fullmatch(name := p.rpartition("/")[2]) and name not in kept
        ]
        _remove_objects(self.fs, left)
        if not kept and self.fs.isdir(root):  # file systems have directories, which may be empty
            with contextlib.suppress(OSError):
                self.fs.rmdir(root)

    def explained(self, problem: OSError) -> OSError:
        """Returns the error with an explanation for checkpoints, where possible."""
        if type(problem) is PermissionError:
            return PermissionError(problem.errno, f"{self} cannot be written to ({problem}): check the credentials.")
        return problem

    def _owner_object(self) -> bytes:
        try:
            return self.fs.cat_file(f"{self.root}/{_WRITER}")
        except FileNotFoundError:
            return b""


def _paths_below(fs: Any, root: str) -> list[str]:
    fs.invalidate_cache()
    return list(fs.find(root))


def _remove_objects(fs: Any, paths: Sequence[str]) -> None:
    for path in paths:
        fs.rm_file(path)
