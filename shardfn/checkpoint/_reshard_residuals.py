"""States of compressing optimizers.

Error-feedback residuals are per rank, and must be converted for another number of ranks.

For the same number of ranks errors are read unchanged. Only codes of the last momentum are left out, because the codes
depend on the ZeRO stage: the next step gathers the rows instead, once. For another number `optim.rebalanced`
distributes the old ranks' errors. Whole leaves are needed in memory. Where other axes cut the leaves, or layers are
stacked on one side, errors are first converted to the shape of the leaves, and then cut again (`_residuals`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor, Residual
from shardfn.core import PyTree, tree_flatten, tree_leaves, tree_unflatten
from shardfn.optim import compresses

from ._manifest import Manifest, StoredLeaf
from ._match import Rename, Target, asked
from ._read import ChunkReader, dtype_of
from ._residuals import StoredResidual, find_missing_ranks, find_residuals

# This loses the rounding errors that ranks have not sent yet.
_WITHOUT = "let errors begin at 0: rename=lambda path: None if '.residual' in path else path"
Rebalance = Callable[[PyTree, PyTree], PyTree]


class _Node(NamedTuple):
    """Optimizer state with the errors of another number of ranks.

    Attributes:
        like: the state.
        first: number of the state's first leaf.
        index: the state, with numbers of leaves in the place of leaves.
        found: the checkpoint's leaf for each leaf of the state.
    """

    like: Any
    first: int
    index: Any
    found: list[StoredLeaf | None]


class _Fresh(NamedTuple):
    """Leaves that depend on the ZeRO stage, and begin at 0: codes, and the flag that there are some."""

    codes: list[int]
    begun: list[int]

    @property
    def all(self) -> list[int]:
        return [*self.codes, *self.begun]


class ReshardedState(NamedTuple):
    """The leaves of a tree that are converted from states of other ranks.

    Attributes:
        at: numbers of the converted leaves.
        paths: paths of the source leaves in the checkpoint.
        nodes: the states.
        zeros: the numbers of leaves that begin at 0.
        residuals: errors that are cut again, leaf by leaf.
        problems: messages about states that cannot be converted.
    """

    at: frozenset[int]
    paths: frozenset[str]
    nodes: list[_Node]
    zeros: list[int]
    residuals: list[StoredResidual]
    problems: list[str]

    def apply(self, leaves: Sequence[Any], reader: ChunkReader, rebalance: Rebalance) -> list[Any]:
        """Returns the leaves of the tree, with the converted leaves of the states."""
        out = list(leaves)
        for i in self.zeros:
            out[i] = _zeros_like(out[i])
        for x in self.residuals:
            for i, new in zip(x.at, x.read(reader), strict=True):
                out[i] = new
        for node in self.nodes:
            new = _rebalance_node(node, reader, rebalance)
            out[node.first : node.first + len(new)] = new
        return out


def reshard_residuals(
    like: PyTree, targets: Sequence[Target], manifest: Manifest, rename: Rename | None
) -> ReshardedState:
    """Returns the states of a tree that the checkpoint has for other ranks, or with other codes."""
    out = ReshardedState(frozenset(), frozenset(), [], [], [], [])
    first = 0
    for state in tree_flatten(like, is_leaf=compresses)[0]:
        count = len(tree_leaves(state))
        if compresses(state):
            out = _recut_state(out, state, first, targets[first : first + count], manifest, rename)
        first += count
    return out


def _recut_state(
    out: ReshardedState, state: Any, first: int, targets: Sequence[Target], manifest: Manifest, rename: Rename | None
) -> ReshardedState:
    here = range(first, first + len(targets))
    names = [asked(t.parts, rename) for t in targets]
    found = [None if name is None else manifest.leaves.get(name) for name in names]
    node = _Node(state, first, tree_unflatten(tree_flatten(state)[1], here), found)
    codes, residual = ({*tree_leaves(getattr(node.index, f, ()))} for f in ("codes", "residual"))
    prefix = "".join(_common_path([t.parts for t in targets])).removeprefix(".")
    old_codes = {p for p in manifest.leaves if p.startswith(f"{prefix}.codes")}
    fresh = _Fresh(sorted(codes), [node.index.freeze.begun] if codes and hasattr(node.index, "freeze") else [])
    begun = (n for i in fresh.begun if (n := names[i - first]))
    anew = out._replace(
        at=out.at.union(fresh.all), paths=out.paths.union(old_codes, begun), zeros=[*out.zeros, *fresh.all]
    )
    if residual and all(names[i - first] is None for i in residual):  # the caller has dropped the errors
        return _reset_residuals(anew, sorted(residual), f"{prefix}.residual", manifest)
    errors = find_residuals(state, node.index, dict(zip(here, targets, strict=True)), manifest, rename)
    if not all(x.cut_alike for x in errors):
        return _cut_anew(anew, errors, manifest, targets[0])
    missing = {i for i in here if i not in codes and found[i - first] is None}
    if missing:  # other messages, or another optimizer; leaves are listed one by one
        hint = [f"the state of {targets[0].path}: its errors are of other messages; {_WITHOUT}"]
        return out._replace(problems=[*out.problems, *(hint if missing <= residual else [])])
    same = [i for i, leaf, t in zip(here, found, targets, strict=True) if leaf is not None and leaf.shape == t.shape]
    wrong = _cut_otherwise(node, targets, manifest)
    if wrong or residual - {*same}:
        return out._replace(
            at=out.at.union(here),
            paths=out.paths.union(old_codes, (n for n in names if n)),
            nodes=[*out.nodes, node],
            problems=[*out.problems, *wrong],
        )
    return out if codes <= {*same} and old_codes <= {*names} else anew


def _reset_residuals(out: ReshardedState, residual: Sequence[int], at: str, manifest: Manifest) -> ReshardedState:
    """Resets the error-feedback residuals to 0, and ignores the checkpoint's residuals."""
    lost = {p for p in manifest.leaves if p.startswith(at)}
    return out._replace(at=out.at.union(residual), paths=out.paths.union(lost), zeros=[*out.zeros, *residual])


def _cut_anew(
    out: ReshardedState, errors: Sequence[StoredResidual], manifest: Manifest, state: Target
) -> ReshardedState:
    """Adds errors that are cut by other axes than in the checkpoint, or with layers stacked on one side."""
    problems = [
        f"the state of {state.path}: all of its errors are cut along {axis}, which may be of the axes inside of"
        f" `outer`, along which nothing can be moved; keep that axis, or {_WITHOUT}"
        for axis in find_missing_ranks(errors, manifest)
    ]
    return out._replace(
        at=out.at.union(*(x.at for x in errors)),
        paths=out.paths.union(*(x.paths for x in errors)),
        residuals=[*out.residuals, *errors],
        problems=[*out.problems, *problems],
    )


def _common_path(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    out = []
    for entries in zip(*paths, strict=False):
        if len({*entries}) > 1:
            break
        out.append(entries[0])
    return tuple(out)


def _cut_otherwise(node: _Node, targets: Sequence[Target], manifest: Manifest) -> list[str]:
    """Returns problems: other leaves with another shape, and errors of leaves with another number of blocks."""
    loose = {*tree_leaves(getattr(node.index, "codes", ())), *tree_leaves(node.index.residual)}
    out = [
        f"{t.path} is {t.shape} here, but {leaf.shape} in the checkpoint"
        for i, (t, leaf) in enumerate(zip(targets, node.found, strict=True), node.first)
        if leaf is not None and i not in loose and leaf.shape != t.shape
    ]
    flat = (tree_leaves(tree.residual, is_leaf=_is_residual) for tree in (node.like, node.index))
    for like, index in zip(*flat, strict=True):
        if _is_residual(like) and isinstance(like.worker, GlobalTensor):
            leaf = node.found[index.worker - node.first]
            assert leaf is not None
            old = math.prod(manifest.mesh.get(a, 1) for axes in leaf.spec[1:2] for a in axes)
            new = like.worker.mesh.axis_size(like.worker.spec.dim_axes(1))
            if old != new:
                out.append(
                    f"{targets[index.worker - node.first].path}: errors of a leaf that other axes than the mean's cut"
                    f" into {old} blocks, and cut into {new} here; keep those axes, or {_WITHOUT}"
                )
    return out


def _zeros_like(like: Any) -> Any:
    if not isinstance(like, GlobalTensor):
        return torch.zeros(like.shape, dtype=like.dtype)
    block = torch.zeros(like.held.shape, dtype=like.dtype, device=like.mesh.device)
    return GlobalTensor(block, like.shape, like.spec, like.mesh)


def _rebalance_node(node: _Node, reader: ChunkReader, rebalance: Rebalance) -> list[Any]:
    old = [_read_whole(x, leaf, reader) for x, leaf in zip(tree_leaves(node.like), node.found, strict=True)]
    return tree_leaves(rebalance(tree_unflatten(tree_flatten(node.like)[1], old), node.like))


def _read_whole(like: Any, leaf: StoredLeaf | None, reader: ChunkReader) -> Tensor:
    if leaf is None:  # codes, which are dropped
        return torch.zeros(tuple(like.shape), dtype=like.dtype)
    out = torch.empty(leaf.shape, dtype=dtype_of(leaf))
    reader.box(leaf, tuple((0, n) for n in leaf.shape), out)
    return out


def _is_residual(x: Any) -> bool:
    return isinstance(x, Residual)
