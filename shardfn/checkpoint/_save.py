"""`save`: a tree of sharded leaves as one checkpoint, written by all ranks together."""

import contextlib
import operator
import os
from typing import Any

from shardfn.core import PyTree
from shardfn.engine import comms_of, losing_no_peer, told_before
from shardfn.state import TrainState, check_alive

from ._contents import mesh_of
from ._job import Saved, SaveOptions, finish, prepare
from ._located import check_directory, store_of

FILE_BYTES = 256 << 20


def save(
    directory: str | os.PathLike[str],
    tree: PyTree,
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


def step_of(tree: PyTree, step: int | None) -> int:
    """Returns the number of a checkpoint: the one given, or the state's.

    Raises:
        ValueError: both are missing.
    """
    if step is None and not isinstance(tree, TrainState):
        raise ValueError("this tree is no TrainState, so it has no number of its own. Pass step=.")
    return int(tree.step) if step is None else operator.index(step)
