"""The directory of a run's checkpoints: names, and how one appears and disappears as a whole.

    step_000100/             complete: it has a manifest, which was written before the directory got this name
    step_000200.tmp-5f3a/    being written, or left by a process that was killed
    step_000050.was-5f3a/    complete, and giving way to a new one of its number
    step_000050.old-91c0/    being removed

So whoever lists the directory, at any instant, sees complete checkpoints and no others. Where one gives way there is a
moment without it; whoever owns the directory next puts it back, if the new one has not got the name.
"""

import contextlib
import errno
import os
import pathlib
import re
import shutil
from collections.abc import Iterator

from shardfn.memory import FULL, DamagedError, DiskFullError, locked, sync, unlock

from ._manifest import Manifest, decoded, encoded

MANIFEST = "manifest.json"
_STEP = re.compile(r"step_(\d{1,18})", re.ASCII)
_REST = re.compile(r"(step_\d{1,18})\.(tmp|was|old)-[0-9a-f]+", re.ASCII)
_REMEDY = "Give each job a directory of its own, or end that process."


def path_of(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Where the checkpoint of a step is."""
    return directory / f"step_{step:06d}"


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps of the complete checkpoints of a directory, in order.

    Example:
        >>> import tempfile
        >>> steps(tempfile.mkdtemp())
        []
    """
    place = pathlib.Path(directory)
    found = [m for p in place.glob("step_*") if (m := _STEP.fullmatch(p.name)) and (p / MANIFEST).is_file()]
    return sorted(int(m[1]) for m in found)


def located(directory: str | os.PathLike[str], step: int | None = None) -> pathlib.Path:
    """The checkpoint that a directory is, or has.

    Args:
        directory: of one checkpoint, or of a run's.
        step: which of a run's; default the newest.

    Raises:
        FileNotFoundError: there is none, or not of that step; says what is there.
    """
    place = pathlib.Path(directory)
    if (place / MANIFEST).is_file():
        return place
    found = steps(place)
    if found and (step is None or step in found):
        return path_of(place, found[-1] if step is None else step)
    if _REST.fullmatch(place.name):
        raise FileNotFoundError(
            f"{place} is a checkpoint that is being written, or whose job ended meanwhile; take a complete one from"
            f" {place.parent}: steps {steps(place.parent)}."
        )
    what = "is no directory" if not place.is_dir() else f"has checkpoints of steps {found}" if found else "has none"
    raise FileNotFoundError(f"no checkpoint{'' if step is None else f' of step {step}'} in {place}, which {what}.")


def read_manifest(place: pathlib.Path) -> Manifest:
    """The manifest of one checkpoint.

    Raises:
        DamagedError: it is not what was written.
        ValueError: it is of a newer version.
    """
    path = place / MANIFEST
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        raise DamagedError(f"{path} has changed since it was written. Take another checkpoint.") from None
    return decoded(text, str(path))


@contextlib.contextmanager
def owning(directory: pathlib.Path) -> Iterator[None]:
    """Makes a run's directory this process's while the body runs, and clears away what killed processes have left.

    Raises:
        InUseError: another process writes there.
        OSError: it cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory, "a checkpoint writer", _REMEDY) as lock:
            for path in list(directory.iterdir()):
                _clear(path)
    except OSError as problem:
        raise explained(problem, directory) from problem
    try:
        yield
    finally:
        unlock(lock)


def _clear(path: pathlib.Path) -> None:
    """Removes what was being written or removed; a checkpoint that was giving way keeps its place, if that is free."""
    rest = _REST.fullmatch(path.name)
    if rest is None or not path.is_dir() or path.is_symlink():
        return
    place = path.with_name(rest[1])
    if rest[2] == "was" and not place.exists():
        os.rename(path, place)
    else:
        shutil.rmtree(path)


def publish(tmp: pathlib.Path, place: pathlib.Path, manifest: Manifest, *, durable: bool, replace: bool) -> None:
    """Writes the manifest, last, and gives the directory its name. After an error, or a kill, it has it or not.

    Args:
        tmp: has all files, which have reached the device if they are to be durable.
        place: its name from now on.
        manifest: what it has.
        durable: whether to wait for the device.
        replace: whether a checkpoint of that name gives way.
    """
    (tmp / MANIFEST).write_text(encoded(manifest))
    read_manifest(tmp)  # nothing gets a name that could not be read
    if durable:
        sync(tmp / MANIFEST)
        sync(tmp)
    if replace and place.exists():
        was = place.with_name(f"{place.name}.was-{tmp.name.rpartition('-')[2]}")
        os.rename(place, was)
        try:
            os.rename(tmp, place)
        except OSError:
            os.rename(was, place)
            raise
        remove(was)
    else:
        os.rename(tmp, place)
    if durable:
        sync(place.parent)


def remove(place: pathlib.Path) -> None:
    """Removes a checkpoint, which is none any more from the first moment on."""
    old = place.with_name(f"{place.name.partition('.')[0]}.old-{os.urandom(4).hex()}")
    os.rename(place, old)
    shutil.rmtree(old)


def explained(problem: OSError, directory: pathlib.Path) -> OSError:
    """The same error, with what it means for checkpoints."""
    if isinstance(problem, DiskFullError) or type(problem) not in (OSError, PermissionError, FileNotFoundError):
        return problem
    if problem.errno in FULL:
        free = shutil.disk_usage(directory).free
        return DiskFullError(
            problem.errno,
            f"no room for a checkpoint in {directory}, where {free} bytes are free. Earlier checkpoints are untouched,"
            " and so is the state. Make room, keep fewer (keep_last=, keep_every=), or use a larger disk.",
        )
    if problem.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return PermissionError(
            problem.errno,
            f"{directory} cannot be written to ({problem.strerror}): checkpoints need a directory that this user may"
            " write to.",
        )
    return problem
