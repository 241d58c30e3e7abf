"""Reads a tree's leaves from other sources than our checkpoints, such as tensors in memory, as `restore` does."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor

from shardfn import core
from shardfn.collectives import Box
from shardfn.engine import comms_of, told_before
from shardfn.state import check_alive

from ._contents import mesh_of
from ._manifest import DTYPES, Manifest, StoredChunk, StoredLeaf
from ._match import ReadKeywords, ReadOptions
from ._read import BoxReader
from ._restore import fill_tree, plan_reads


class LeafReader(BoxReader, Protocol):
    """Reads boxes of leaves that have names."""

    def manifest(self) -> Manifest:
        """Returns the leaves, each of a single chunk whose file is the leaf's name."""
        ...


def read_into(like: core.PyTree, opened: Callable[[], LeafReader], what: str, options: ReadKeywords) -> Any:
    """Returns a tree like `like` with a reader's values. Collective. No leaf is written before all leaves fit.

    Args:
        like: as `restore` expects the tree.
        opened: function that opens the reader.
        what: name of the source in messages.
        options: options for reading.

    Raises:
        TypeError: there is no such option.
    """
    chosen = ReadOptions(**options)
    check_alive(like, abstract=True)
    with told_before(comms_of(mesh_of(like)).control):
        reader = opened()
        plan = plan_reads(like, reader.manifest(), chosen, what)
    return fill_tree(like, plan, reader, chosen.donate)


def make_whole_leaf(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredLeaf:
    """Returns a leaf of a single chunk, whose file has this name."""
    return StoredLeaf(shape, core.dtype_name(dtype), (), (StoredChunk((0,) * len(shape), shape, name, 0, ""),))


def restore_tensors(tensors: Mapping[str, Tensor], like: core.PyTree, **options: Unpack[ReadKeywords]) -> Any:
    """Copies whole tensors, equal on all ranks, into a tree like `like`. Collective over the tree's mesh.

    As in `restore`, all leaves are compared before a value is written, and each rank copies only local blocks. The tree
    may have another spec, memory kind or dtype, and stacked layers or a list of layers.

    Args:
        tensors: tensors by path, such as `params['w']`, equal on all ranks. Memory-mapped tensors are possible.
        like: as `restore` expects the tree.
        **options: `at`, `rename`, `keep`, `partial`, `cast`, `donate`, `pool`, as for `restore`.

    Returns:
        The tree.

    Raises:
        ValueError: leaves are missing, or additional, or of another shape, or a dtype would round values, or
            checkpoints do not support a leaf. The message lists all.
        DonatedError: a step has consumed `like`.
        RankError: another rank failed.

    Example:
        >>> restore_tensors({"['w']": torch.ones(2)}, {"w": torch.zeros(2)})
        {'w': tensor([1., 1.])}
    """
    return read_into(like, lambda: _Tensors(tensors), "what is given", options)


class _Tensors(NamedTuple):
    """Tensors in memory, on any device."""

    tensors: Mapping[str, Tensor]

    def manifest(self) -> Manifest:
        unknown = [
            f"{k} is {x.dtype}" for k, x in self.tensors.items() if DTYPES.get(core.dtype_name(x.dtype)) != x.dtype
        ]
        core.raise_all(ValueError, "dtypes that no checkpoint has:", unknown)
        leaves = {name: make_whole_leaf(name, tuple(x.shape), x.dtype) for name, x in self.tensors.items()}
        return Manifest(0, None, {}, leaves, {})

    def box(self, leaf: StoredLeaf, box: Box, out: Tensor, *, check: bool = True) -> None:
        del check  # there are no digests
        out.copy_(self.tensors[leaf.chunks[0].file].detach()[tuple(slice(lo, hi) for lo, hi in box)])
