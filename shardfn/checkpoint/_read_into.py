"""Reads a tree's leaves from other sources than our checkpoints, such as tensors in memory, as `restore` does."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from shardfn import core
from shardfn.collectives import Box
from shardfn.engine import comms_of, losing_no_peer, told_before
from shardfn.memory import Pool
from shardfn.state import check_alive

from ._contents import mesh_of
from ._manifest import DTYPES, Manifest, StoredChunk, StoredLeaf
from ._match import Rename, matched
from ._read import BoxReader
from ._restore import LeafTask, donate_all, nowhere, read_all, targets_of


class ReadKeywords(TypedDict, total=False):
    """Options for filling a tree, as for `restore`.

    Attributes:
        at: a prefix of the tree's paths.
        rename: function from a path of the tree to the name in the source. None: the leaf keeps its value.
        partial: whether leaves that only one side has are ignored.
        cast: whether values may be rounded to a leaf's dtype.
        donate: whether the memory of the tree is reused. The tree cannot be used afterwards.
        pool: pool for leaves on disk of an abstract tree.
    """

    at: str
    rename: Rename | None
    partial: bool
    cast: bool
    donate: bool
    pool: Pool | None


class ReadOptions(NamedTuple):
    """The same options with their defaults."""

    at: str = ""
    rename: Rename | None = None
    partial: bool = False
    cast: bool = False
    donate: bool = True
    pool: Pool | None = None


class LeafReader(BoxReader, Protocol):
    """Reads boxes of leaves that have names."""

    def manifest(self) -> Manifest:
        """Returns the leaves, each of a single chunk whose file is the leaf's name."""
        ...


def read_into(like: core.PyTree, opened: Callable[[], LeafReader], what: str, options: ReadKeywords) -> Any:
    """Returns a tree like this one with a reader's values. Collective. No leaf is written before all leaves fit.

    Args:
        like: as `restore` expects the tree.
        opened: function that opens the reader.
        what: name of the source in messages.
        options: options for reading.

    Raises:
        TypeError: there is no such option.
    """
    for name in options.keys() - {*ReadOptions._fields}:
        takes = f" It takes {', '.join(ReadOptions._fields)}."
        raise TypeError(f"there is no argument {name!r}.{core.did_you_mean(name, ReadOptions._fields) or takes}")
    check_alive(like, abstract=True)
    mesh = mesh_of(like)
    comms = comms_of(mesh)
    at, rename, partial, cast, donate, pool = ReadOptions(**options)
    with told_before(comms.control):
        reader = opened()
        leaves, treedef = core.tree_flatten(like)
        targets = targets_of(like, at)
        sources, problems = matched(targets, reader.manifest(), at, rename, partial=partial, cast=cast, but=_NoRecuts())
        problems = problems or nowhere(targets, leaves, sources, pool, frozenset())
        core.raise_all(ValueError, f"{what} does not fit:", problems)
    with losing_no_peer(comms), torch.no_grad():
        tasks = [LeafTask(*x, mesh, pool, donate) for x in zip(leaves, sources, strict=True)]
        out = read_all(tasks, frozenset(), reader, check=False)
        if donate:
            donate_all(leaves, out)
        comms.control.exchange(0)  # all ranks have an error, or none has
    return core.tree_unflatten(treedef, out)


def make_whole_leaf(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredLeaf:
    """Returns a leaf of a single chunk, whose file has this name."""
    return StoredLeaf(shape, core.dtype_name(dtype), (), (StoredChunk((0,) * len(shape), shape, name, 0, ""),))


def restore_tensors(tensors: Mapping[str, Tensor], like: core.PyTree, **options: Unpack[ReadKeywords]) -> Any:
    """Copies whole tensors, equal on all ranks, into a tree like this one. Collective over the tree's mesh.

    As in `restore`, all leaves are compared before a value is written, and each rank copies only local blocks. The tree
    may have another spec, memory kind or dtype, and stacked layers or a list of layers.

    Args:
        tensors: tensors by path, such as `params['w']`, equal on all ranks. Memory-mapped tensors are possible.
        like: as `restore` expects the tree.
        **options: `at`, `rename`, `partial`, `cast`, `donate`, `pool`, as for `restore`.

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


class _NoRecuts:
    """No leaf is converted."""

    at: frozenset[int] = frozenset()
    paths: frozenset[str] = frozenset()
