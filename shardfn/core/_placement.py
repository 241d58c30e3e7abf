"""`Placement`: where and how a leaf is.

One value holds how a leaf is cut over the mesh, over which axes it is a sum that is still to be taken, in which memory
and dtype it is kept, and whether it is rounded to codes. A training step keeps, uses and sends leaves at placements,
and a route leads from one placement to another (`shardfn.collectives.route`).

    parameter, ZeRO 3        A[I_dp, J]             P("dp")
    the same when used       A[I, J]                P()
    its gradient as it comes A[I, J]{U_dp}          P(), unreduced=("dp",)
    its gradient as kept     A[I_dp, J]             P("dp")
    of 2 nodes of 2, after
    a first hop, across them A[I_gpu of each I_node]  P(("node", "gpu")), brought=("node",)
"""

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import get_args

import torch

from ._memory_kind import MemoryKind
from ._mesh import Mesh, all_coords
from ._spec import Codes, P, block_slices

# A code that leaves travel in, (bits, elements that share a scale), or one that frozen leaves are kept in.
Code = tuple[int, int] | Codes
# A group of the codes of frozen leaves: its elements, which are neighbours along the last dim, and its bytes.
GROUP = 32
GROUP_BYTES: Mapping[Codes, int] = MappingProxyType({"int8": 34, "int4": 20})


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where and how a leaf is. A value: two leaves of one placement are held alike.

    Attributes:
        spec: how it is cut; along an axis that is neither here nor in `unreduced` all ranks hold the same.
        unreduced: the axes along which each rank holds a summand: the leaf is the sum.
        memory_kind: "device", "host" or "disk".
        dtype: of its elements; with a code, of the decoded elements.
        code: (bits, elements that share a scale) where it is rounded to codes to travel; "int8" or "int4" where a
            frozen leaf is kept so (`Sharding.codes`); None = not rounded.
        stacked: whether the leading dim stacks layers that are used, and cut, one by one. Where `spec` cuts it, each
            rank has some of the layers.
        brought: axes of `spec` along which every block is here, one after another: the result of the first hop of a
            gather in two. Each is its dim's own, and some axis of that dim is still to be gathered.

    Example:
        >>> kept = Placement(P("dp"))
        >>> used = Placement(P())
        >>> used.cotangent(("dp",)).unreduced
        ('dp',)

    References:
        Xu et al., GSPMD, 2021, https://arxiv.org/abs/2105.04663 (partial sums as a sharding)
    """

    spec: P = P()  # noqa: RUF009  # P is immutable
    unreduced: tuple[str, ...] = ()
    memory_kind: MemoryKind = "device"
    dtype: torch.dtype = torch.float32
    code: Code | None = None
    stacked: bool = False
    brought: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it lies in the device's memory, without a code: it needs no opening, and can be written over."""
        return self.memory_kind == "device" and self.code is None

    @property
    def is_stored(self) -> bool:
        """Whether it is `Stored`: no tensor of its elements, and replaced by an update, never written over."""
        return self.memory_kind == "disk" or self.code is not None

    def with_(self, **changes: object) -> "Placement":
        """This placement with other values of some fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def cotangent(self, varying: tuple[str, ...]) -> "Placement":
        """The placement of the gradient of a leaf that is held so and used differently along the axes `varying`.

        The gradient of a block is a block. A leaf that all ranks hold gets a summand from each rank that uses it
        differently. The gradient of a summand is whole on every rank, since the summand counts once in the sum.
        """
        held = (*self.spec.axes, *self.unreduced)
        return self.with_(unreduced=tuple(a for a in varying if a not in held))

    def block_shape(self, shape: tuple[int, ...], sizes: Mapping[str, int], coords: Mapping[str, int]) -> torch.Size:
        """The shape of the block of a leaf of global `shape` that the rank at `coords` holds."""
        if not self.brought:
            return torch.Size(s.stop - s.start for s in block_slices(shape, self.spec, sizes, coords))
        blocks = [
            block_slices(shape, self.spec, sizes, {**coords, **at})
            for at in all_coords({a: sizes[a] for a in self.brought})
        ]
        dim = next(d for d in range(len(self.spec)) if set(self.brought) & set(self.spec.dim_axes(d)))
        lengths = [s.stop - s.start for s in blocks[0]]
        lengths[dim] = sum(block[dim].stop - block[dim].start for block in blocks)
        return torch.Size(lengths)

    def nbytes(self, shape: tuple[int, ...], sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
        """The bytes of that block: of its elements, or of its codes and scales (4 bytes each where it travels)."""
        block = self.block_shape(shape, sizes, coords)
        count = block.numel()
        if self.code is None:
            return count * self.dtype.itemsize
        if isinstance(self.code, str):
            return block[:-1].numel() * -(-block[-1] // GROUP) * GROUP_BYTES[self.code]
        bits, per_scale = self.code
        return 4 * -(-count // per_scale) + -(-count * bits // 8)

    def problems(self, shape: tuple[int, ...], mesh: Mesh) -> Iterator[str]:
        """The reasons why a leaf of global `shape` cannot be placed so on `mesh`; empty where it can."""
        if len(self.spec) > len(shape):
            yield f"{self.spec!r} has {len(self.spec)} entries, but the leaf has {len(shape)} dims"
        foreign = [a for a in (*self.spec.axes, *self.unreduced) if not _has_axis(mesh, a)]
        if foreign:
            yield f"axes {foreign} are not in the mesh, which has {mesh.axis_names}"
        both = sorted(set(self.spec.axes) & set(self.unreduced) - set(self.brought))
        if both:
            yield f"along {both} it would be cut and unreduced at once; a value is one of the two"
        if self.memory_kind not in get_args(MemoryKind):
            yield f"memory_kind={self.memory_kind!r}; the memories are {get_args(MemoryKind)}"
        if self.code is not None and not _is_code(self.code):
            yield (
                f"code={self.code!r}; a code is (8 or 4 bits, an even number of elements that share a scale), or one of"
                f" {(*GROUP_BYTES,)}"
            )
        if isinstance(self.code, str) and not shape:
            yield f"code={self.code!r} of a leaf of no dims; groups of {GROUP} lie along the last dim: leave it out"
        if self.code is not None and not self.dtype.is_floating_point:
            yield f"{self.dtype} has no code; only floating-point elements are rounded"
        cut = [self.spec.dim_axes(d) for d in range(len(self.spec))]
        if self.brought and not any(set(self.brought) < set(axes) for axes in cut):
            yield f"brought={self.brought} are not some, and not all, of the axes that cut one dim"
        if self.stacked and not shape:
            yield "a leaf of no dims has no layers; leave out stacked=True"

    def __repr__(self) -> str:
        parts = [repr(self.spec)]
        parts += [f"unreduced={self.unreduced}"] if self.unreduced else []
        parts += [self.memory_kind] if self.memory_kind != "device" else []
        parts += [dtype_name(self.dtype)]
        parts += [f"code={self.code!r}"] if self.code is not None else []
        parts += ["stacked"] if self.stacked else []
        parts += [f"brought={self.brought}"] if self.brought else []
        return f"Placement({', '.join(parts)})"


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as people write it, and as files call it.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def _has_axis(mesh: Mesh, axis: str) -> bool:
    try:
        mesh.axes(axis)
    except ValueError:
        return False
    return True


def _is_code(code: Code) -> bool:
    if isinstance(code, str):
        return code in GROUP_BYTES
    return len(code) == 2 and code[0] in (4, 8) and code[1] >= 2 and code[1] % 2 == 0
