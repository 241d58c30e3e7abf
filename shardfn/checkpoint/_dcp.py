"""Checkpoints of `torch.distributed.checkpoint` (DCP), in both directions.

`save_dcp` writes each leaf's blocks as DCP's shards, of any spec and memory, including specs that `DTensor` lacks.
`restore_dcp` reads DCP checkpoints of any program, box by box as `restore` does. Keys are the paths of leaves.
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import os
import warnings
from typing import Any, Unpack

import torch
import torch.distributed as dist

from shardfn.core import Mesh, PyTree
from shardfn.engine import agree_on_step, comms_of, losing_no_peer, told_before
from shardfn.state import check_alive

from ._contents import contents, mesh_of
from ._match import ReadKeywords
from ._read_into import read_into


def save_dcp(directory: str | os.PathLike[str], tree: PyTree, *, at: str = "") -> None:
    """Saves a tree by `torch.distributed.checkpoint`, for programs that read its format. Collective over all ranks.

    Args:
        directory: directory of this checkpoint, on a file system that all ranks see. DCP overwrites an existing
            checkpoint.
        tree: a `TrainState`, or a tree of `GlobalTensor`s and of tensors that are the same on all ranks. The tree is
            only read.
        at: prefix of all paths, such as "params".

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: the mesh does not have all ranks, as DCP needs, or a leaf cannot be saved.
        DonatedError: a step has consumed the state.
        RankError: ranks save different values, or another rank failed.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> save_dcp(directory, {"w": torch.ones(3)})
        >>> restore_dcp(directory, {"w": torch.zeros(3)})
        {'w': tensor([1., 1., 1.])}
    """
    from torch.distributed import checkpoint as dcp

    from ._dcp_blocks import BlockPlanner

    check_alive(tree)
    mesh = mesh_of(tree)
    comms = comms_of(mesh)
    with told_before(comms.control):
        _check_all_ranks(mesh)
        leaves = contents(tree, at, mesh)
    text = "\n".join(f"{x.path} {x.shape} {x.dtype} {x.spec!r}" for x in leaves)
    agree_on_step(comms.control, "checkpoint.save_dcp", (text, ()))
    alone = not dist.is_initialized()
    with losing_no_peer(comms), torch.no_grad(), warnings.catch_warnings():
        # DCP warns if the program has a single process.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        dcp.save(
            {x.path: x for x in leaves},
            storage_writer=dcp.FileSystemWriter(directory),
            planner=BlockPlanner(),
            no_dist=alone,
        )


def restore_dcp(directory: str | os.PathLike[str], like: PyTree, **options: Unpack[ReadKeywords]) -> Any:
    """Reads a checkpoint of `torch.distributed.checkpoint` into a tree like `like`. Collective over its mesh.

    As in `restore`, all leaves are compared before a value is read, and each rank reads only local blocks. The errors
    of compressing optimizers are not rebalanced for another number of ranks. DCP's metadata is a pickle: open trusted
    checkpoints only.

    Args:
        directory: directory of the checkpoint.
        like: as `restore` expects the tree.
        **options: `at`, `rename`, `keep`, `partial`, `cast`, `donate`, `pool`, as for `restore`. Names are DCP's keys.

    Returns:
        The tree.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: leaves are missing, or additional, or of another shape, or a dtype would round values. The message
            lists all.
        DamagedError: the checkpoint lacks a part of a leaf.
        DonatedError: a step has consumed `like`.
        RankError: another rank failed.
    """
    from ._dcp_blocks import DcpReader

    return read_into(like, lambda: DcpReader(directory), f"the DCP checkpoint {directory}", options)


def _check_all_ranks(mesh: Mesh) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if mesh.size != world:
        raise ValueError(f"DCP needs a mesh of all {world} ranks, got {mesh!r}. Save on a mesh of all ranks.")
