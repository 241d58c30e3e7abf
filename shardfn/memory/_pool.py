"""Pools: directories that keep values on disk, commit sets of values, and restore the last commit after any end.

Rajbhandari et al., ZeRO-Infinity, 2021, https://arxiv.org/abs/2104.07857
"""

import logging
import math
import os
import pathlib
import shutil
import threading
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

from shardfn.core import Pending, PerMesh

from . import _manifest as manifest
from ._disk import DiskTensor, DiskWriter
from ._host import PAGE
from ._io import Checksums, Io, check_sizes, why_not_direct
from ._lock import PoolInUseError, locked, unlock
from ._slots import Slot, Slots
from ._traced import TracedPool

_LOG = logging.getLogger("shardfn.memory")
_SUMMED_GRAIN = 64 << 10
_PIECE = 2 << 20
_USE = "a pool", "One directory serves one process: give each rank its own, or end that process."

Value = DiskTensor | Tensor | int | float | str | bool | None


class PoolInfo(NamedTuple):
    """Properties of a pool's file system, and choices of the pool.

    Attributes:
        directory: path of the files.
        direct: whether the page cache is bypassed.
        why_not_direct: reason without direct I/O, else empty.
        threads: number of threads that move bytes.
        piece: bytes of a request.
        max_staging: limit on the bytes of staging buffers.
        free_files: number of files that wait for reuse.
        free_file_bytes: bytes of the files that wait for reuse.
        disk_free: bytes that the file system has left.
    """

    directory: str
    direct: bool
    why_not_direct: str
    threads: int
    piece: int
    max_staging: int
    free_files: int
    free_file_bytes: int
    disk_free: int


class Opened(NamedTuple):
    """The result of `Pool.open`: the pool, the values of its last commit by name, and the commit's step."""

    pool: "Pool"
    values: dict[str, Any]
    step: int


class _Options(NamedTuple):
    """`Pool`'s arguments, with its defaults."""

    threads: int = 4
    direct: bool = True
    checksum: bool = False
    max_staging: int = 16 << 20

    def staging(self) -> tuple[int, int]:
        """Returns the bytes of a request (and of a buffer), and the number of buffers."""
        if self.threads < 1 or self.max_staging < _SUMMED_GRAIN:
            raise ValueError(
                f"threads={self.threads}, max_staging={self.max_staging}: at least 1 and {_SUMMED_GRAIN} are needed."
            )
        each = min(_PIECE, self.max_staging // self.threads)
        piece = max(each // _SUMMED_GRAIN, 1) * _SUMMED_GRAIN
        return piece, min(self.threads, self.max_staging // piece)


class Pool:
    """Values on disk in a directory that belongs to a single process (one directory a rank).

    Values are immutable: a step writes new values in other files, and the files of the old values are used again when
    the old values are garbage. So a failure does not change the previous values. `commit` names a set of values that
    `Pool.open` finds again, even if the process dies right after the commit.

    Args:
        directory: path of the directory, made if missing. A directory with a commit must be opened by `Pool.open`.
        threads: number of requests in flight.
        direct: whether to bypass the page cache (O_DIRECT), if the file system supports direct I/O. `info()` and the
            log tell the reason if not.
        checksum: whether to keep a crc32 of every 64 KiB, compared at each read.
        max_staging: bytes of buffers for data that is not aligned in memory. Requests wait for a free buffer.

    Raises:
        ValueError: the directory holds a commit, or an argument is out of range.
        PoolInUseError: another pool owns the directory.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with Pool(directory) as pool:
        ...         w = pool.write(torch.ones(3)).result()
        ...         pool.commit({"w": w}, step=7)
        ...     pool, values, step = Pool.open(directory)
        ...     print(values["w"].load(), step)
        ...     pool.close()
        tensor([1., 1., 1.]) 7
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        threads: int = 4,
        direct: bool = True,
        checksum: bool = False,
        max_staging: int = 16 << 20,
    ) -> None:
        place = pathlib.Path(directory)
        options = _Options(threads, direct, checksum, max_staging)
        place.mkdir(parents=True, exist_ok=True)
        with locked(place, *_USE, PoolInUseError) as lock:
            if manifest.commits(place):
                raise ValueError(
                    f"{place} holds a commit. `Pool.open(directory)` continues from it. To start anew, remove the"
                    " directory."
                )
            _remove_strangers(place, set())
            self._start_pool(place, lock, options)

    @classmethod
    def open(cls, directory: str | os.PathLike[str], step: int | None = None, **options: Any) -> Opened:
        """Opens a directory with a commit, after any end of the previous process.

        Files that the commit does not name are removed and logged.

        Args:
            directory: see `Pool`.
            step: step of a kept commit. The other commits are removed. None: the last commit.
            options: see `Pool`.

        Returns:
            The pool, the committed values by name, and the committed step.

        Raises:
            FileNotFoundError: nothing was committed there, or not of this step.
            DamagedError: the manifest has changed, or named files are missing or too short.
            PoolInUseError: another pool owns the directory.
        """
        place = pathlib.Path(directory)
        if not place.is_dir():
            raise FileNotFoundError(f"{place} is not a directory, so nothing was committed there.")
        pool, chosen = cls.__new__(cls), _Options(**options)
        with locked(place, *_USE, PoolInUseError) as lock:
            path, step, entries = _choose_manifest(place, step)
            pool._start_pool(place, lock, chosen)
        # The lock is the pool's from now on: a failure closes the pool, and only closing releases the lock.
        try:
            manifest.settle(place, path)
            return Opened(pool, pool._restore_entries(entries), step)
        except BaseException:
            pool.close()
            raise

    @staticmethod
    def steps(directory: str | os.PathLike[str]) -> tuple[int, ...]:
        """Returns the steps of the commits that can be opened, the last commit first.

        Raises:
            DamagedError: a manifest differs from the written manifest.
        """
        return tuple(manifest.read(path)[0] for path in manifest.commits(pathlib.Path(directory)))

    @staticmethod
    def about(directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Returns the `about=` of the last commit without opening the pool. Empty without a commit.

        Raises:
            DamagedError: the manifest differs from the written manifest.
        """
        return manifest.about(pathlib.Path(directory))

    def write(self, x: Shaped[Tensor, "..."]) -> Pending[DiskTensor]:
        """Starts to write a host tensor, which must not change until the transfer is done.

        Args:
            x: host tensor, any shape and dtype. A strided tensor is copied first.

        Returns:
            The value on disk, in flight.

        Raises:
            DiskFullError: there is no room. Raised immediately, or by `result`.
            ValueError: `x` is on an accelerator.
        """
        writer = self.writer(tuple(x.shape), x.dtype)
        writer.write(0, x)
        return writer.finishing()

    def writer(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> DiskWriter:
        """Returns a value to be written in chunks of rows.

        Args:
            shape: the value's shape.
            dtype: dtype of the elements.

        Returns:
            The writer.

        Raises:
            DiskFullError: there is no room.
        """
        self.check_open()
        shape, grain = torch.Size(shape), self.io.grain
        nbytes = math.prod(shape) * dtype.itemsize
        grains = -(-nbytes // grain)
        slot = self._slots.take(grains * grain, nbytes) if nbytes else None
        return DiskWriter(shape, dtype, slot, self.io, Checksums.blank(grains) if self._checksum else None, self)

    def commit(
        self,
        values: Mapping[str, Any],
        step: int,
        *,
        durable: bool = False,
        keep_before: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes `values` the result of `Pool.open`, atomically. Then the files of the previous commit are free.

        Several processes that commit together may end after only some have committed. With `keep_before` each process
        keeps the last two commits, so that all processes have a commit in common. For example, after a crash at step 20
        rank 0 may have steps 10 and 20, and rank 1 only step 10. `forget_before` drops the older commit, once all
        processes have the newer.

        Tensors below a page are stored in the manifest, larger tensors in files. After the return, the end of the
        process, for example by a signal, loses nothing. `durable` also waits for the device, so that a loss of power
        loses nothing.

        Args:
            values: values by name: values of this pool, host tensors, numbers, strings.
            step: number that `Pool.open` returns.
            durable: whether to fsync files, manifest and directory.
            keep_before: whether the previous commit is kept as well.
            about: any JSON values, for `Pool.about`, such as the owner of the values.

        Raises:
            ValueError: a value is another pool's.
            TypeError: a value is of another type.
            DiskFullError: there is no room. The previous commit stays.
        """
        self.check_open()
        self._check_values(values)
        kept = {name: self._store_value(x) for name, x in values.items()}
        entries = {name: _value_entry(x) for name, x in kept.items()}
        slots = [x.slot for x in kept.values() if isinstance(x, DiskTensor) and x.slot is not None]
        for name, x in kept.items():
            if isinstance(x, DiskTensor) and x.slot is not None:
                x.slot.name = name
        # The values reach the device before the manifest.
        if durable:
            for slot in slots:
                manifest.sync(slot.path)
        with self._commit_lock:
            new = manifest.prepare(self._directory, step, entries, durable=durable, about=dict(about or {}))
            # From the first rename to the end the disk may name either. An error leaves the state unknown, so both are
            # held.
            before, self._committed = self._committed, [*self._committed, *slots]
            manifest.publish(self._directory, new, durable=durable, keep_before=keep_before)
            self._before, self._committed = before if keep_before else [], slots

    def forget_before(self) -> None:
        """Drops the commit before the last, if kept."""
        with self._commit_lock:
            if self._before:
                manifest.forget_before(self._directory)
                self._before = []

    def info(self) -> PoolInfo:
        """Returns the properties and choices of the pool."""
        files, size = self._slots.usage()
        free = shutil.disk_usage(self._directory).free
        return self._info._replace(free_files=files, free_file_bytes=size, disk_free=free)

    def trim(self) -> int:
        """Removes the files that are kept for reuse, and returns their bytes."""
        return self._slots.trim()

    def close(self) -> None:
        """Waits for transfers in progress, removes files that no commit names, and releases the directory.

        Values of the pool can no longer be read.
        """
        self._closed = True
        self._finalizer()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pool({str(self._directory)!r})"

    def _start_pool(self, place: pathlib.Path, lock: int, options: "_Options") -> None:
        grain = _SUMMED_GRAIN if options.checksum else PAGE
        reason = why_not_direct(place) if options.direct else "not asked for"
        if options.direct and reason:
            _LOG.warning("%s: %s; the page cache is used.", place, reason)
        direct, piece, buffers = not reason, *options.staging()
        self._directory, self._checksum, self._closed = place, options.checksum, False
        self.io = Io(options.threads, piece, buffers, grain, direct)
        self._slots = Slots(place)
        # The files that the manifests name, held so that no new value is written into them. After the opening the lists
        # change under `_commit_lock`, and only when `manifest` has returned.
        self._committed: list[Slot] = []
        self._before: list[Slot] = []
        self._commit_lock = threading.Lock()
        self._info = PoolInfo(str(place), direct, reason, options.threads, piece, piece * buffers, 0, 0, 0)
        self._finalizer = weakref.finalize(self, _close_files, self.io, place, lock, os.getpid())

    def _restore_entries(self, entries: dict[str, Any]) -> dict[str, Any]:
        owners: dict[str, Slot] = {}
        values = {name: self._entry_value(name, entry, owners) for name, entry in entries.items()}
        self._committed = [x.slot for x in values.values() if isinstance(x, DiskTensor) and x.slot is not None]
        check_sizes(self._committed)
        _remove_strangers(self._directory, {slot.path.name for slot in self._committed})
        return values

    def _entry_value(self, name: str, entry: dict[str, Any], owners: dict[str, Slot]) -> Any:
        """Returns the value of an entry.

        Values that share a file share a slot, so that the file is free when all values are garbage.
        """
        if "value" in entry:
            return entry["value"]
        if "bytes" in entry:
            return manifest.inline_value(entry)
        shape, dtype, crcs = torch.Size(entry["shape"]), manifest.dtype_of(entry), manifest.crcs_of(entry)
        slot = None
        if entry["file"] is not None:
            slot = owners.get(entry["file"])
            if slot is None:
                slot = self._slots.adopt(entry["file"], entry["capacity"], math.prod(shape) * dtype.itemsize)
                owners[entry["file"]] = slot
            slot.name = name
        return DiskTensor(shape, dtype, entry["grain"], Checksums(crcs) if crcs is not None else None, slot, self)

    def _store_value(self, x: Value) -> Value:
        return self.write(x).result() if isinstance(x, Tensor) and x.nbytes >= PAGE else x

    def _check_values(self, values: Mapping[str, Any]) -> None:
        foreign = [name for name, x in values.items() if isinstance(x, DiskTensor) and x._pool is not self]
        if foreign:
            raise ValueError(
                f"{', '.join(foreign)}: values of another pool. Write them into this one: write(x.load())."
            )
        odd = [f"{n}: {type(x).__name__}" for n, x in values.items() if not isinstance(x, Value)]
        if odd:
            raise TypeError(f"{', '.join(odd)}: a commit takes disk values, tensors, numbers, strings and None.")

    def check_open(self) -> None:
        """Raises ValueError if the pool was closed."""
        if self._closed:
            raise ValueError(f"{self!r} is closed.")


# The argument of a step's engine: a pool, or its placeholder while the step is captured.
AnyPool = Pool | TracedPool
# By directory, the open pools of the steps on a mesh.
POOLS: PerMesh[dict[str | None, Pool]] = PerMesh()


def _value_entry(x: Value) -> dict[str, Any]:
    if isinstance(x, DiskTensor):
        return manifest.stored_entry(x)
    return manifest.inline_entry(x) if isinstance(x, Tensor) else {"value": x}


def _close_files(io: Io, directory: pathlib.Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child has neither the threads nor a claim to the files
    io.close()
    try:
        named = _named_files(directory)
        if named is not None:
            _remove_strangers(directory, named, quiet=True)
    finally:
        unlock(lock)


def _named_files(directory: pathlib.Path) -> set[str] | None:
    """Returns the files that manifests name. None if unreadable: then no file should be removed."""
    try:
        kept = [manifest.read(path)[1] for path in manifest.commits(directory)]
        return {e["file"] for entries in kept for e in entries.values() if e.get("file")}
    except OSError:
        return None


def _choose_manifest(directory: pathlib.Path, step: int | None) -> tuple[pathlib.Path, int, dict[str, Any]]:
    """Returns the manifest of a step, or the last manifest."""
    manifest.load(directory)  # raises without a commit
    found = [(path, *manifest.read(path)) for path in manifest.commits(directory)]
    for path, at, entries in found:
        if step is None or at == step:
            return path, at, entries
    raise FileNotFoundError(f"{directory} has commits of steps {[at for _, at, _ in found]}, but none of step {step}.")


def _remove_strangers(directory: pathlib.Path, named: set[str], *, quiet: bool = False) -> None:
    strangers = [p for p in directory.glob("slot-*.bin") if p.name not in named]
    for path in strangers:
        path.unlink()
    (directory / f"{manifest.NAME}.new").unlink(missing_ok=True)
    if strangers and not quiet:
        _LOG.info("%s: removed %d files of a run that ended before it committed them.", directory, len(strangers))
