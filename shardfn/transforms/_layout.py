"""The layout of a step: where each leaf's parameter, gradient and optimizer state live, and what travels together.

ZeRO's stages differ here and nowhere else: a leaf is `gathered` on use (stage 3) or resident, and its gradient comes
back in the optimizer's layout. Everything else in the step reads these tables.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardfn.collectives import Code
from shardfn.core import BITS, Dtypes, MemoryKind, Mesh, P, Zero, all_coords, block_slices, zero_spec
from shardfn.graph import Leaf

# Bytes in which gradients that are summed whole travel together.
WHOLE_BUCKET = 16 << 20


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """Where one leaf lives.

    Attributes:
        path: how errors call it.
        shape: global shape.
        dtypes: in which precision it is kept, computed, sent and added up.
        compute: what the loss sees.
        param: how the parameter is kept between steps.
        shard: how its gradient and optimizer state are kept.
        trainable: whether it gets a gradient.
        block: shape of what the loss sees on this rank.
        numel: elements of the largest rank's block: the same number on all ranks, since groupings follow from it.
        zero_axes: the axes along which `shard` cuts the block further.
        dim: the dim that is cut so; None if it is not.
        bounds: along `dim`, start and stop of each ZeRO rank's rows.
        reduce_axes: the axes over which its gradient is summed in one message, keeping only the own rows if `cut`.
        extra_axes: the other axes over which its gradient is summed.
        cut: whether the summed gradient arrives as rows (else whole, and rows are taken from it).
        home: the memory in which the parameter is kept.
        grad_home: the memory in which its summed gradient waits for the update.
        state_home: the memory in which its optimizer state is kept.
        near: the axes of `zero_axes`, that are near, if it is gathered and some are not; see `Travel.secondary_axis`.
        gather_code: what it travels as when it is gathered; None = in the dtype that the loss sees.
        reduce_code: what its gradient travels as; None = in `dtypes.reduce`.
        layers: of a stacked leaf, the layouts of its layers, which enter the loss and travel one by one; else empty.
        left_axes: the axes over which its gradient is not summed, since the optimizer averages over them itself.
    """

    path: str
    shape: torch.Size
    dtypes: Dtypes
    compute: P
    param: P
    shard: P
    trainable: bool
    block: torch.Size
    numel: int
    zero_axes: tuple[str, ...]
    dim: int | None
    bounds: tuple[tuple[int, int], ...]
    reduce_axes: tuple[str, ...]
    extra_axes: tuple[str, ...]
    cut: bool
    home: MemoryKind = "device"
    grad_home: MemoryKind = "device"
    state_home: MemoryKind = "device"
    near: tuple[str, ...] = ()
    gather_code: Code | None = None
    reduce_code: Code | None = None
    layers: tuple["LeafLayout", ...] = ()
    left_axes: tuple[str, ...] = ()

    @functools.cached_property
    def looks(self) -> object:
        """What is the same for leaves that travel alike."""
        cut = self.use_axes, self.zero_axes, self.dim, self.bounds[:1], self.bounds[-1:], len(self.bounds)
        return self.block, self.dtypes, self.home, *cut

    @property
    def entry(self) -> Leaf:
        """The leaf as the loss sees it, for the types of a captured step."""
        return Leaf(self.path, self.compute.axes, self.trainable)

    @property
    def gathered(self) -> bool:
        """Whether the parameter is kept in pieces and gathered when it is used."""
        return self.param != self.compute

    @property
    def lazy(self) -> bool:
        """Whether the parameter is brought when it is used: gathered, or fetched from another memory, or both."""
        return self.gathered or self.home != "device"

    @property
    def use_axes(self) -> tuple[str, ...]:
        """The axes along which it is gathered when it is used."""
        return self.zero_axes if self.gathered else ()

    @property
    def at_home(self) -> bool:
        """Whether nothing of it ever leaves the device."""
        return self.home == self.grad_home == self.state_home == "device"

    @property
    def refreshed(self) -> bool:
        """Whether the parameter is resident while each rank updates only rows of it: made whole again after."""
        return not self.gathered and self.dim is not None

    @property
    def takes_rows(self) -> bool:
        """Whether the optimizer takes this rank's rows of the gradient; if not, the gradient of the whole block."""
        return self.dim is not None and not set(self.zero_axes) & set(self.left_axes)

    def left_to(self, axes: tuple[str, ...]) -> "LeafLayout":
        """The layout in a step whose optimizer averages over `axes` itself."""
        summed = self.reduce_axes + self.extra_axes
        left = tuple(a for a in summed if a in axes)
        rest = tuple(a for a in summed if a not in axes)
        cut = self.cut and set(self.zero_axes) <= set(rest)
        return dataclasses.replace(
            self,
            cut=cut,
            reduce_axes=self.zero_axes if cut else rest,
            extra_axes=tuple(a for a in rest if a not in self.zero_axes) if cut else (),
            left_axes=left,
            reduce_code=self.reduce_code if cut else None,
            layers=tuple(layer.left_to(axes) for layer in self.layers),
        )

    def rows(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """ZeRO rank `rank`'s part of a block, as a view."""
        if self.dim is None:
            return x
        lo, hi = self.bounds[rank]
        return x.narrow(self.dim, lo, hi - lo)

    @functools.cached_property
    def shard_shapes(self) -> list[torch.Size]:
        """The shape of each ZeRO rank's part; of the whole block alone where it is not cut."""
        return [self.block] if self.dim is None else _shard_shapes(self.block, self.dim, self.bounds)

    def by_rank(self, x: torch.Tensor, run: "Run") -> torch.Tensor:
        """The part of a block that a run of ZeRO ranks has, rank by rank: a view [ranks, *shape of a part]."""
        assert self.dim is not None
        first = self.bounds[run.first][0]
        rows = self.bounds[run.first][1] - first
        part = x if rows * run.num == x.shape[self.dim] else x.narrow(self.dim, first, rows * run.num)
        return part.unflatten(self.dim, (run.num, rows)).movedim(self.dim, 0)

    def from_ranks(self, parts: torch.Tensor) -> torch.Tensor:
        """The rows of the block that `parts`, [ranks, *shape of a part], are."""
        assert self.dim is not None
        return parts.movedim(0, self.dim).flatten(self.dim, self.dim + 1)

    @functools.cached_property
    def shard_rows(self) -> list[int]:
        """How many rows, along `dim`, each ZeRO rank's part has; 1 where it is not cut."""
        return [1] if self.dim is None else [hi - lo for lo, hi in self.bounds]

    @functools.cached_property
    def shard_sizes(self) -> list[int]:
        """The number of elements of each ZeRO rank's part."""
        return [s.numel() for s in self.shard_shapes]


class Run(NamedTuple):
    """Neighbouring ZeRO ranks whose parts have the same shapes: there are few runs, however many ranks.

    Attributes:
        first: the first rank.
        num: how many ranks.
        sizes: for each leaf, the number of elements of a rank's part.
    """

    first: int
    num: int
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Unit:
    """Leaves that travel in one message, by index into the layout."""

    leaves: tuple[int, ...]
    nbytes: int


def leaf_layout(
    path: str,
    shape: torch.Size,
    dtype: torch.dtype | Dtypes,
    compute: P,
    *,
    zero: Zero,
    mesh: Mesh,
    batch_axes: tuple[str, ...],
    trainable: bool,
    home: MemoryKind | None = None,
) -> LeafLayout:
    """Applies the ZeRO rule to one leaf.

    One dtype stands for all of its dtypes; `home` overrides the rule's memory for the parameter.
    """
    rule = zero_spec(tuple(shape), compute, zero.axis, mesh) if zero.stage >= 1 else compute
    dim = next((d for d in range(len(shape)) if rule.dim_axes(d) != compute.dim_axes(d)), None)
    zero_axes = tuple(a for a in rule.axes if a not in compute.axes)
    large = shape.numel() > zero.persist_elements
    param = rule if zero.stage == 3 and large else compute
    slices = block_slices(tuple(shape), compute, mesh.shape, mesh.coords)
    block = torch.Size(s.stop - s.start for s in slices)
    first = block_slices(tuple(shape), compute, mesh.shape, {})
    numel = torch.Size(s.stop for s in first).numel()
    bounds = () if dim is None else _bounds(block[dim], tuple((a, mesh.shape[a]) for a in zero_axes))
    summed = tuple(a for a in batch_axes if a not in compute.axes)
    near = tuple(a for a in zero_axes if a in zero.near)
    dtypes = dtype if isinstance(dtype, Dtypes) else Dtypes.plain(dtype)

    def code(how: str | None) -> Code | None:
        return (
            Code(BITS[how], zero.travel.block_elements)
            if how is not None and dtypes.compute.is_floating_point
            else None
        )

    cut = dim is not None and set(zero_axes) <= set(summed)
    reduce_axes = zero_axes if cut else summed
    extra = tuple(a for a in summed if a not in reduce_axes)
    return LeafLayout(
        path,
        shape,
        dtypes,
        compute,
        param,
        rule,
        trainable,
        block,
        numel,
        zero_axes,
        dim,
        bounds,
        reduce_axes,
        extra,
        cut,
        home or (zero.params if large else "device"),
        zero.grads,
        zero.optimizer,
        near if len(near) < len(zero_axes) and param != compute else (),
        code(zero.travel.gather) if param != compute else None,
        code(zero.travel.reduce) if cut and large else None,
    )


def with_ratio(leaves: Sequence[LeafLayout], ratio: float) -> list[LeafLayout]:
    """The layout with the optimizer state of the first leaves that fit on the device: 1 - `ratio` of all elements.

    Raises:
        ValueError: no leaf is that small.
    """
    train = [leaf for leaf in leaves if leaf.trainable and leaf.shape.numel()]
    room = (1 - ratio) * sum(leaf.shape.numel() for leaf in train)
    stay: set[str] = set()
    for leaf in train:
        if leaf.shape.numel() <= room:
            room -= leaf.shape.numel()
            stay.add(leaf.path)
    if train and ratio < 1 and not stay:
        raise ValueError(
            f"Zero(optimizer_fraction={ratio}) has no effect: every leaf is larger than what may stay on the device."
        )
    return [dataclasses.replace(leaf, state_home="device") if leaf.path in stay else leaf for leaf in leaves]


def stacked_layout(path: str, shape: torch.Size, dtype: torch.dtype | Dtypes, compute: P, **rule: Any) -> LeafLayout:
    """Applies the ZeRO rule to each layer of a stacked leaf [L, *shape of a layer]; see `leaf_layout`."""
    one = leaf_layout(path, shape[1:], dtype, P(*compute.entries[1:]), **rule)
    return dataclasses.replace(
        one,
        shape=shape,
        compute=compute,
        param=P(None, *one.param.entries),
        shard=P(None, *one.shard.entries),
        block=torch.Size((shape[0], *one.block)),
        numel=shape[0] * one.numel,
        dim=None if one.dim is None else one.dim + 1,
        layers=tuple(dataclasses.replace(one, path=f"{path}[{i}]") for i in range(shape[0])),
    )


@functools.lru_cache(maxsize=1024)
def _shard_shapes(block: torch.Size, dim: int, bounds: tuple[tuple[int, int], ...]) -> list[torch.Size]:
    return [torch.Size((*block[:dim], hi - lo, *block[dim + 1 :])) for lo, hi in bounds]


@functools.lru_cache(maxsize=1024)
def _bounds(rows: int, axes: tuple[tuple[str, int], ...]) -> tuple[tuple[int, int], ...]:
    sizes = dict(axes)
    cuts = [block_slices((rows,), P(tuple(sizes)), sizes, coords)[0] for coords in all_coords(sizes)]
    return tuple((c.start, c.stop) for c in cuts)


def make_units(
    leaves: Sequence[LeafLayout],
    members: Sequence[int],
    bucket: int,
    key: Callable[[LeafLayout], tuple[torch.dtype, object]],
    span: float,
) -> list[Unit]:
    """Groups leaves of one `key`: a leaf of `bucket` bytes or more travels alone, smaller neighbours share up to that.

    Args:
        leaves: the layout.
        members: indices of the leaves to group, in order.
        bucket: bytes.
        key: in which dtype a leaf travels, and what else must be equal for leaves to share a unit.
        span: how many bytes of other leaves may lie between the first and the last leaf of a unit.
    """
    units: list[Unit] = []
    open_units: dict[object, tuple[list[int], int, int]] = {}
    passed = 0
    for i in members:
        k = key(leaves[i])
        nbytes = leaves[i].numel * k[0].itemsize
        passed += nbytes
        if nbytes >= bucket:
            units.append(Unit((i,), nbytes))
            continue
        group, size, start = open_units.pop(k, ([], 0, passed))
        if group and (size + nbytes > bucket or passed - start > span):
            units.append(Unit(tuple(group), size))
            group, size, start = [], 0, passed
        open_units[k] = ([*group, i], size + nbytes, start)
    units += [Unit(tuple(group), size) for group, size, _ in open_units.values()]
    return sorted(units, key=lambda u: u.leaves[0])


def gather_units(leaves: Sequence[LeafLayout], bucket: int) -> list[Unit]:
    """The units in which lazy leaves are brought on use: near neighbours only, so that a window stays small.

    What travels in a code travels alone: leaves of unlike scales would share blocks, and so a scale.
    """
    members = [i for i, leaf in enumerate(leaves) if leaf.gathered and leaf.gather_code is None]
    units = make_units(leaves, members, bucket, lambda leaf: (leaf.dtypes.compute, leaf.zero_axes), 4 * bucket)
    alone = {i for i, leaf in enumerate(leaves) if leaf.lazy} - set(members)
    units += [Unit((i,), leaves[i].numel * leaves[i].dtypes.compute.itemsize) for i in alone]
    return sorted(units, key=lambda u: u.leaves[0])


def refresh_units(leaves: Sequence[LeafLayout], zero: Zero) -> list[Unit]:
    """The units in which resident leaves are gathered after their shards were updated."""
    members = [i for i, leaf in enumerate(leaves) if leaf.refreshed and leaf.trainable]
    key = lambda leaf: (leaf.dtypes.param, (leaf.zero_axes, leaf.home))  # noqa: E731
    return make_units(leaves, members, zero.travel.bucket_bytes, key, math.inf)


def reduce_units(leaves: Sequence[LeafLayout], zero: Zero, mesh: Mesh) -> list[Unit]:
    """The units in which gradients are reduced: the same at stages 1, 2 and 3, so that their bits are the same.

    What goes nowhere is not packed, nor what travels in a code, whose blocks are of one leaf each.
    """

    def alone(leaf: LeafLayout) -> bool:
        return mesh.axis_size(leaf.reduce_axes + leaf.extra_axes) == 1 or leaf.reduce_code is not None

    trainable = [i for i, leaf in enumerate(leaves) if leaf.trainable]
    units = [Unit((i,), leaves[i].numel * leaves[i].dtypes.reduce.itemsize) for i in trainable if alone(leaves[i])]
    shared = [i for i in trainable if not alone(leaves[i])]
    cut, whole = ([i for i in shared if leaves[i].cut == on] for on in (True, False))
    units += make_units(leaves, cut, zero.travel.bucket_bytes, _reduce_key, math.inf)
    # Whole gradients are packed in any case, so that they can be summed in place: in messages of an efficient size.
    return units + make_units(
        leaves,
        whole,
        max(zero.travel.bucket_bytes, WHOLE_BUCKET) if zero.travel.bucket_bytes else 0,
        _reduce_key,
        math.inf,
    )


def _reduce_key(leaf: LeafLayout) -> tuple[torch.dtype, object]:
    where = leaf.compute.axes, leaf.reduce_axes, leaf.extra_axes, leaf.cut, leaf.grad_home, leaf.reduce_code
    return leaf.dtypes.reduce, (leaf.dtypes.accum, *where)


def unit_sizes(leaves: Sequence[LeafLayout], size: int) -> list[int]:
    """How many elements each of `size` ranks holds of leaves that travel together."""
    columns = [leaf.shard_sizes for leaf in leaves]
    return columns[0] if len(columns) == 1 else [sum(column[rank] for column in columns) for rank in range(size)]


def unit_runs(leaves: Sequence[LeafLayout]) -> list[Run]:
    """The ranks that share leaves which travel together, as runs; ranks that hold nothing are left out."""
    runs, first = [], 0
    # Not by sizes: the parts of a leaf without elements have equal ones, and may yet differ in shape.
    for _, same in itertools.groupby(zip(*(leaf.shard_rows for leaf in leaves), strict=True)):
        count = len(list(same))
        sizes = tuple(leaf.shard_sizes[first] for leaf in leaves)
        if sum(sizes):
            runs.append(Run(first, count, sizes))
        first += count
    return runs


def unit_parts(leaves: Sequence[LeafLayout], flat: torch.Tensor) -> list[tuple[Run, list[torch.Tensor]]]:
    """What has arrived for leaves that travel together: for each run, each leaf's parts [ranks, *shape of a part]."""
    out, begin = [], 0
    for run in unit_runs(leaves):
        width = sum(run.sizes)
        grid = flat[begin : begin + run.num * width].view(run.num, width)
        columns = grid.split_with_sizes(list(run.sizes), dim=1)
        shapes = [leaf.shard_shapes[run.first] for leaf in leaves]
        out.append((run, [c.unflatten(1, shape) for c, shape in zip(columns, shapes, strict=True)]))
        begin += run.num * width
    return out
