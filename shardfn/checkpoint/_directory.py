"""Checkpoints in a directory of a file system: their names, and how they are published and removed as a whole.

    step_000100/             complete: the manifest was written before the directory got this name
    step_000200.tmp-5f3a/    being written, or left by a process that was killed
    step_000050.was-5f3a/    complete, and giving way to a new one of its number
    step_000050.old-91c0/    being removed

So a listing of the directory, at any instant, shows only complete checkpoints. A checkpoint that gives way is absent
for a moment. If the successor never gets the name, the directory's next owner restores the old checkpoint.
"""

import contextlib
import errno
import os
import pathlib
import re
import shutil
import stat
import time
from collections.abc import Iterator

from shardfn.memory import FULL, Bytes, DiskFullError, locked, sync, unlock

from ._manifest import Manifest, encoded
from ._place import MANIFEST, STEP, Location, damaged, no_checkpoint, read_manifest, step_name, there_already

_REST = re.compile(r"(step_\d{1,18})\.(tmp|was|old)-[0-9a-f]+", re.ASCII)
_REMEDY = "Give each job a directory of its own, or end that process."
_PIECE = 8 << 20
# Time limit until another rank's directory is seen: network file systems cache lookups of names.
_SEEN_SECONDS = 5.0
# Errors of this process, not of the file.
_OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)


class OpenFile:
    """A file of a checkpoint, open for reading."""

    def __init__(self, path: pathlib.Path, size: int) -> None:
        try:
            # A link could lead out of the directory, and a pipe would be waited for.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as problem:
            if problem.errno in _OWN_ERRORS:
                raise
            raise damaged(f"{path} cannot be read ({problem.strerror})") from problem
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size != size:
            os.close(fd)
            what = f"has {about.st_size} bytes, {size} were written" if stat.S_ISREG(about.st_mode) else "is not a file"
            raise damaged(f"{path} {what}")
        self._fd = fd

    def into(self, data: Bytes, start: int) -> int:
        """Reads bytes from `start` on, and returns the number of bytes read."""
        done = 0
        while done < len(data):
            got = os.preadv(self._fd, [data[done : done + _PIECE].data], start + done)
            if not got:
                break
            done += got
        return done

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


class FilePlace:
    """The files of a single checkpoint in a directory."""

    def __init__(self, path: pathlib.Path) -> None:
        self.directory = path

    def __str__(self) -> str:
        return str(self.directory)

    @property
    def name(self) -> str:
        """Returns the last part of the path."""
        return self.directory.name

    def text(self) -> bytes:
        """Returns the bytes of the manifest."""
        return (self.directory / MANIFEST).read_bytes()

    def opened(self, name: str, size: int) -> OpenFile:
        """Opens a file."""
        return OpenFile(self.directory / name, size)

    def size(self, name: str) -> int:
        """Returns the bytes of a file, or -1 if it does not exist."""
        path = self.directory / name
        return path.stat().st_size if path.is_file() else -1


class _NewFile:
    """A file that is being written."""

    def __init__(self, fd: int) -> None:
        self._fd, self._size = fd, 0

    def write(self, data: memoryview) -> None:
        """Writes all of the bytes."""
        done = 0
        while done < len(data):
            done += os.write(self._fd, data[done:])
        if hasattr(os, "posix_fadvise"):
            # The device begins to write the pages now, so that a later sync of the file waits for few pages.
            os.posix_fadvise(self._fd, self._size, done, os.POSIX_FADV_DONTNEED)
        self._size += done


class FileDraft(FilePlace):
    """Files of a checkpoint that is not published yet."""

    def __init__(self, place: pathlib.Path, token: str) -> None:
        super().__init__(place.with_name(f"{place.name}.tmp-{token}"))
        self._place, self._token = place, token

    def seen(self) -> bool:
        """Returns whether this rank sees the directory."""
        end = time.monotonic() + _SEEN_SECONDS
        while not self.directory.is_dir():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def called(self, name: str) -> str:
        """Returns the name unchanged, because only this draft uses the directory."""
        return name

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[_NewFile]:
        """Creates a new file."""
        # O_EXCL: the directory is new, so an existing file would be another writer's.
        fd = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            yield _NewFile(fd)
        finally:
            os.close(fd)

    def take(self, other: Location, old: str, name: str) -> bool:
        """Links a file of another checkpoint, where the file system supports hard links."""
        if not isinstance(other, FilePlace):
            return False
        try:
            os.link(other.directory / old, self.directory / name)
        except OSError:
            return False
        return True

    def settle(self, name: str) -> None:
        """Waits until the device has a file."""
        sync(self.directory / name)

    def publish(self, manifest: Manifest, *, durable: bool, replace: bool) -> None:
        """Writes the manifest last, and gives the directory the final name."""
        tmp, place = self.directory, self._place
        (tmp / MANIFEST).write_text(encoded(manifest))
        read_manifest(self)  # an unreadable checkpoint must not get a name
        if durable:
            sync(tmp / MANIFEST)
            sync(tmp)
        if replace and place.exists():
            was = place.with_name(f"{place.name}.was-{self._token}")
            os.rename(place, was)
            try:
                os.rename(tmp, place)
            except OSError:
                os.rename(was, place)
                raise
            _remove_tree(was)
        else:
            os.rename(tmp, place)
        if durable:
            sync(place.parent)

    def discard(self) -> None:
        """Removes the directory, unless the checkpoint was published."""
        shutil.rmtree(self.directory, ignore_errors=True)


class DirectoryStore:
    """A run's checkpoints in a directory."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._place = pathlib.Path(directory)

    def __str__(self) -> str:
        return str(self._place)

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, in order, for example [100, 200]."""
        found = [m for p in self._place.glob("step_*") if (m := STEP.fullmatch(p.name)) and (p / MANIFEST).is_file()]
        return sorted(int(m[1]) for m in found)

    def at(self, step: int) -> FilePlace:
        """Returns the checkpoint of a step."""
        return FilePlace(self.path(step))

    def itself(self) -> FilePlace:
        """Returns the directory as a single checkpoint."""
        return FilePlace(self._place)

    def path(self, step: int) -> pathlib.Path:
        """Returns the directory of the checkpoint of a step, such as `step_000100`."""
        return self._place / step_name(step)

    @contextlib.contextmanager
    def owning(self) -> Iterator[None]:
        """Locks the directory for this process while the body runs, and removes remains of killed processes."""
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            with locked(self._place, "a checkpoint writer", _REMEDY) as lock:
                for path in list(self._place.iterdir()):
                    _clear_drafts(path)
        except OSError as problem:
            raise self.explained(problem) from problem
        try:
            yield
        finally:
            unlock(lock)

    def begin(self, step: int, token: str, *, replace: bool) -> None:
        """Makes the directory of a draft."""
        if self.path(step).exists() and not replace:
            raise there_already(str(self.path(step)))
        self.draft(step, token).directory.mkdir()

    def draft(self, step: int, token: str) -> FileDraft:
        """Returns the draft that rank 0 has begun."""
        return FileDraft(self.path(step), token)

    def remove(self, step: int) -> None:
        """Removes a checkpoint. The directory is renamed first, so no incomplete checkpoint is ever listed."""
        _remove_tree(self.path(step))

    def explained(self, problem: OSError) -> OSError:
        """Returns the error with an explanation for checkpoints, where possible."""
        if isinstance(problem, FileExistsError | NotADirectoryError) and not self._place.is_dir():
            return NotADirectoryError(
                errno.ENOTDIR, f"{self._place} is a file, or lies below one: checkpoints need a directory."
            )
        if isinstance(problem, DiskFullError) or type(problem) not in (OSError, PermissionError, FileNotFoundError):
            return problem
        if problem.errno in FULL:
            free = shutil.disk_usage(self._place).free
            return DiskFullError(
                problem.errno,
                f"no room for a checkpoint in {self._place}, where {free} bytes are free. Earlier checkpoints are"
                " untouched, and so is the state. Make room, keep fewer (keep_last=, keep_every=), or use a larger"
                " disk.",
            )
        if problem.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return PermissionError(
                problem.errno,
                f"{self._place} cannot be written to ({problem.strerror}): checkpoints need a directory that this user"
                " may write to.",
            )
        return problem

    def absent(self, step: int | None, found: list[int]) -> FileNotFoundError:
        """Returns the error of a step that the store lacks."""
        if _REST.fullmatch(self._place.name):
            parent = DirectoryStore(self._place.parent)
            return FileNotFoundError(
                f"{self} is a checkpoint that is being written, or whose job ended meanwhile; take a complete one from"
                f" {parent}: steps {parent.steps()}."
            )
        if not self._place.is_dir():
            return no_checkpoint(self, step, found, "is not a directory" if self._place.exists() else "does not exist")
        begun = sorted(p.name for p in self._place.iterdir() if _REST.fullmatch(p.name))
        if found or not begun:
            return no_checkpoint(self, step, found)
        what = f"has no complete one: {', '.join(begun)} is being written, or its job ended meanwhile"
        return no_checkpoint(self, step, found, what)


def _clear_drafts(path: pathlib.Path) -> None:
    """Removes unfinished drafts and removals.

    A checkpoint that gave way gets the old name back if the name is free.
    """
    rest = _REST.fullmatch(path.name)
    if rest is None or not path.is_dir() or path.is_symlink():
        return
    place = path.with_name(rest[1])
    if rest[2] == "was" and not place.exists():
        os.rename(path, place)
    else:
        shutil.rmtree(path)


def _remove_tree(place: pathlib.Path) -> None:
    old = place.with_name(f"{place.name.partition('.')[0]}.old-{os.urandom(4).hex()}")
    os.rename(place, old)
    shutil.rmtree(old)
