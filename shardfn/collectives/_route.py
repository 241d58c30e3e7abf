"""`route`: the way of a leaf from one placement to another, as a value.

A route is a sequence of hops. Each hop is a row of the closed table of collectives, or a local act of a rank:

    hop          placement before -> after              sends
    Cast         dtype                                  nothing
    Move         memory_kind                            nothing
    Slice        A[I]       -> A[I_x]                   nothing: each rank keeps its block of a whole that all hold
    Psum         A[I]{U_x}  -> A[I]                     2 M (n - 1) / n
    PsumScatter  A[I]{U_x}  -> A[I_x]                   M (n - 1) / n
    AllGather    A[I_x]     -> A[I]                     M (n - 1) / n
    AllToAll     A[I_x, J]  -> A[I, J_x]                m (n - 1) / n
    Quantize     elements   -> codes and scales         nothing
    Dequantize   codes      -> elements                 nothing

(M: bytes that n ranks hold together, m: bytes of a single rank's block.) A route gives, before the transfer runs, the
bytes on each axis and the bytes that a rank holds on the way. Executors carry out the hops.

The order is fixed: move to the device, decode, narrow, cut, sum, exchange, gather, widen, encode, move. So values that
need not be sent are dropped first, and a rank that needs a block of a sum receives only the block.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import torch

from shardfn.core import AnyQuantization, MemoryKind, Mesh, P, Placement, is_in_memory


@dataclasses.dataclass(frozen=True)
class Cast:
    """Hop on which elements change their dtype."""

    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Move:
    """Hop of the block to another memory."""

    memory_kind: MemoryKind


@dataclasses.dataclass(frozen=True)
class Quantize:
    """Hop on which elements become codes: of a message, (bits, elements that share a scale), or of a frozen leaf."""

    quantization: AnyQuantization


@dataclasses.dataclass(frozen=True)
class Dequantize:
    """Hop on which codes become elements."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """Each rank keeps its block, along `dim`, of a tensor that the ranks along `axes` all hold."""

    axes: tuple[str, ...]
    dim: int


@dataclasses.dataclass(frozen=True)
class Psum:
    """Summands along `axes` become their sum, on every rank."""

    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PsumScatter:
    """Summands along `axes` become blocks of their sum, cut along `dim`. Codes are decoded and then added."""

    axes: tuple[str, ...]
    dim: int


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Blocks along `axes`, cut along `dim`, become the whole on every rank."""

    axes: tuple[str, ...]
    dim: int


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Blocks along `axes` that were cut along `concat_dim` become blocks cut along `split_dim`."""

    axes: tuple[str, ...]
    split_dim: int
    concat_dim: int


Hop = Cast | Move | Quantize | Dequantize | Slice | Psum | PsumScatter | AllGather | AllToAll


@dataclasses.dataclass(frozen=True)
class Route:
    """Hops from one placement of a leaf to another.

    Attributes:
        shape: the leaf's global shape.
        stops: the placements of the leaf on the way: before the first hop, and after each hop, without axes of a single
            rank. The route starts at `stops[0]` and ends at `stops[-1]`.
        hops: `hops[k]` leads from `stops[k]` to `stops[k + 1]`.
    """

    shape: tuple[int, ...]
    stops: tuple[Placement, ...]
    hops: tuple[Hop, ...]

    @functools.cached_property
    def scatters(self) -> bool:
        """Returns whether summands become blocks of their sum on the route."""
        return any(isinstance(hop, PsumScatter) for hop in self.hops)

    @functools.cached_property
    def quantization(self) -> tuple[int, int] | None:
        """Returns (bits, elements that share a scale) of the code on the wire, or None for uncoded elements."""
        coded = [hop.quantization for hop in self.hops if isinstance(hop, Quantize)]
        # A code at the end is made on arrival.
        made = next(iter(coded[: len(coded) - (self.dst.quantization is not None)]), None)
        return None if isinstance(made, str) else made

    @property
    def src(self) -> Placement:
        """Returns the first placement."""
        return self.stops[0]

    @property
    def dst(self) -> Placement:
        """Returns the last placement."""
        return self.stops[-1]

    def sent(self, sizes: Mapping[str, int], coords: Mapping[str, int]) -> dict[tuple[str, ...], float]:
        """Returns axes -> the bytes that the rank at `coords` sends along the axes by ring algorithms."""
        out: dict[tuple[str, ...], float] = {}
        for hop, before, after in zip(self.hops, self.stops, self.stops[1:], strict=False):
            if isinstance(hop, Psum | PsumScatter | AllGather | AllToAll):
                held = before.nbytes(self.shape, sizes, coords), after.nbytes(self.shape, sizes, coords)
                out[hop.axes] = out.get(hop.axes, 0) + _bytes_sent(hop, *held, _count_ranks(hop.axes, sizes))
        return out

    def live(self, sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
        """Returns the most bytes of the leaf that the rank at `coords` holds at once: a hop's input and output."""
        held = [stop.nbytes(self.shape, sizes, coords) for stop in self.stops]
        return max((a + b for a, b in itertools.pairwise(held)), default=held[0])

    def __str__(self) -> str:
        lines = [f"{self.src!r}"]
        lines += [f"  {hop}  ->  {stop!r}" for hop, stop in zip(self.hops, self.stops[1:], strict=True)]
        return "\n".join(lines)


def route(
    shape: Sequence[int], src: Placement, dst: Placement, mesh: Mesh, *, via: Sequence[Placement] = (), path: str = ""
) -> Route:
    """Returns the route of a leaf from `src` to `dst`, through the waypoints `via`.

    Without waypoints the route is direct. Waypoints add facts that the two ends lack, such as the dtype or code on the
    wire, or a gather in two hops, across nodes and within a node.

    Args:
        shape: the leaf's global shape.
        src: present placement.
        dst: new placement. Summands cannot be made of a sum: `dst.unreduced` are axes of `src.unreduced`.
        mesh: the axes and their sizes. An axis that is missing or has a single rank has no hop.
        via: placements on the way, in order.
        path: the leaf's name, for errors.

    Raises:
        ValueError: a placement does not fit the leaf or the mesh, or no route leads to the next placement. The message
            names the leaf and both placements.

    Example:
        >>> mesh = Mesh({"dp": 4}, torch.device("cpu"), abstract=True)
        >>> gather = route((8, 3), Placement(P("dp")), Placement(P()), mesh)
        >>> gather.hops
        (AllGather(axes=('dp',), dim=0),)
        >>> gather.sent(mesh.shape, mesh.coords)
        {('dp',): 72}
        >>> used = gather.dst.cotangent(("dp",))
        >>> route((8, 3), used, Placement(P("dp")), mesh).hops
        (PsumScatter(axes=('dp',), dim=0),)
    """
    shape, name = tuple(shape), path or "a leaf"
    for stop in (src, *via, dst):
        problems = list(stop.problems(shape, mesh))
        if problems:
            raise ValueError(f"{name} of shape {shape} cannot be placed as {stop!r}: {'; '.join(problems)}.")
    stops = [_normalize_placement(stop, mesh) for stop in (src, *via, dst)]
    walk = _Trail(stops[0])
    for stop in stops[1:]:
        _check_pair(walk.now, stop, f"{name} of shape {shape}")
        walk.go_directly(stop)
    return Route(shape, tuple(walk.stops), tuple(walk.hops))


def _normalize_placement(placement: Placement, mesh: Mesh) -> Placement:
    """Returns the placement without axes of a single rank, with summands in the mesh's order."""
    spec = P(*(mesh.axes(placement.spec.dim_axes(d)) or None for d in range(len(placement.spec))))
    unreduced = tuple(a for a in mesh.axis_names if a in mesh.axes(placement.unreduced))
    here = placement.with_(spec=spec, unreduced=unreduced, brought=mesh.axes(placement.brought))
    for dim in range(len(spec)) if here.brought else ():
        if set(spec.dim_axes(dim)) == set(here.brought):  # the other axes have a single rank: this is the whole
            return here.with_(spec=_drop_axes(spec, dim, here.brought), brought=())
    return here


def _check_pair(src: Placement, dst: Placement, name: str) -> None:
    made = [a for a in dst.unreduced if a not in src.unreduced]
    why = ""
    if made:
        why = f"along {made} it would become a sum that is still to be taken, which no hop makes of a value"
    elif src.stacked != dst.stacked:
        why = "one stacks layers along dim 0 and the other does not; use one value for both"
    elif (
        src.quantization is not None and src.quantization == dst.quantization and not _only_gathers(src.spec, dst.spec)
    ):
        why = "codes can be gathered, not cut or exchanged; go through a placement without code"
    elif src.quantization is not None and not set(src.unreduced) <= {*dst.unreduced, *dst.spec.axes}:
        why = (
            "codes can be summed block by block alone; leave each rank a block, or go through a placement without code"
        )
    elif src.brought != dst.brought and not _may_bring(src, dst):
        why = "a hop of two begins with the blocks of one dim and ends with the whole of it, or the other way"
    if why:
        raise ValueError(f"no route leads {name} from {src!r} to {dst!r}: {why}.")


def _only_gathers(src: P, dst: P) -> bool:
    dims = range(max(len(src), len(dst)))
    return all(src.dim_axes(d)[: len(dst.dim_axes(d))] == dst.dim_axes(d) for d in dims)


def _may_bring(src: Placement, dst: Placement) -> bool:
    """Returns whether `brought` is halfway from a dim's blocks to the whole, or from summands to blocks."""
    if src.brought and dst.brought:
        return False
    brought = set(src.brought or dst.brought)
    sums = brought <= set(src.unreduced)
    if src.brought:
        return src.spec == dst.spec if sums else not brought & set(dst.spec.axes)
    return sums and brought <= set(dst.unreduced) if src.spec != dst.spec else not sums


class _Trail:
    """Route under construction: the stops and hops so far.

    Between calls `hops[k]` leads from `stops[k]` to `stops[k + 1]`.
    """

    def __init__(self, start: Placement) -> None:
        self.stops: list[Placement] = [start]
        self.hops: list[Hop] = []

    @property
    def now(self) -> Placement:
        return self.stops[-1]

    def step(self, hop: Hop, **changes: object) -> None:
        self.hops.append(hop)
        self.stops.append(self.now.with_(**changes))

    def move(self, kind: MemoryKind) -> None:
        if not is_in_memory(self.now.memory_kind, kind):
            self.step(Move(kind), memory_kind=kind)

    def go_directly(self, dst: Placement) -> None:
        """Adds the direct way to `dst`."""
        computes = self.now.with_(memory_kind="device") != dst.with_(memory_kind="device")
        if computes:
            self.move("device")
        sums = [a for a in self.now.unreduced if a not in dst.unreduced]
        if self.now.quantization is not None and self.now.quantization != dst.quantization and not sums:
            self.step(Dequantize(), quantization=None)
        # A sum is taken in the wider dtype. Other leaves travel in the narrower dtype.
        if self.now.dtype != dst.dtype and (dst.dtype.itemsize > self.now.dtype.itemsize) == bool(sums):
            self.step(Cast(dst.dtype), dtype=dst.dtype)
        self._change_cuts(dst)
        if self.now.dtype != dst.dtype:
            self.step(Cast(dst.dtype), dtype=dst.dtype)
        if dst.quantization is not None and self.now.quantization is None:
            self.step(Quantize(dst.quantization), quantization=dst.quantization)
        self.move(dst.memory_kind)

    def _change_cuts(self, dst: Placement) -> None:
        """Changes the spec, and the sums that are still to be taken, to `dst`."""
        if self.now.brought != dst.brought:
            self._add_half_hop(dst)
        self._add_cuts(dst)
        rest = tuple(a for a in self.now.unreduced if a not in dst.unreduced)
        if rest:
            self.step(Psum(rest), unreduced=dst.unreduced)
        while self.now.spec != dst.spec:
            if not self._exchange_dims(dst):
                dim = next(d for d in range(len(self.now.spec)) if _surplus_axes(self.now.spec, dst.spec, d))
                axes = _surplus_axes(self.now.spec, dst.spec, dim)
                self.step(AllGather(axes, dim), spec=_drop_axes(self.now.spec, dim, axes))
            self._add_cuts(dst)

    def _add_half_hop(self, dst: Placement) -> None:
        """Adds the first or second of two hops: a gather crosses `brought` first, a sum the other axes."""
        now, brought = self.now, self.now.brought or dst.brought
        spec = now.spec if now.brought else dst.spec
        dim = next(d for d in range(len(spec)) if set(brought) & set(spec.dim_axes(d)))
        others = tuple(a for a in spec.dim_axes(dim) if a not in brought)
        if set(brought) <= set(now.unreduced):
            axes = brought if now.brought else tuple(a for a in others if a in now.unreduced)
            self._sum_up(axes, dim, {"spec": spec, "brought": dst.brought})
        elif dst.brought:
            self.step(AllGather(brought, dim), brought=brought)
        else:
            rest = tuple(a for a in others if a not in dst.spec.dim_axes(dim))
            left = _drop_axes(spec, dim, tuple(a for a in spec.dim_axes(dim) if a in brought or a in rest))
            self.step(AllGather(rest, dim), spec=left, brought=())

    def _sum_up(self, axes: tuple[str, ...], dim: int, here: Mapping[str, object]) -> None:
        left = tuple(a for a in self.now.unreduced if a not in axes)
        self.step(PsumScatter(axes, dim), unreduced=left, quantization=None, **here)

    def _add_cuts(self, dst: Placement) -> None:
        """Cuts along axes that cut nothing yet, major axes first: a slice, or the block of a sum."""
        for dim in range(len(dst.spec)):
            while axes := self._find_free_axes(dst, dim):
                scatter = axes[0] in self.now.unreduced
                spec = self.now.spec.with_axes(dim, axes)
                if scatter:
                    self._sum_up(axes, dim, {"spec": spec})
                else:
                    self.step(Slice(axes, dim), spec=spec)

    def _find_free_axes(self, dst: Placement, dim: int) -> tuple[str, ...]:
        """Returns the next axes for cutting `dim` that cut nothing now, all with summands or none."""
        have, want = self.now.spec.dim_axes(dim), dst.spec.dim_axes(dim)
        if want[: len(have)] != have:
            return ()
        out: list[str] = []
        for axis in want[len(have) :]:
            alike = not out or (axis in self.now.unreduced) == (out[0] in self.now.unreduced)
            if axis in self.now.spec.axes or not alike:
                break
            out.append(axis)
        return tuple(out)

    def _exchange_dims(self, dst: Placement) -> bool:
        """Returns whether an all_to_all brings axes from their present dim to their new dim."""
        now = self.now.spec
        for concat_dim in range(len(now)):
            axes = _surplus_axes(now, dst.spec, concat_dim)
            for dim in range(len(dst.spec)):
                have, want = now.dim_axes(dim), dst.spec.dim_axes(dim)
                if axes and dim != concat_dim and want[: len(have) + len(axes)] == have + axes:
                    spec = _drop_axes(now, concat_dim, axes).with_axes(dim, axes)
                    self.step(AllToAll(axes, dim, concat_dim), spec=spec)
                    return True
        return False


def _surplus_axes(now: P, dst: P, dim: int) -> tuple[str, ...]:
    """Returns the minor axes that must no longer cut `dim`: all behind the common beginning of both specs."""
    have, want = now.dim_axes(dim), dst.dim_axes(dim)
    same = 0
    while same < min(len(have), len(want)) and have[same] == want[same]:
        same += 1
    return have[same:]


def _drop_axes(spec: P, dim: int, axes: tuple[str, ...]) -> P:
    """Returns the spec without the last `len(axes)` axes of `dim`."""
    entries = [spec.dim_axes(d) for d in range(len(spec))]
    entries[dim] = entries[dim][: len(entries[dim]) - len(axes)]
    return P(*(e or None for e in entries))


def _count_ranks(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[a] for a in axes)


def _bytes_sent(hop: Psum | PsumScatter | AllGather | AllToAll, before: int, after: int, n: int) -> float:
    """Returns the bytes that a rank sends in a ring of `n`, with blocks of `before` and then `after` bytes."""
    if isinstance(hop, Psum):
        return 2 * before * (n - 1) / n
    if isinstance(hop, PsumScatter):
        return before - after
    if isinstance(hop, AllGather):
        return before * (n - 1)
    return before * (n - 1) / n
