"""Blocks of leaves as shards of `torch.distributed.checkpoint` (DCP): the plan of a save, and the reader of boxes.

The import of DCP takes as long as that of shardfn, so only the functions of `_dcp` import this file.
"""

import math
import os

import torch
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
from shardfn.memory import DamagedError

from ._contents import Content
from ._manifest import DTYPES, Manifest, StoredLeaf
from ._read_into import make_whole_leaf


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
            raise DamagedError(f"the checkpoint has not all of {key}, box {box}. Use another checkpoint.")
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
