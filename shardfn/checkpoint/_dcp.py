"""Checkpoints of `torch.distributed.checkpoint` (DCP), in both directions.

`save_dcp` writes each leaf's blocks as DCP's shards, of any spec and memory, including specs that `DTensor` lacks.
`restore_dcp` reads DCP checkpoints of any program, box by box as `restore` does. Keys are the paths of leaves.
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import math
import os
import warnings
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardfn import core
from shardfn.collectives import Box
from shardfn.engine import agree_on_step, comms_of, losing_no_peer, told_before
from shardfn.memory import DamagedError
from shardfn.state import check_alive

from ._contents import Content, contents, mesh_of
from ._manifest import DTYPES, Manifest, StoredLeaf
from ._read_into import ReadKeywords, make_whole_leaf, read_into


class BlockPlanner(dcp.DefaultSavePlanner):
    """Plans each leaf's block as a shard. For a replicated block, DCP selects the rank that writes."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = [item for x in self.state_dict.values() if (item := _write_item(x)) is not None]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return core.load(self.state_dict[index.fqn].held).detach()


def _write_item(x: Content) -> WriteItem | None:
    """Returns this rank's block as a write item, or None for an empty block of a leaf with elements."""
    sizes = torch.Size(x.held.shape)
    if math.prod(x.shape) and not sizes.numel():
        return None
    empty = not math.prod(x.shape)  # one item, so that an empty leaf is saved too
    start, sizes = (torch.Size([0] * len(x.shape)), torch.Size(x.shape)) if empty else (torch.Size(x.start), sizes)
    data = TensorWriteData(ChunkStorageMetadata(start, sizes), TensorProperties(dtype=x.dtype), torch.Size(x.shape))
    return WriteItem(MetadataIndex(x.path, start), WriteItemType.SHARD, tensor_data=data)


class DcpReader:
    """Reads boxes of leaves from DCP's files, without communication."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.storage = dcp.FileSystemReader(directory)
        self.metadata = self.storage.read_metadata()
        self.storage.set_up_storage_reader(self.metadata, False)

    def manifest(self) -> Manifest:
        """Returns the tensors as leaves of a single chunk each. The key replaces the file's name."""
        leaves = {}
        for key, x in self.metadata.state_dict_metadata.items():
            if isinstance(x, TensorStorageMetadata) and core.dtype_name(x.properties.dtype) in DTYPES:
                leaves[key] = make_whole_leaf(key, tuple(x.size), x.properties.dtype)
        return Manifest(0, None, {}, leaves, {})

    def box(self, leaf: StoredLeaf, box: Box, out: Tensor, *, check: bool = True) -> None:
        """Fills `out` with a box of a leaf."""
        del check  # DCP has no digests
        key = leaf.chunks[0].file
        wanted = ChunkStorageMetadata(torch.Size([lo for lo, _ in box]), torch.Size([hi - lo for lo, hi in box]))
        if not out.numel():
            return
        items = create_read_items_for_chunk_list(key, self.metadata.state_dict_metadata[key], [wanted])  # type: ignore[arg-type]
        if sum(item.lengths.numel() for item in items) != out.numel():
            raise DamagedError(f"the checkpoint has not all of {key}, box {box}. Take another checkpoint.")
        self.storage.read_data(LoadPlan(items), _Into(out)).wait()


class _Into(dcp.DefaultLoadPlanner):
    """Reads into a single tensor."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.out = out

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.out

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        del read_item, tensor  # the target is a view of `out`


# DCP takes as long to be imported as shardfn, so only the functions below import DCP.


def save_dcp(directory: str | os.PathLike[str], tree: core.PyTree, *, at: str = "") -> None:
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

    from ._dcp import BlockPlanner

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


def restore_dcp(directory: str | os.PathLike[str], like: core.PyTree, **options: Unpack[ReadKeywords]) -> Any:
    """Reads a checkpoint of `torch.distributed.checkpoint` into a tree like this one. Collective over its mesh.

    As in `restore`, all leaves are compared before a value is read, and each rank reads only local blocks. The errors
    of compressing optimizers are not rebalanced for another number of ranks. DCP's metadata is a pickle: open trusted
    checkpoints only.

    Args:
        directory: directory of the checkpoint.
        like: as `restore` expects the tree.
        **options: `at`, `rename`, `partial`, `cast`, `donate`, `pool`, as for `restore`. Names are DCP's keys.

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
    from ._dcp import DcpReader

    return read_into(like, lambda: DcpReader(directory), f"the DCP checkpoint {directory}", options)


def _check_all_ranks(mesh: core.Mesh) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if mesh.size != world:
        raise ValueError(f"DCP needs a mesh of all {world} ranks, got {mesh!r}. Save on a mesh of all ranks.")
