"""The layout of a step: where each leaf's parameter, gradient and optimizer state live, and the ways between.

ZeRO's stages, memories, precision, codes and an optimizer's own averaging differ only in the placements and routes of
`ways`: every property of a leaf that the step reads is derived from these.

A leaf's placements, by name, and the routes between them. ZeRO's stages, memories, precision and codes set both.

placement   meaning                                   in pieces
kept        the parameter between steps               at stage 3
used        the tensor in the loss                    as the model's own spec says
sent        this rank's gradient as it travels        no: summands along the axes that cut the batch
summed      the gradient as it waits for the update   where the optimizer's state is
state       the optimizer's state, and the rows       from stage 1
            of the parameter that the update writes

route       from -> to                                runs
use         kept -> used                              at each use in the loss
reduce      gradient of used -> summed                when a backward has added up a leaf's uses
refresh     updated rows -> kept                      after the update
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import Cast, Cuts, Psum, Route, route
from shardfn.core import (
    BITS,
    Dtypes,
    MemoryKind,
    Mesh,
    P,
    Placement,
    Quantization,
    Zero,
    all_coords,
    block_slices,
    zero_spec,
)
from shardfn.graph import Leaf
from shardfn.kernels import block_bytes, dequantize_blocks

# Axis -> size, hashable, so that cached values do not keep a mesh alive.
_Sizes = tuple[tuple[str, int], ...]


class _Memories(NamedTuple):
    """The memories of a leaf: of the parameter, of its summed gradient, of its optimizer state."""

    param: MemoryKind
    grad: MemoryKind
    state: MemoryKind


class Manner(NamedTuple):
    """Settings of a leaf's routes that its placements do not determine.

    Attributes:
        far: axes of the first hop, if the leaf is gathered in two hops. A quantized gradient is summed along these axes
            last.
        gather_quantization: (bits, elements that share a scale) of the gathered leaf. None: the dtype that the loss
            sees.
        reduce_quantization: (bits, elements that share a scale) of the gradient, if the gradient arrives in rows.
        unreduced: axes of the batch along which the gradient stays a summand, which the optimizer reduces.
    """

    far: tuple[str, ...] = ()
    gather_quantization: tuple[int, int] | None = None
    reduce_quantization: tuple[int, int] | None = None
    unreduced: tuple[str, ...] = ()


class Places(NamedTuple):
    """The specs, dtypes and memories from which a leaf's placements follow.

    Attributes:
        compute: the spec of the tensor that the loss sees.
        param: the spec in which the parameter is kept.
        shard: the spec of the optimizer's state.
        batch_axes: the axes that cut the batch.
        dtypes: dtypes of parameter, gradient and state.
        memories: memories of parameter, gradient and state.
        stacked: whether dim 0 stacks layers.
        quantization: the codes in which the kept parameter is, which is frozen then. None: it is not rounded.
    """

    compute: P
    param: P
    shard: P
    batch_axes: tuple[str, ...]
    dtypes: Dtypes
    memories: _Memories
    stacked: bool = False
    quantization: Quantization | None = None


class _Ways(NamedTuple):
    """The named placements of a leaf, and the routes between them. The routes' shape is a placeholder."""

    kept: Placement
    summed: Placement
    state: Placement
    use: Route
    reduce: Route
    refresh: Route

    @property
    def at_home(self) -> bool:
        """Returns whether parameter, gradient and state lie in the device's memory, and the parameter in no code."""
        return self.kept.is_plain and self.summed.is_plain and self.state.is_plain


@functools.lru_cache(maxsize=4096)
def ways(ndim: int, places: Places, manner: Manner, sizes: _Sizes) -> _Ways:
    """Returns the placements and routes of a leaf.

    Args:
        ndim: number of dims.
        places: where it is.
        manner: how it travels.
        sizes: the axes of the mesh.
    """
    # Without coordinates: a route is the same on all ranks.
    mesh, dtypes = Mesh(dict(sizes), torch.device("cpu"), abstract=True), places.dtypes
    kept = Placement(places.param, (), places.memories.param, dtypes.param, places.quantization, places.stacked)
    used = Placement(places.compute, dtype=dtypes.compute, stacked=places.stacked)
    state = Placement(places.shard, (), places.memories.state, dtypes.master, stacked=places.stacked)
    grad = used.cotangent(places.batch_axes)
    sent = grad.with_(dtype=dtypes.reduce)
    summed = _place_sum(places, manner, sent, state)
    # Hops depend on the number of dims alone, so leaves of all shapes share the cache.
    shape = (2,) * ndim
    use = route(shape, kept, used, mesh, via=_way_in(kept, used, manner))
    reduce = route(shape, grad, summed, mesh, via=_way_out(sent, summed, state, manner))
    updated = state.with_(memory_kind="device", dtype=kept.dtype)
    refresh = route(shape, updated, kept, mesh)
    return _Ways(kept, summed, state, use, reduce, refresh)


def _place_sum(places: Places, manner: Manner, sent: Placement, state: Placement) -> Placement:
    """Rows, or the whole gradient, for an optimizer that averages itself over the axes that cut the rows."""
    rows = [a for a in state.spec.axes if a not in sent.spec.axes]
    spec = sent.spec if set(rows) & set(manner.unreduced) else state.spec
    home = places.memories.grad
    left = tuple(a for a in sent.unreduced if a in manner.unreduced)
    return sent.with_(spec=spec, unreduced=left, memory_kind=home, dtype=places.dtypes.accum)


def _way_in(kept: Placement, used: Placement, manner: Manner) -> list[Placement]:
    """Returns the stops from `kept` to `used`.

    Cast before sending, in code (if any) on all of the way, the far axes first.

    A leaf that is kept in codes is gathered in these.
    """
    if kept.quantization is not None:
        at = kept.with_(memory_kind="device")
        return [at, *([at.with_(brought=manner.far)] if manner.far else []), at.with_(spec=used.spec)]
    here = kept.with_(memory_kind="device", dtype=used.dtype, quantization=manner.gather_quantization)
    via = [here] + ([here.with_(brought=manner.far)] if manner.far else [])
    return via if manner.gather_quantization is None else [*via, used.with_(quantization=manner.gather_quantization)]


def _way_out(sent: Placement, summed: Placement, state: Placement, manner: Manner) -> list[Placement]:
    """Returns the stops of a gradient: summed to rows, if the batch cuts the rows, or summed whole and then cut.

    All stops have the dtype that is sent; sums of codes are in float32.
    """
    rows = {a for a in state.spec.axes if a not in sent.spec.axes}
    if not rows or not rows <= set(sent.unreduced) - set(manner.unreduced):
        return [sent, sent.with_(unreduced=summed.unreduced)]
    others = tuple(a for a in sent.unreduced if a not in rows)
    own, via = sent.with_(spec=state.spec, unreduced=others), [sent]
    if manner.reduce_quantization is not None:
        coded, own = (
            sent.with_(dtype=torch.float32, quantization=manner.reduce_quantization),
            own.with_(dtype=torch.float32),
        )
        via.append(coded)
        if manner.far:
            unsummed = tuple(a for a in sent.unreduced if a in manner.far or a in others)
            half = own.with_(unreduced=unsummed, brought=manner.far)
            via += [half, half.with_(quantization=manner.reduce_quantization)]
    via.append(own)
    own = own.with_(dtype=sent.dtype)
    return via if others == summed.unreduced else [*via, own, own.with_(unreduced=summed.unreduced)]


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """The placements of a single leaf and the routes between them.

    Attributes:
        path: name in errors.
        shape: global shape.
        trainable: whether it gets a gradient.
        places: specs, dtypes and memories.
        manner: the choices of its routes that the placements leave open.
        sizes: the mesh's axes.
        pieces: how the ZeRO ranks share this rank's block, the tensor that the loss sees.
        numel: elements of the largest rank's block: the same number on all ranks, since groupings follow from it.
        layers: for a stacked leaf the layouts of this rank's layers, which enter the loss and travel one by one, else
            empty.
        apart: for such a layer the axes along which other ranks have other layers.
        frozen: whether it is a parameter with `requires_grad=False`, which a step trains only if `trainable=` includes
            it.
    """

    path: str
    shape: torch.Size
    trainable: bool
    places: Places
    manner: Manner
    sizes: _Sizes
    pieces: Cuts
    numel: int
    layers: tuple["LeafLayout", ...] = ()
    apart: tuple[str, ...] = ()
    frozen: bool = False

    @functools.cached_property
    def ways(self) -> _Ways:
        """Its placements, and the routes between them."""
        return ways(len(self.shape), self.places, self.manner, self.sizes)

    # Properties derived from the fields are cached: a step reads them many times per leaf.

    # Derived from its placements.

    @functools.cached_property
    def compute(self) -> P:
        """Returns the spec of the tensor that the loss sees."""
        return self.places.compute

    @functools.cached_property
    def distinct_axes(self) -> tuple[str, ...]:
        """Returns the axes along which ranks see different elements, so that gradients are not summed over them."""
        return self.apart + self.compute.axes

    @functools.cached_property
    def mean_axes(self) -> tuple[str, ...]:
        """Returns the axes of the batch over which its gradient has a mean.

        The loss has added it up along its own axes.
        """
        return tuple(a for a in self.places.batch_axes if a not in self.distinct_axes)

    @functools.cached_property
    def param(self) -> P:
        """Returns the spec in which the parameter is kept."""
        return self.places.param

    @functools.cached_property
    def shard(self) -> P:
        """Returns the spec of the rows that this rank updates, and of their optimizer state."""
        return self.places.shard

    @functools.cached_property
    def dtypes(self) -> Dtypes:
        """Returns the dtypes in which it is kept, updated, computed, sent and added up."""
        return self.places.dtypes

    @functools.cached_property
    def home(self) -> MemoryKind:
        """Returns the memory in which the parameter is kept."""
        return self.places.memories.param

    @functools.cached_property
    def refreshed(self) -> bool:
        """Returns whether the parameter is resident, but each rank updates some rows, which are gathered afterwards."""
        return self.param != self.shard

    @functools.cached_property
    def zero_axes(self) -> tuple[str, ...]:
        """Returns the axes along which the ZeRO ranks share it."""
        return tuple(a for a in self.shard.axes if a not in self.compute.axes)

    # Derived from its routes.

    @functools.cached_property
    def lazy(self) -> bool:
        """Returns whether the parameter arrives when it is used: gathered, fetched from another memory, or decoded."""
        return any(not isinstance(hop, Cast) for hop in self.ways.use.hops)

    @functools.cached_property
    def reduce_axes(self) -> tuple[str, ...]:
        """Returns the axes over which its gradient is summed in a single message.

        Each rank keeps its rows if the route scatters.
        """
        return self.zero_axes if self.ways.reduce.scatters else _summed_axes(self.ways.reduce)

    @functools.cached_property
    def extra_axes(self) -> tuple[str, ...]:
        """Returns the other axes over which its gradient is summed."""
        return _summed_axes(self.ways.reduce) if self.ways.reduce.scatters else ()

    # How its block is cut.

    @functools.cached_property
    def block(self) -> torch.Size:
        """Returns the shape of the tensor that the loss sees on this rank."""
        return self.pieces.whole

    @functools.cached_property
    def dim(self) -> int | None:
        """Returns the dim along which the ZeRO ranks share it, or None if they do not."""
        return self.pieces.dim

    @functools.cached_property
    def used(self) -> Cuts:
        """How the block is cut into the pieces that are gathered when it is used; uncut where it is kept whole."""
        return self.pieces if self.param != self.compute else Cuts(self.block)

    @functools.cached_property
    def sent(self) -> Cuts:
        """How the tensor is cut that is gathered when it is used: the block, or its codes as bytes."""
        quantization, used = self.places.quantization, self.used
        if quantization is None:
            return used
        return dataclasses.replace(
            used, whole=torch.Size((*used.whole[:-1], block_bytes(used.whole[-1], quantization)))
        )

    def opened(self, x: Tensor) -> Tensor:
        """Returns the block in the loss's dtype, from the tensor that was gathered."""
        if self.places.quantization is None:
            return x
        return dequantize_blocks(x, self.block[-1], self.dtypes.param).to(self.dtypes.compute)

    def rows(self, x: Tensor, rank: int) -> Tensor:
        """ZeRO rank `rank`'s part of a block, as a view."""
        return self.pieces.of(x, rank)

    @functools.cached_property
    def entry(self) -> Leaf:
        """Returns the leaf as the loss sees it, for the types of a captured step."""
        return Leaf(self.path, self.distinct_axes, self.trainable)

    def with_unreduced(self, axes: tuple[str, ...]) -> "LeafLayout":
        """Returns the layout with a gradient that stays a summand along `axes`, which the optimizer reduces."""
        # Units are made of layers, so these must agree with the leaf.
        layers = tuple(layer.with_unreduced(axes) for layer in self.layers)
        return dataclasses.replace(self, manner=self.manner._replace(unreduced=axes), layers=layers)

    def with_state_at(self, kind: MemoryKind) -> "LeafLayout":
        """Returns the layout with the optimizer's state in another memory."""
        memories = self.places.memories._replace(state=kind)
        return dataclasses.replace(self, places=self.places._replace(memories=memories))


def _summed_axes(way: Route) -> tuple[str, ...]:
    return tuple(a for hop in way.hops if isinstance(hop, Psum) for a in hop.axes)


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
    quantization: Quantization | None = None,
) -> LeafLayout:
    """Applies the ZeRO rule to a single leaf.

    A single dtype is used for all purposes. `home` overrides the rule's memory for the parameter, `quantization` are
    those in which it is kept. ZeRO does not cut the last dim of a leaf in codes, along which elements share scales.
    """
    cut = len(shape) if quantization is None else len(shape) - 1
    shard = zero_spec(tuple(shape), compute, zero.axis, mesh, dims=cut) if zero.stage >= 1 else compute
    # By the global shape, and not by blocks, whose sizes differ between ranks.
    large = shape.numel() > zero.persist_elements
    param = shard if zero.stage == 3 and large else compute
    dtypes = dtype if isinstance(dtype, Dtypes) else Dtypes.plain(dtype)
    memories = _Memories(home or (zero.params if large else "device"), zero.grads, zero.optimizer)
    places = Places(compute, param, shard, batch_axes, dtypes, memories, quantization=quantization)
    zero_axes = tuple(a for a in shard.axes if a not in compute.axes)
    far = tuple(a for a in zero_axes if a not in zero.near) if zero.near and param != compute else ()

    def travel_quantization(how: str | None, on: bool) -> tuple[int, int] | None:
        return (
            (BITS[how], zero.travel.block_elements)
            if how is not None and on and dtypes.compute.is_floating_point
            else None
        )

    manner = Manner(
        far if far != zero_axes else (),
        travel_quantization(zero.travel.gather, param != compute and quantization is None),
        travel_quantization(zero.travel.reduce, large),
    )
    return _lay_out_leaf(path, shape, trainable, places, manner, mesh)


def stacked_layout(path: str, shape: torch.Size, dtype: torch.dtype | Dtypes, compute: P, **rule: Any) -> LeafLayout:
    """Applies the ZeRO rule to each layer of a stacked leaf [L, *shape of a layer]. See `leaf_layout`.

    If dim 0 is cut, a rank has some of the layers, and none of these is cut along that axis.
    """
    one = leaf_layout(path, shape[1:], dtype, P(*compute.entries[1:]), **rule)
    apart, mesh = compute.dim_axes(0), rule["mesh"]
    specs = {name: P(apart or None, *getattr(one.places, name).entries) for name in ("compute", "param", "shard")}
    places = one.places._replace(**specs, stacked=True)
    own = block_slices(tuple(shape[:1]), P(apart or None), mesh.shape, mesh.coords)[0]
    layers = tuple(dataclasses.replace(one, path=f"{path}[{i}]", apart=apart) for i in range(own.start, own.stop))
    return dataclasses.replace(_lay_out_leaf(path, shape, one.trainable, places, one.manner, mesh), layers=layers)


def _lay_out_leaf(
    path: str, shape: torch.Size, trainable: bool, places: Places, manner: Manner, mesh: Mesh
) -> LeafLayout:
    compute, shard = places.compute, places.shard
    dim = next((d for d in range(len(shape)) if shard.dim_axes(d) != compute.dim_axes(d)), None)
    zero_axes = tuple(a for a in shard.axes if a not in compute.axes)
    # This rank's block, and that of rank 0, which is the largest where a size does not divide.
    slices = block_slices(tuple(shape), compute, mesh.shape, mesh.coords)
    block = torch.Size(s.stop - s.start for s in slices)
    largest = block_slices(tuple(shape), compute, mesh.shape, {})
    numel = torch.Size(s.stop for s in largest).numel()
    bounds = () if dim is None else _find_bounds(block[dim], tuple((a, mesh.shape[a]) for a in zero_axes))
    pieces = Cuts(block, dim, bounds)
    return LeafLayout(path, shape, trainable, places, manner, tuple(mesh.shape.items()), pieces, numel)


@functools.lru_cache(maxsize=1024)
def _find_bounds(rows: int, axes: tuple[tuple[str, int], ...]) -> tuple[tuple[int, int], ...]:
    sizes = dict(axes)
    # By the rule that cuts global tensors: a rank's piece of a block is its block under the storage spec.
    cuts = [block_slices((rows,), P(tuple(sizes)), sizes, coords)[0] for coords in all_coords(sizes)]
    return tuple((c.start, c.stop) for c in cuts)


def with_ratio(leaves: Sequence[LeafLayout], ratio: float) -> list[LeafLayout]:
    """Returns the layout with the optimizer state of the first leaves kept on the device.

    The leaves on the device have at most the fraction 1 - `ratio` of all trainable elements.

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
            f"Zero(optimizer_fraction={ratio}) has no effect: every leaf is larger than the share that may stay on the"
            " device."
        )
    return [leaf.with_state_at("device") if leaf.path in stay else leaf for leaf in leaves]
