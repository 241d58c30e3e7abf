"""A leaf's placements, by name, and the routes between them. ZeRO's stages, memories, precision and codes set both.

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

import functools
from typing import NamedTuple

import torch

from shardfn.collectives import Route, route
from shardfn.core import Dtypes, MemoryKind, Mesh, P, Placement, Quantization

# Axis -> size, hashable, so that cached values do not keep a mesh alive.
Sizes = tuple[tuple[str, int], ...]


class Memories(NamedTuple):
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
    memories: Memories
    stacked: bool = False
    quantization: Quantization | None = None


class Ways(NamedTuple):
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
def ways(ndim: int, places: Places, manner: Manner, sizes: Sizes) -> Ways:
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
    return Ways(kept, summed, state, use, reduce, refresh)


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
