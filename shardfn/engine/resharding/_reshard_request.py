"""The requests of `reshard`, leaf by leaf, and the reasons why some are impossible."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor, Route, absent, route
from shardfn.core import (
    DonatedError,
    Mesh,
    P,
    Placement,
    PyTree,
    Sharding,
    StoredValue,
    broadcast_prefix,
    find_directory_problem,
    is_disk,
    raise_all,
    tree_leaves,
    tree_paths,
)
from shardfn.memory import Pool

from ._into import Write, into_path, leaves_of_into, shared_memory, write_problems

Target = P | Sharding | Placement


@dataclasses.dataclass(frozen=True)
class Transit:
    """A leaf, and where it is to go.

    Attributes:
        path: path.
        x: the leaf.
        src: present placement, on `x.mesh`.
        asked: new placement.
        mesh: where.
        pool: the disk of this rank, if there is one.
        into: the leaf that is overwritten with it, if there is one.
    """

    path: str
    x: GlobalTensor
    src: Placement
    asked: Placement
    mesh: Mesh
    pool: Pool | None
    into: GlobalTensor | None = None

    @property
    def dst(self) -> Placement:
        """Its placement. Stacking of layers is left out, as it only limits the cuts."""
        return self.asked.with_(stacked=False)

    @property
    def on_one_mesh(self) -> bool:
        """Returns whether it stays on its mesh."""
        return self.x.mesh is self.mesh

    @property
    def stays(self) -> bool:
        """Returns whether it is placed as asked already, and so the result itself."""
        return self.into is None and self.on_one_mesh and self.src == self.dst

    def route(self) -> Route:
        """Returns the route, on one mesh."""
        return route(self.x.shape, self.src, self.dst, self.mesh, path=self.path)

    def describe(self) -> str:
        """Returns the text that must be equal on all ranks."""
        ends = [f"{at!r} on {m.shape}, ranks {m.ranks}" for at, m in ((self.src, self.x.mesh), (self.asked, self.mesh))]
        verb = "to" if self.into is None else "into"
        return f"{self.path}: {tuple(self.x.shape)} from {ends[0]} {verb} {ends[1]}"

    def made(self, held: StoredValue) -> GlobalTensor:
        """Returns the new leaf, made of its block, or the leaf whose block has been overwritten."""
        if self.into is not None:
            return self.into
        dst = self.dst
        return GlobalTensor(held, self.x.shape, dst.spec, self.mesh, dst.memory_kind, frozen=self.x.frozen)

    def elsewhere(self) -> GlobalTensor:
        """Returns the leaf on a rank that its mesh is not of."""
        if self.into is not None:
            return self.into
        return absent(self.x.shape, self.dst.dtype, self.dst.spec, self.mesh, self.dst.memory_kind)


@dataclasses.dataclass(frozen=True)
class ReshardRequest:
    """The arguments of a call. See `reshard`."""

    tree: PyTree
    to: PyTree
    mesh: Mesh | None
    dtype: torch.dtype | None
    pool: Pool | None
    into: PyTree | None = None

    def transits(self, *, pure: bool) -> list[Transit]:
        """Returns a `Transit` for each global tensor of the tree.

        Args:
            pure: whether it is to be done by functions that torch differentiates and records.

        Raises:
            ValueError: lists every leaf that cannot go there, and options without effect.
            DonatedError: lists every leaf that was donated.
        """
        rows = self._rows()
        gone = [f"{path} of shape {tuple(x.shape)}" for path, x, _, _ in rows if x.donated]
        gone += [
            f"{into_path(path)} of shape {tuple(y.shape)}" for path, _, _, y in rows if y is not None and y.donated
        ]
        raise_all(DonatedError, "reshard: a step has consumed these leaves; go on from the state it returned:", gone)
        out = [self._make_transit(*row) for row in rows]
        problems = [
            f"{_name_transit(t)}: {why}"
            for t, (_, _, to, _) in zip(out, rows, strict=True)
            for why in (*_find_problems(t, pure=pure), *self._find_differences(t, to))
        ]
        if self.dtype is not None and all(isinstance(to, Placement) or not _has_floats(x) for _, x, to, _ in rows):
            problems.append(f"dtype={self.dtype} has no effect: it is for floating-point leaves without a Placement")
        problems += [] if pure else shared_memory(list(filter(None, map(_make_write, out))))
        raise_all(ValueError, "reshard: these cannot be, and nothing has moved:", problems)
        return out

    def _rows(self) -> list[tuple[str, GlobalTensor, Target | None, GlobalTensor | None]]:
        """Paths of global tensors, these, their targets if given, and the leaves that they overwrite, if any."""
        leaves, paths = tree_leaves(self.tree), tree_paths(self.tree, "tree")
        given = self.to is not None or self.into is None
        none = [None] * len(leaves)
        targets = broadcast_prefix(self.to, self.tree, _is_target, names=("to", "tree")) if given else none
        overwritten = none if self.into is None else leaves_of_into(self.into, self.tree)
        rows = zip(paths, leaves, targets, overwritten, strict=True)
        return [row for row in rows if isinstance(row[1], GlobalTensor)]

    def _make_transit(self, path: str, x: GlobalTensor, to: Target | None, into: GlobalTensor | None) -> Transit:
        if into is not None:
            asked, mesh = into.placement.with_(quantization=None), into.mesh
        else:
            assert to is not None
            asked, mesh = self._asked(x, to), x.mesh if self.mesh is None else self.mesh
        return Transit(path, x, x.placement, asked, mesh, self.pool, into)

    def _asked(self, x: GlobalTensor, to: Target) -> Placement:
        if isinstance(to, Placement):
            return to
        to = to if isinstance(to, Sharding) else Sharding(to)
        dtype = self.dtype if self.dtype is not None and _has_floats(x) else x.dtype
        return Placement(to.spec, memory_kind=to.memory_kind, dtype=dtype, stacked=to.stacked)

    def _find_differences(self, t: Transit, to: Target | None) -> Iterator[str]:
        """Yields the arguments that differ from the leaf that is overwritten."""
        if t.into is None:
            return
        path = into_path(t.path)
        if to is not None and (asked := self._asked(t.x, to)).with_(stacked=False) != t.dst:
            yield f"{path} is {t.dst!r}, and to has {asked!r}; leave out to=, or pass an equal one"
        if to is None and self.dtype is not None and _has_floats(t.x) and self.dtype != t.dst.dtype:
            yield f"{path} has dtype {t.dst.dtype}, and dtype= is {self.dtype}; leave out dtype="
        if self.mesh is not None and self.mesh is not t.mesh:
            yield f"{path} is on {t.mesh!r}, and mesh= is {self.mesh!r}; leave out mesh=, or pass leaves on that mesh"


def is_followed(x: GlobalTensor) -> bool:
    """Returns whether autograd is to follow a leaf."""
    return torch.is_grad_enabled() and not x.donated and isinstance(x.held, Tensor) and x.held.requires_grad


def _is_target(x: Any) -> bool:
    return isinstance(x, Target)


def _has_floats(x: GlobalTensor) -> bool:
    return x.dtype.is_floating_point


def _name_transit(t: Transit) -> str:
    return f"{t.path} of shape {tuple(t.x.shape)}, from {t.src!r} on {t.x.mesh!r} to {t.asked!r} on {t.mesh!r}"


def _make_write(t: Transit) -> Write | None:
    return None if t.into is None else Write(t.path, t.x, t.into)


def _find_problems(t: Transit, *, pure: bool) -> Iterator[str]:
    if pure and t.into is not None:
        why = "into= overwrites memory, which no graph and no gradient follows"
        yield f"{why}; call this outside of jit and torch.func, under torch.no_grad(), or leave out into="
        return
    if (write := _make_write(t)) is not None:
        yield from write_problems(write)
    yield from t.asked.problems(tuple(t.x.shape), t.mesh)
    if t.asked.quantization is not None:
        yield "a GlobalTensor holds elements, no codes; leave out quantization="
    if t.asked.unreduced:
        yield "a GlobalTensor is no sum that is still to be taken; leave out unreduced="
    if t.mesh.closed:
        yield "the mesh is closed; make another one"
    if t.x.stacked and not pure:
        yield "it holds the blocks of several members; take one by member(tree, i), or call this under torch.func.vmap"
    missing = find_directory_problem([t.asked.memory_kind], t.pool) == "missing"
    if missing and t.into is None and not t.stays:
        yield "on which disk? Pass pool=sf.memory.Pool('/path/to/a/fast/disk'), with a directory for each rank"
    if pure and any(map(is_disk, (t.src.memory_kind, t.asked.memory_kind))):
        yield "a block on disk is no tensor, so neither jit nor a gradient gets there; call this outside, detached"
    if pure and not t.on_one_mesh:
        yield "between meshes there is no graph and no derivative; call this outside of jit and torch.func, detached"
