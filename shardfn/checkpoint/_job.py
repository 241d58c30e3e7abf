"""Work of all ranks for a checkpoint, from the state to the published directory.

    prepare    agree on the contents; rank 0 makes a draft, and all see it
    write      each rank its files (here, or behind the next steps from a snapshot)
    finish     all have written: rank 0 writes the manifest and gives the directory its name

Each of the last two phases ends with an exchange of outcomes, so that either all ranks fail or none.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import operator
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import core
from shardfn.engine import agree_on_step, comms_of, losing_no_peer, told_before
from shardfn.memory import Bytes, DamagedError, DiskFullError, InUseError
from shardfn.state import TrainState, check_alive

from ._contents import (
    Content,
    FilePlan,
    Owned,
    Part,
    contents,
    describe,
    files_of,
    local_slices,
    manifest_of,
    mesh_of,
    owned,
    windows,
)
from ._located import check_directory, store_of
from ._manifest import Manifest, as_json, from_json
from ._place import Location, NewLocation, Store, read_manifest

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
            # The device finishes this file while the next file is written.
            return _FileOutcome(known, taken, settling.submit(place.settle, plan.name) if durable else None)

        running = [writers.submit(core.adopting(write_file), plan) for plan in plans]
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


# All ranks' picklable values, in rank order.
Meet = Callable[[object], Sequence[Any]]
_KINDS: dict[str, type[Exception]] = {
    k.__name__: k for k in (DiskFullError, InUseError, PermissionError, FileExistsError, DamagedError, ValueError)
}


class SaveOptions(NamedTuple):
    """Options for writing checkpoints, as in `save`. `in_order`: steps below the newest need `replace`."""

    durable: bool
    replace: bool
    file_bytes: int
    in_order: bool = False


class Saved(NamedTuple):
    """A checkpoint that was written.

    Attributes:
        path: directory of the checkpoint, or URL in an object store.
        bytes: number of bytes that this rank has written.
        linked: bytes of this rank's files that were linked from the checkpoint before (an object store: copied by the
            store), because the files had not changed.
    """

    path: pathlib.Path | str
    bytes: int
    linked: int


class SaveJob(NamedTuple):
    """A checkpoint in progress.

    Attributes:
        mesh: mesh whose ranks write the checkpoint.
        step: number of the checkpoint.
        user: the caller's values, copied.
        metrics: values by which checkpoints are compared.
        leaves: the leaves to save.
        boxes: the boxes of the leaves, with the ranks that write them.
        store: checkpoints of the run.
        draft: files of the unpublished checkpoint.
        options: options for writing.
    """

    mesh: core.Mesh
    step: int
    user: Any
    metrics: Mapping[str, float]
    leaves: list[Content]
    boxes: list[Owned]
    store: Store
    draft: NewLocation
    options: SaveOptions

    def without_tensors(self) -> "SaveJob":
        """Returns the job without the state's tensors.

        Blocks on disk are still held, so that the files stay.
        """
        nothing = torch.empty(0)
        return self._replace(
            leaves=[x._replace(held=nothing) if isinstance(x.held, Tensor) else x for x in self.leaves]
        )

    def files(self, rank: int) -> list[FilePlan]:
        """Returns the files of a rank."""
        plans = files_of(rank, self.boxes, self.leaves, self.options.file_bytes)
        return [x._replace(name=self.draft.called(x.name)) for x in plans]


class _Outcome(NamedTuple):
    """Outcome of a rank, as the other ranks receive it: name and text of an error, or the result."""

    error: tuple[str, str] | None
    value: Any = None


def prepare(
    store: Store,
    tree: core.PyTree,
    at: str,
    step: int,
    user: Any,
    mesh: core.Mesh,
    options: SaveOptions,
    metrics: Mapping[str, float] | None = None,
) -> SaveJob:
    """Agrees on the contents, and begins a draft. Collective. Rank 0 owns the store."""
    comms = comms_of(mesh)
    with told_before(comms.control):
        if step < 0:
            raise ValueError(f"step={step}: checkpoints are numbered from 0 on.")
        leaves = contents(tree, at, mesh)
        text = json.dumps(as_json(user), allow_nan=False, sort_keys=True)
        said, measured = describe(leaves), f"\nmetrics={metrics}" if metrics else ""
    agree_on_step(comms.control, f"checkpoint.save, step {step}", (f"{said}\nuser={text}{measured}", ()))
    user = from_json(json.loads(text))  # the caller may change the values later
    with losing_no_peer(comms):
        made = by_first(mesh, store, comms.control.gather, _begin_draft, store, step, os.urandom(4).hex(), options)
    if isinstance(made, Exception):
        raise made
    draft = store.draft(step, made)
    with losing_no_peer(comms):
        seen = comms.control.gather(draft.seen())
    if not all(seen):
        if mesh.rank == 0:
            draft.discard()
        with losing_no_peer(comms):
            comms.control.gather(None)  # the draft is gone before ranks raise
        blind = [str(rank) for rank, own in enumerate(seen) if not own]
        raise ValueError(
            f"all ranks must see the same directory of checkpoints, but ranks {', '.join(blind)} do not see {store} of"
            " rank 0. The directory is local to a machine. Pass a directory on a file system that all ranks share."
        )
    boxes = owned([(x.shape, x.dtype.itemsize if x.same_as is None else 0, x.spec) for x in leaves], mesh)
    boxes = [b for b in boxes if leaves[b.leaf].same_as is None]
    return SaveJob(mesh, step, user, metrics or {}, leaves, boxes, store, draft, options)


def finish(job: SaveJob, snapshot: Mapping[Part, Tensor] | None, meet: Meet) -> Saved | Exception:
    """Writes this rank's files, and publishes the checkpoint when all ranks have. Collective.

    Args:
        job: the result of `prepare`.
        snapshot: copies of this rank's parts. None: the parts are read from the state.
        meet: function that gathers a value from each rank.

    Returns:
        The saved checkpoint, or the error that all ranks must raise. After an error the draft is removed.

    Raises:
        RankError: another rank died.
    """

    def read_part(part: Part) -> Any:
        copy = None if snapshot is None else snapshot.get(part)
        if copy is not None:
            return windows(copy, ())
        leaf = job.leaves[part.leaf]
        held: core.StoredValue = leaf.held
        return windows(held, local_slices(leaf, part.box))

    def write_parts() -> WrittenFile:
        plans = job.files(job.mesh.rank)
        size, desc = sum(plan.bytes for plan in plans), f"saving step {job.step}"
        with core.progress(total=size, desc=desc, unit="B", mesh=job.mesh, part=True) as bar:
            durable = job.options.durable
            return write_files(job.draft, plans, read_part, _last_files(job), durable=durable, done=bar.update)

    mine, own = _try_work(job.store, write_parts)
    wrote = meet(mine)
    named = by_first(job.mesh, job.store, meet, _name_checkpoint, job, wrote)
    failed = _find_failure(wrote, own) or named
    return failed or Saved(job.store.path(job.step), mine.value.bytes, mine.value.linked)


def by_first(mesh: core.Mesh, at: Store, meet: Meet, work: Callable[..., Any], *args: Any) -> Any:
    """Calls a function on rank 0 and gives its result to all ranks. Collective.

    Args:
        mesh: mesh of the ranks.
        at: checkpoints of the run. The store explains errors of the file system.
        meet: function that gathers a value from each rank.
        work: the function.
        *args: arguments of the function.

    Returns:
        The result on all ranks, or the error that all ranks must raise.

    Raises:
        RankError: another rank died.
    """
    mine, own = _try_work(at, work, *args) if mesh.rank == 0 else (_Outcome(None), None)
    outcomes = meet(mine)
    return _find_failure(outcomes, own) or outcomes[0].value


def _name_checkpoint(job: SaveJob, wrote: Sequence[_Outcome]) -> None:
    """Publishes a checkpoint if all ranks have written their files. Else removes the draft."""
    try:
        if all(outcome.error is None for outcome in wrote):
            _publish_draft(job, [outcome.value.digests for outcome in wrote])
    finally:
        job.draft.discard()


def _publish_draft(job: SaveJob, digests: Sequence[Sequence[Sequence[str]]]) -> None:
    written = [pair for rank, own in enumerate(digests) for pair in zip(job.files(rank), own, strict=True)]
    manifest = manifest_of(job.step, job.user, job.metrics, job.mesh, job.leaves, written)
    job.draft.publish(manifest, durable=job.options.durable, replace=job.options.replace)


def _begin_draft(store: Store, step: int, token: str, options: SaveOptions) -> str:
    newer = [n for n in store.steps() if n > step]
    if newer and options.in_order and not options.replace:
        raise FileExistsError(
            f"step {step} must not be saved next to the newer checkpoints of steps {newer} in {store}, from which a"
            " restart would continue. Continue from the newest checkpoint, pass another directory, or pass"
            " replace=True to replace the newer checkpoints."
        )
    store.begin(step, token, replace=options.replace)
    return token


def _last_files(job: SaveJob) -> LastFiles | None:
    """Returns the files of the newest checkpoint, or None without an intact checkpoint."""
    found = job.store.steps()
    if not found:
        return None
    try:
        place = job.store.at(found[-1])
        return LastFiles(place, read_manifest(place))
    except (OSError, ValueError):
        return None  # no files to link: a restore of the checkpoint raises the error


def _try_work(at: Store, work: Callable[..., Any], *args: Any) -> tuple[_Outcome, Exception | None]:
    """Calls a function, and returns the outcome to send and the local error."""
    try:
        return _Outcome(None, work(*args)), None
    except Exception as problem:
        own = at.explained(problem) if isinstance(problem, OSError) else problem
        if own is not problem:
            own.__cause__ = problem
        return _Outcome((type(own).__name__, str(own))), own


def _find_failure(outcomes: Sequence[_Outcome], own: Exception | None) -> Exception | None:
    """Returns the error to raise: the local error, or a copy of another rank's error. None if all succeeded."""
    if own is not None:
        return own
    for rank, told in enumerate(outcomes):
        if told.error is not None:
            name, text = told.error
            return (
                _KINDS[name](f"rank {rank}: {text}")
                if name in _KINDS
                else core.RankError(f"rank {rank}: {name}: {text}")
            )
    return None


FILE_BYTES = 256 << 20


def save(
    directory: str | os.PathLike[str],
    tree: core.PyTree,
    step: int | None = None,
    *,
    user: Any = None,
    at: str = "",
    durable: bool = True,
    replace: bool = False,
    file_bytes: int = FILE_BYTES,
) -> Saved:
    """Saves a state, or any tree of tensors, as `directory/step_000100`. Collective over the mesh of the leaves.

    Each element is written once, and ranks write about equally much. The directory gets the final name when the
    checkpoint is complete. If processes end before, for any reason, earlier checkpoints are untouched. Leaves are
    stored as logical tensors, so that `restore` works under any other mesh.

    Args:
        directory: directory of the run's checkpoints, on a file system that all ranks see, made if missing, or a URL
            that `fsspec` supports, such as s3://bucket/run.
        tree: a `TrainState`, or a tree of `GlobalTensor`s and of tensors that are the same on all ranks; in any memory.
            The tree is only read.
        step: number of the checkpoint. Default: the state's step.
        user: any JSON values, the same on all ranks, such as the position in the data. Floats may be infinite or NaN.
        at: a prefix of all paths, such as "params", if the tree is a part of the tree to restore.
        durable: whether to wait until the disk has the checkpoint, so that a loss of power does no harm.
        replace: whether an existing checkpoint of the step is replaced.
        file_bytes: the size beyond which a rank begins another file. Files that are unchanged since the newest
            checkpoint of the directory are linked, not written.

    Returns:
        The path, and the bytes of this rank.

    Raises:
        TypeError: a leaf is not a tensor, or `user` is not a JSON value.
        ValueError: leaves are on different meshes, or ranks do not share the directory.
        DonatedError: a step has consumed the state.
        FileExistsError: the step has a checkpoint already.
        DiskFullError: the disk is full. Earlier checkpoints are untouched.
        PermissionError: the directory cannot be written to.
        InUseError: another process writes checkpoints there.
        RankError: ranks save different values, or another rank failed.

    Example:
        >>> import tempfile, torch
        >>> directory = tempfile.mkdtemp()
        >>> save(directory, {"w": torch.ones(3)}, step=7).path.name
        'step_000007'
        >>> from shardfn.checkpoint import restore
        >>> restore(directory, {"w": torch.zeros(3)}).tree
        {'w': tensor([1., 1., 1.])}
    """
    check_directory(directory)
    check_alive(tree)
    mesh, options = mesh_of(tree), SaveOptions(durable, replace, file_bytes)
    comms = comms_of(mesh)
    with contextlib.ExitStack() as stack:
        with told_before(comms.control):
            number, store = step_of(tree, step), store_of(directory)
            if mesh.rank == 0:
                stack.enter_context(store.owning())
        job = prepare(store, tree, at, number, user, mesh, options)
        with losing_no_peer(comms):
            done = finish(job, None, comms.control.gather)
    if isinstance(done, Exception):
        raise done
    return done


def step_of(tree: core.PyTree, step: int | None) -> int:
    """Returns the number of a checkpoint: the given number, or the state's.

    Raises:
        ValueError: both are missing.
    """
    if step is None and not isinstance(tree, TrainState):
        raise ValueError("step= is needed to save a tree that is not a TrainState: the tree has no step number.")
    return int(tree.step) if step is None else operator.index(step)
