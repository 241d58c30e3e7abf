"""States of compressing optimizers.

Error-feedback residuals are per rank, and must be converted for another number of ranks.

For the same number of ranks errors are read unchanged. Only codes of the last momentum are left out, because the codes
depend on the ZeRO stage: the next step gathers the rows instead, once. For another number `optim.rebalance_residuals`
distributes the old ranks' errors. Whole leaves are needed in memory. Where other axes cut the leaves, or layers are
stacked on one side, errors are first converted to the shape of the leaves, and then cut again (`_residuals`).

Converts error-feedback residuals from one spec to another: other axes, other ranks, layers stacked or in a list.

For a leaf of shape S, in T blocks along the axes that are not averaged over, P ranks keep

    worker [P, T N]    server [T N]

where each of the T rows of N begins with its block, row-major. In the shape of the leaf the residuals are `[P, *S]` and
`[*S]`, equal for every spec. So residuals are read into the shape of the leaf, and then cut again. Where P changes,
every new rank gets the mean of the old ranks' errors, as in `optim.rebalance_residuals`. For example, all ranks of a
new run with P = 2 get the mean of 4 old errors.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import collectives, core
from shardfn.optim import is_compressing, rebalance_residuals

from ._manifest import Manifest, StoredLeaf
from ._match import Rename, Source, Target, find_path, source_of
from ._read import BoxReader, dtype_of

_FIELDS = collectives.Residual._fields


class _Layer(NamedTuple):
    """Leaf of the checkpoint, with blocks and with errors by name. `row` is a row of dim 0. None: all rows."""

    shape: tuple[int, ...]
    blocks: list[collectives.Box]
    errors: dict[str, StoredLeaf]
    row: int | None


class StoredResidual(NamedTuple):
    """Errors of compression of a leaf of the tree.

    Attributes:
        at: numbers of the worker and server leaves in the tree.
        paths: paths of the source leaves in the checkpoint.
        like: the errors in the layout of the tree.
        shape: shape of the leaf.
        blocks: blocks of the leaf under the tree's spec.
        layers: sources in the checkpoint. Several sources are stacked along dim 0.
        piled: whether the layers are stacked.
    """

    at: tuple[int, ...]
    paths: frozenset[str]
    like: collectives.Residual
    shape: tuple[int, ...]
    blocks: list[collectives.Box]
    layers: list[_Layer]
    piled: bool

    @property
    def cut_alike(self) -> bool:
        """Returns whether the checkpoint has the errors of this leaf in the same blocks."""
        return not self.piled and self.layers[0].row is None and self.layers[0].blocks == self.blocks

    def read(self, reader: BoxReader) -> list[Any]:
        """Returns the worker and server errors, cut for the tree."""
        out = []
        for name, like in zip(_FIELDS, self.like, strict=True):
            if not hasattr(like, "shape"):  # the compressor keeps none
                continue
            parts = [_lay_out_error(x, x.errors[name], reader) for x in self.layers]
            dense = torch.stack(parts, dim=1) if self.piled else parts[0]
            rows = like.shape[0] if name == "worker" else 1
            if len(dense) != rows:
                dense = (dense.sum(0) / len(dense)).expand(rows, *self.shape)
            whole = _cut_rows(dense, self.blocks, like.shape[-1]).view(tuple(like.shape))
            out.append(
                collectives.shard(whole, like.spec, like.mesh)
                if isinstance(like, collectives.GlobalTensor)
                else whole.to(like.device)
            )
        return out


def find_residuals(
    state: Any, index: Any, targets: Mapping[int, Target], manifest: Manifest, rename: Rename | None
) -> list[StoredResidual]:
    """Returns the errors in a checkpoint for each leaf that a state compresses, empty if unknown.

    Args:
        state: optimizer state with a `residual` for each leaf of the moments.
        index: tree like `state`, with numbers of leaves in the place of leaves.
        targets: the leaves by number.
        manifest: manifest of the checkpoint.
        rename: function from paths of the tree to paths of the checkpoint.
    """
    if not hasattr(state, "adam"):  # 1-bit LAMB's messages are of several leaves
        return []
    moments = dict(core.named_leaves(state.adam[0].mu))
    numbers = dict(core.named_leaves(index.adam[0].mu))
    names = core.tree_paths(state.residual, is_leaf=_is_residual)
    pairs = zip(*(core.tree_leaves(x.residual, is_leaf=_is_residual) for x in (state, index)), strict=True)
    out = []
    for name, (like, at) in zip(names, pairs, strict=True):
        if not _is_residual(like) or name not in moments:
            return []
        if not hasattr(like.worker, "shape"):  # a leaf that all axes of the mean cut is not compressed
            continue
        found = source_of(targets[numbers[name]], manifest, rename)
        layers = _find_layers(found, manifest) if isinstance(found, Source) else []
        blocks = _blocks_here(moments[name], like)
        if not layers or blocks is None or not isinstance(found, Source):
            return []
        paths = frozenset(f"{_residual_of(p)}.{f}" for p in found.paths for f in layers[0].errors)
        out.append(
            StoredResidual(
                tuple(core.tree_leaves(at)), paths, like, tuple(moments[name].shape), blocks, layers, found.piled
            )
        )
    return out


def find_missing_ranks(residuals: Sequence[StoredResidual], manifest: Manifest) -> list[str]:
    """Returns the axes that cut all errors, there or here. Axes inside of `outer=` are possible, but cut no leaf."""
    here = [_worker_axes(x.like.worker) for x in residuals if hasattr(x.like.worker, "shape")]
    there = [
        {a for axes in layer.errors["worker"].spec[1:2] for a in axes if manifest.mesh.get(a, 1) > 1}
        for x in residuals
        for layer in x.layers
        if "worker" in layer.errors
    ]
    return sorted({a for sets in (here, there) if sets for a in set.intersection(*map(set, sets))})


def _find_layers(found: Source, manifest: Manifest) -> list[_Layer]:
    """Returns the checkpoint's errors for each leaf that a moment is read from.

    Empty if some are missing, or do not fit.
    """
    out = []
    for path, moment in zip(found.paths, found.leaves, strict=True):
        base = _residual_of(path)
        errors = {f: manifest.leaves[p] for f in _FIELDS if (p := f"{base}.{f}") in manifest.leaves}
        if "worker" not in errors:
            return []
        own = tuple(a for axes in errors["worker"].spec[1:2] for a in axes)
        blocks = _split_blocks(moment.shape, core.P(*(axes or None for axes in moment.spec)), own, manifest.mesh)
        if blocks is None or any(not _fits_blocks(x, moment.shape, blocks) for x in errors.values()):
            return []
        out.append(_Layer(moment.shape, blocks, errors, found.row))
    return out


def _residual_of(path: str) -> str:
    return path.replace(".adam[0].mu", ".residual", 1)


def _worker_axes(worker: Any) -> tuple[str, ...]:
    return worker.mesh.axes(worker.spec.dim_axes(1)) if isinstance(worker, collectives.GlobalTensor) else ()


def _blocks_here(moment: Any, like: collectives.Residual) -> list[collectives.Box] | None:
    shape = tuple(moment.shape)
    if not isinstance(like.worker, collectives.GlobalTensor):
        return [tuple((0, n) for n in shape)]
    return _split_blocks(shape, moment.spec, _worker_axes(like.worker), like.worker.mesh.shape)


def _split_blocks(
    shape: tuple[int, ...], spec: core.P, own: Sequence[str], sizes: Mapping[str, int]
) -> list[collectives.Box] | None:
    """Returns the blocks of a leaf along some axes, in the order of those.

    None if one of them does not cut the leaf.
    """
    own = [a for a in own if sizes.get(a, 1) > 1]
    if not {*own} <= {*spec.axes}:
        return None
    kept = core.P(*(tuple(a for a in spec.dim_axes(d) if a in own) or None for d in range(len(shape))))
    counts = [range(sizes[a]) for a in own]
    cuts = (core.block_slices(shape, kept, sizes, dict(zip(own, at, strict=True))) for at in itertools.product(*counts))
    return [tuple((s.start, s.stop) for s in slices) for slices in cuts]


def _fits_blocks(error: StoredLeaf, shape: tuple[int, ...], blocks: Sequence[collectives.Box]) -> bool:
    """Returns whether an error has a row for each block, with the length of the longest block."""
    size = error.shape[-1] if error.shape else 0
    return size % len(blocks) == 0 and size // len(blocks) >= max(map(_box_numel, blocks)) and math.prod(shape) > 0


def _box_numel(box: collectives.Box) -> int:
    return math.prod(hi - lo for lo, hi in box)


def _lay_out_error(layer: _Layer, error: StoredLeaf, reader: BoxReader) -> Tensor:
    """Returns an error in the shape of the leaf, `[rows, *shape]`. For a row of a stack, `[rows, *shape[1:]]`."""
    lead = error.shape[:-1] or (1,)
    out = torch.zeros((*lead, *layer.shape), dtype=dtype_of(error))
    if layer.row is not None:
        out = out.new_zeros((*lead, *layer.shape[1:]))
    each = error.shape[-1] // len(layer.blocks)
    for k, box in enumerate(layer.blocks):
        first, count, where = k * each, _box_numel(box), box
        if layer.row is not None:  # dim 0 is the slowest, so a row of a block is a contiguous range
            (lo, hi), where = box[0], box[1:]
            if not lo <= layer.row < hi:
                continue
            count = _box_numel(where)
            first += (layer.row - lo) * count
        flat = torch.empty((*error.shape[:-1], count), dtype=out.dtype)
        reader.box(error, (*((0, n) for n in error.shape[:-1]), (first, first + count)), flat)
        place = (slice(None), *(slice(lo, hi) for lo, hi in where))
        out[place] = flat.view(*lead, *(hi - lo for lo, hi in where))
    return out


def _cut_rows(dense: Tensor, blocks: Sequence[collectives.Box], size: int) -> Tensor:
    """Returns an error as rows of blocks, `[rows, size]`, each padded with zeros."""
    out = dense.new_zeros((len(dense), len(blocks), size // len(blocks)))
    for k, box in enumerate(blocks):
        part = dense[(slice(None), *(slice(lo, hi) for lo, hi in box))]
        out[:, k, : _box_numel(box)] = part.reshape(len(dense), -1)
    return out


def _is_residual(x: Any) -> bool:
    return isinstance(x, collectives.Residual)


# This loses the rounding errors that ranks have not sent yet.
_WITHOUT = "let errors begin at 0: rename=lambda path: None if '.residual' in path else path"


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

    def apply(self, leaves: Sequence[Any], reader: BoxReader) -> list[Any]:
        """Returns the leaves of the tree, with the converted leaves of the states."""
        out = list(leaves)
        for i in self.zeros:
            out[i] = _zeros_like(out[i])
        for x in self.residuals:
            for i, new in zip(x.at, x.read(reader), strict=True):
                out[i] = new
        for node in self.nodes:
            new = _rebalance_node(node, reader)
            out[node.first : node.first + len(new)] = new
        return out


def reshard_residuals(
    like: core.PyTree, targets: Sequence[Target], manifest: Manifest, rename: Rename | None
) -> ReshardedState:
    """Returns the states of a tree that the checkpoint has for other ranks, or with other codes."""
    out = ReshardedState(frozenset(), frozenset(), [], [], [], [])
    first = 0
    for state in core.tree_flatten(like, is_leaf=is_compressing)[0]:
        count = len(core.tree_leaves(state))
        if is_compressing(state):
            out = _recut_state(out, state, first, targets[first : first + count], manifest, rename)
        first += count
    return out


def _recut_state(
    out: ReshardedState, state: Any, first: int, targets: Sequence[Target], manifest: Manifest, rename: Rename | None
) -> ReshardedState:
    here = range(first, first + len(targets))
    names = [find_path(t.parts, rename) for t in targets]
    found = [None if name is None else manifest.leaves.get(name) for name in names]
    node = _Node(state, first, core.tree_unflatten(core.tree_flatten(state)[1], here), found)
    codes, residual = ({*core.tree_leaves(getattr(node.index, f, ()))} for f in ("codes", "residual"))
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
    loose = {*core.tree_leaves(getattr(node.index, "codes", ())), *core.tree_leaves(node.index.residual)}
    out = [
        f"{t.path} is {t.shape} here, but {leaf.shape} in the checkpoint"
        for i, (t, leaf) in enumerate(zip(targets, node.found, strict=True), node.first)
        if leaf is not None and i not in loose and leaf.shape != t.shape
    ]
    flat = (core.tree_leaves(tree.residual, is_leaf=_is_residual) for tree in (node.like, node.index))
    for like, index in zip(*flat, strict=True):
        if _is_residual(like) and isinstance(like.worker, collectives.GlobalTensor):
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
    if not isinstance(like, collectives.GlobalTensor):
        return torch.zeros(like.shape, dtype=like.dtype)
    block = torch.zeros(like.held.shape, dtype=like.dtype, device=like.mesh.device)
    return collectives.GlobalTensor(block, like.shape, like.spec, like.mesh)


def _rebalance_node(node: _Node, reader: BoxReader) -> list[Any]:
    old = [_read_whole(x, leaf, reader) for x, leaf in zip(core.tree_leaves(node.like), node.found, strict=True)]
    return core.tree_leaves(rebalance_residuals(core.tree_unflatten(core.tree_flatten(node.like)[1], old), node.like))


def _read_whole(like: Any, leaf: StoredLeaf | None, reader: BoxReader) -> Tensor:
    if leaf is None:  # codes, which are dropped
        return torch.zeros(tuple(like.shape), dtype=like.dtype)
    out = torch.empty(leaf.shape, dtype=dtype_of(leaf))
    reader.box(leaf, tuple((0, n) for n in leaf.shape), out)
    return out
