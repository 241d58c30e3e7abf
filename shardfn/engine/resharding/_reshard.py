"""`reshard`: leaves to other layouts, memories, dtypes and meshes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn._torch import DisableFuncTorch, disable_current_modes
from shardfn.capture import capturing
from shardfn.collectives import (
    Box,
    Channels,
    GlobalTensor,
    LeafCrossing,
    Overlap,
    Route,
    absent,
    bind_mesh,
    carry,
    carry_all,
    cross,
    overlaps,
    route,
    transforming,
)
from shardfn.core import (
    DonatedError,
    MemoryKind,
    Mesh,
    P,
    Pending,
    PerMesh,
    Placement,
    PyTree,
    Sharding,
    StoredValue,
    as_mesh,
    block_slices,
    broadcast_prefix,
    find_directory_problem,
    is_disk,
    kind_when_loaded,
    raise_all,
    read_rows,
    tree_flatten,
    tree_leaves,
    tree_paths,
    tree_unflatten,
)
from shardfn.engine.agreement import Comms, comms_of, losing_no_peer
from shardfn.engine.loss import agree_on_step, told_before
from shardfn.memory import Pool, put
from shardfn.state import copy_value, empty_block, start_move

from ._into import Write, into_path, leaves_of_into, overwrite, shared_memory, write_problems

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
            pure: whether to use only functions that torch can differentiate and capture.

        Raises:
            ValueError: lists every leaf that cannot be resharded, and options without effect.
            DonatedError: lists every leaf that was donated.
        """
        rows = self._rows()
        gone = [f"{path} of shape {tuple(x.shape)}" for path, x, _, _ in rows if x.donated]
        gone += [
            f"{into_path(path)} of shape {tuple(y.shape)}" for path, _, _, y in rows if y is not None and y.donated
        ]
        raise_all(DonatedError, "reshard: a step has consumed these leaves; continue from the state it returned:", gone)
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
        yield "a GlobalTensor is not a sum that is still to be taken; leave out unreduced="
    if t.mesh.closed:
        yield "the mesh is closed; make another one"
    if t.x.stacked and not pure:
        yield "it holds the blocks of several members; take one by member(tree, i), or call this under torch.func.vmap"
    missing = find_directory_problem([t.asked.memory_kind], t.pool) == "missing"
    if missing and t.into is None and not t.stays:
        yield "on which disk? Pass pool=sf.memory.Pool('/path/to/a/fast/disk'), with a directory for each rank"
    if pure and any(map(is_disk, (t.src.memory_kind, t.asked.memory_kind))):
        yield "a block on disk is not a tensor, so neither jit nor a gradient gets there; call this outside, detached"
    if pure and not t.on_one_mesh:
        yield "between meshes there is no graph and no derivative; call this outside of jit and torch.func, detached"


def reshard(
    tree: PyTree,
    to: PyTree = None,
    *,
    into: PyTree | None = None,
    mesh: Mesh | DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
    pool: Pool | None = None,
) -> PyTree:
    """Returns the same leaves in another layout, memory, dtype or mesh: `unshard(reshard(tree, to)) == unshard(tree)`.

    On one mesh each leaf goes along its `route`: by slices, all_to_alls and gathers. It works under `jit` and inside
    transforms of torch.func. Its transpose is the way back. Between two meshes each rank sends the others only what
    they lack, once, through the host and a few megabytes at a time. This is eager, and collective over the ranks of
    both meshes. Ranks compare their transfers before the first one.

    Args:
        tree: `GlobalTensor`s are placed. Other leaves pass through (`shard` places a tensor that all ranks hold).
        to: a prefix tree of targets: a `P` (on the device), a `Sharding`, or a `Placement`, which also has a dtype. It
            may be left out with `into`.
        into: leaves with the structure and shapes of `tree`, on the device or the host, that are overwritten and
            returned. Their layouts, dtypes and meshes are the targets. `to`, `mesh` and `dtype` must equal them. Not
            under `jit`, torch.func or autograd.
        mesh: the target mesh; default each leaf's own, or that of its leaf of `into`. It may have other ranks, or some
            of the same.
        dtype: dtype of floating-point leaves without a `Placement`. Default: their own. A cast to a narrower dtype
            comes before the transfer.
        pool: where leaves on disk are written. One for each rank.

    Returns:
        The tree. A leaf that is placed as asked is the same leaf. Every other one has memory of its own, and `tree` is
        not changed. With `into`, its leaves, in their own memory. On a rank outside of `mesh`, leaves have shape, dtype
        and layout, and no block.

    Raises:
        ValueError: a leaf does not fit its target or cannot be moved there, or leaves share memory with those of
            `into`. The message lists all. Or this rank is outside of all the meshes.
        DonatedError: a step has consumed a leaf of `tree` or `into`.
        RankError: ranks disagree on the transfers, or one has failed.

    Example:
        >>> import torch
        >>> from shardfn.collectives import shard
        >>> from shardfn.core import P, make_mesh
        >>> with make_mesh({"dp": -1}, device="cpu") as mesh:
        ...     tree = {"w": shard(torch.ones(4, 2), P("dp"), mesh)}
        ...     reshard(tree, P(None, "dp"), dtype=torch.bfloat16)
        {'w': GlobalTensor((4, 2), torch.bfloat16, P(None, 'dp'); 16 B here on device, mesh dp=1)}
        >>> with make_mesh({"dp": -1}, device="cpu") as mesh:
        ...     trained, served = ({"w": shard(torch.full((2,), x), P("dp"), mesh)} for x in (3.0, 0.0))
        ...     reshard(trained, into=served)["w"] is served["w"], served["w"].local
        (True, tensor([3., 3.]))
    """
    leaves, treedef = tree_flatten(tree)
    at = [i for i, x in enumerate(leaves) if isinstance(x, GlobalTensor)]
    held = [leaves[i] for i in at]
    if len(held) < len(leaves) and not held:
        raise ValueError(
            "reshard: the tree has leaves, but none is a GlobalTensor. A tensor that all ranks hold is placed by"
            " sf.shard(x, spec, mesh)."
        )
    targets = [y for y in tree_leaves(into) if isinstance(y, GlobalTensor)]
    if not held and not targets:
        return tree
    if to is None and into is None:
        raise ValueError("reshard: where to? Pass to=, such as P('dp'), or into=, leaves that are to be overwritten.")
    on = mesh if mesh is None or isinstance(mesh, Mesh) else as_mesh(mesh)
    meshes = {id(m): m for m in (*(() if on is None else (on,)), *(x.mesh for x in (*targets, *held)))}
    out = _place_leaves(ReshardRequest(tree, to, on, dtype, pool, into), held, list(meshes.values()))
    for i, x in zip(at, out, strict=True):
        leaves[i] = x
    return tree_unflatten(treedef, leaves)


def _place_leaves(request: ReshardRequest, held: Sequence[GlobalTensor], meshes: Sequence[Mesh]) -> list[GlobalTensor]:
    abstract = [f"{m!r} is abstract: its ranks do not exist" for m in meshes if m.abstract]
    raise_all(ValueError, "reshard: nothing can be moved:", abstract)
    if capturing():  # a capture sends no messages; the graph is the program of the ranks
        return _reshard_purely(request.transits(pure=True))
    meeting = _join_meshes(meshes)
    if transforming() or any(map(is_followed, held)):
        with DisableFuncTorch(), disable_current_modes():  # messages, which transforms must not see
            transits = _agree_on_transfers(meeting, request, pure=True)
        return _reshard_purely(transits)
    transits = _agree_on_transfers(meeting, request, pure=False)
    # In the order of the tree, first those that stay on a mesh: the same on all ranks, as they have agreed on the list.
    here = [i for i, t in enumerate(transits) if t.on_one_mesh]
    away = [i for i, t in enumerate(transits) if not t.on_one_mesh]
    comms = comms_of(meeting)
    with losing_no_peer(comms), torch.no_grad():
        out = dict(zip(here, _moved([transits[i] for i in here]), strict=True))
        out |= zip(away, _crossed([transits[i] for i in away], comms), strict=True)
    return [out[i] for i in range(len(transits))]


def _agree_on_transfers(meeting: Mesh, request: ReshardRequest, *, pure: bool) -> list[Transit]:
    """Returns the transfers that all ranks are about to make. Collective over the ranks of `meeting`."""
    control = comms_of(meeting).control
    with told_before(control):
        transits = request.transits(pure=pure)
        text = "\n".join(t.describe() for t in transits)
    agree_on_step(control, "reshard", (text, ()))
    return transits


# By ranks, the meshes that are made for messages between those of a call.
_MEETINGS: PerMesh[dict[tuple[int, ...], Mesh]] = PerMesh()


def _join_meshes(meshes: Sequence[Mesh]) -> Mesh:
    """Returns the mesh of all ranks of some meshes.

    One of these, if it has them all, else one that the first of them keeps.

    Raises:
        ValueError: this rank is not one of them.
    """
    if not any(m.is_member for m in meshes):
        raise ValueError(f"reshard: this rank is in none of {', '.join(map(repr, meshes))}. Call it on their ranks.")
    ranks = tuple(sorted({rank for m in meshes for rank in m.ranks}))
    for m in meshes:
        if m.ranks == ranks and not m.closed:
            return m
    first = meshes[0]
    kept = _MEETINGS.of(first, dict)
    if ranks not in kept:
        limits = {"timeout": first.timeout, "agreement_timeout": first.agreement_timeout}
        kept[ranks] = made = Mesh({"rank": len(ranks)}, torch.device("cpu"), ranks=ranks, **limits)
        first.at_close(f"meeting of {ranks}", lambda why: made.close())
    return kept[ranks]


def _moved(transits: Sequence[Transit]) -> list[GlobalTensor]:
    """Returns the leaves in their new placements, mesh by mesh, several at a time. Collective over each mesh."""
    out: dict[int, GlobalTensor] = {}
    # In the order of the leaves, so on all ranks in one order.
    for mesh in {id(t.mesh): t.mesh for t in transits}.values():
        mine = [i for i, t in enumerate(transits) if t.mesh is mesh]
        out |= zip(mine, _move_blocks(mesh, [transits[i] for i in mine]), strict=True)
    return [out[i] for i in range(len(transits))]


def _reshard_purely(transits: Sequence[Transit]) -> list[GlobalTensor]:
    """Returns the leaves in their new placements, by functions that torch can differentiate and capture."""

    def one(t: Transit) -> GlobalTensor:
        if t.stays or not t.mesh.is_member:
            return t.x if t.stays else t.elsewhere()
        with bind_mesh(t.mesh):
            return t.made(carry(t.x.local, t.route(), move=functools.partial(_put_block, device=t.mesh.device)))

    return [one(t) for t in transits]


def _move_blocks(mesh: Mesh, transits: Sequence[Transit]) -> list[GlobalTensor]:
    if not mesh.is_member:
        return [t.x if t.stays else t.elsewhere() for t in transits]

    def send(block: StoredValue, src: MemoryKind, dst: MemoryKind) -> Pending[StoredValue]:
        return start_move(block, src, dst, mesh.device, transits[0].pool)

    # Leaves of the same shape and layout share theirs: finding one takes as long as a small leaf's share of a message.
    known: dict[object, Route] = {}
    for t in transits:
        if (t.x.shape, t.src, t.dst) not in known:
            known[t.x.shape, t.src, t.dst] = t.route()
    routes = [known[t.x.shape, t.src, t.dst] for t in transits]

    def keep(i: int, end: StoredValue) -> StoredValue:
        t = transits[i]
        if t.into is not None:
            return overwrite(t.into, end)
        return end if t.stays or routes[i].hops else copy_value(end, t.dst.memory_kind)

    with bind_mesh(mesh):
        ends = carry_all([t.x.held for t in transits], routes, send, keep)
    return [t.x if t.stays else t.made(end) for t, end in zip(transits, ends, strict=True)]


def _put_block(block: Tensor, kind: MemoryKind, *, device: torch.device) -> Tensor:
    return put(block, kind, device)


def _crossed(transits: Sequence[Transit], comms: Comms) -> list[GlobalTensor]:
    """Moves leaves to other meshes. Collective over the mesh of `comms`, which has the ranks of all these meshes."""
    if not transits:
        return []
    ranks, channels = comms.mesh.ranks, comms.channels
    assert isinstance(channels, Channels)
    known: dict[object, list[Overlap]] = {}
    arrivals = [_IncomingBlock(t) for t in transits]
    crossings = [
        LeafCrossing(
            _find_overlaps(t, ranks[comms.mesh.rank], known), _choose_narrower_dtype(t), _read_boxes(t), a.put, a.done
        )
        for t, a in zip(transits, arrivals, strict=True)
    ]
    cross(crossings, channels.between(comms.mesh.axis_names), {rank: i for i, rank in enumerate(ranks)})
    return [a.leaf() for a in arrivals]


def _find_overlaps(t: Transit, rank: int, known: dict[object, list[Overlap]]) -> list[Overlap]:
    """Returns the overlaps of blocks of a leaf; cached, as leaves often share them."""
    # A call keeps its leaves, and so their meshes, alive.
    key = t.x.shape, t.x.spec, id(t.x.mesh), t.dst.spec, id(t.mesh)
    if key not in known:
        known[key] = overlaps(t.x.shape, (t.x.spec, t.x.mesh), (t.dst.spec, t.mesh), rank)
    return known[key]


def _choose_narrower_dtype(t: Transit) -> torch.dtype:
    """Returns the dtype in which a leaf is sent: the narrower one, as on a route."""
    return t.dst.dtype if t.dst.dtype.itemsize <= t.src.dtype.itemsize else t.src.dtype


def _read_boxes(t: Transit) -> Callable[[Box], Tensor]:
    """Gives parts of this rank's block of a leaf, box by box; of a block on disk only these rows are read."""
    held = t.x.held

    def take(box: Box) -> Tensor:
        where = _to_local_box(box, t.x.shape, t.x.spec, t.x.mesh)
        rows = read_rows(held, where[0].start, where[0].stop) if where else read_rows(held)
        return rows.result()[(slice(None), *where[1:])] if where else rows.result()

    return take


class _IncomingBlock:
    """This rank's new block of a leaf. It is made when its first part arrives. `done` is called after all parts.

    Where a leaf is overwritten, it is that leaf's block.
    """

    def __init__(self, t: Transit) -> None:
        self._t = t
        held = None if t.into is None else t.into.held
        self._block: Tensor | None = held if isinstance(held, Tensor) else None
        self._held: StoredValue | None = None

    def put(self, box: Box, piece: Tensor) -> None:
        """Puts a part into it."""
        t = self._t
        self._make_block()[_to_local_box(box, t.x.shape, t.dst.spec, t.mesh)].copy_(piece)

    def done(self) -> None:
        """Moves the complete block to its memory kind."""
        # This rank sends only.
        if not self._t.mesh.is_member:
            return
        # Also where no part came: a block may be empty.
        self._held = block = self._make_block()
        kind, pool = self._t.dst.memory_kind, self._t.pool
        self._held = start_move(block, kind_when_loaded(kind), kind, block.device, pool).result()
        self._block = None

    def leaf(self) -> GlobalTensor:
        """Returns the leaf, after `done`."""
        return self._t.elsewhere() if self._held is None else self._t.made(self._held)

    def _make_block(self) -> Tensor:
        if self._block is None:
            t, mesh = self._t, self._t.mesh
            shape = t.dst.block_shape(t.x.shape, mesh.shape, mesh.coords)
            self._block = empty_block(shape, t.dst.dtype, t.dst.memory_kind, mesh.device)
        return self._block


def _to_local_box(box: Box, shape: torch.Size, spec: P, mesh: Mesh) -> tuple[slice, ...]:
    """Returns a box in the coordinates of this rank's block."""
    starts = [s.start for s in block_slices(shape, spec, mesh.shape, mesh.coords)]
    return tuple(slice(lo - start, hi - start) for (lo, hi), start in zip(box, starts, strict=True))
