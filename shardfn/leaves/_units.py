"""Units: leaves that travel in a single message, when they are used, when gradients are summed and after the update."""

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence

import torch

from shardfn.collectives import Cuts, Packing
from shardfn.core import Mesh, Zero

from ._layout import LeafLayout

# Bytes in which gradients that are summed whole travel together.
WHOLE_BUCKET = 16 << 20


@dataclasses.dataclass(frozen=True)
class Unit:
    """Leaves that travel in a single message.

    Attributes:
        leaves: indices in the layout.
        nbytes: bytes of the whole leaves in the dtype in which they travel.
        packing: the places of their pieces in the message.
    """

    leaves: tuple[int, ...]
    nbytes: int
    packing: Packing = dataclasses.field(compare=False, repr=False)

    @staticmethod
    def of(leaves: Sequence[LeafLayout], members: Sequence[int], nbytes: int, pieces: "CutsOf") -> "Unit":
        """Returns a unit of these leaves. `pieces` gives the message of each."""
        return Unit(tuple(members), nbytes, Packing([pieces(leaves[i]) for i in members]))


# From a leaf to the cuts of its message.
CutsOf = Callable[[LeafLayout], Cuts]


def make_units(
    leaves: Sequence[LeafLayout],
    members: Sequence[int],
    bucket: int,
    key: Callable[[LeafLayout], tuple[torch.dtype, object]],
    span: float,
    pieces: CutsOf,
) -> list[Unit]:
    """Groups neighbouring leaves of one `key` into units of up to `bucket` bytes. A larger leaf has a unit for itself.

    Args:
        leaves: layouts of all leaves.
        members: indices of the leaves to group, in order.
        bucket: largest size of a unit of several leaves, in bytes.
        key: the dtype in which a leaf travels, and a value that must be equal for leaves to share a unit.
        span: the bytes of other leaves that may lie between the first and the last leaf of a unit.
        pieces: function from a leaf to the cuts of its message.
    """
    units: list[Unit] = []
    open_units: dict[object, tuple[list[int], int, int]] = {}
    passed = 0
    for i in members:
        k = key(leaves[i])
        nbytes = leaves[i].numel * k[0].itemsize
        passed += nbytes
        if nbytes >= bucket:
            units.append(Unit.of(leaves, (i,), nbytes, pieces))
            continue
        group, size, start = open_units.pop(k, ([], 0, passed))
        if group and (size + nbytes > bucket or passed - start > span):
            units.append(Unit.of(leaves, group, size, pieces))
            group, size, start = [], 0, passed
        open_units[k] = ([*group, i], size + nbytes, start)
    units += [Unit.of(leaves, group, size, pieces) for group, size, _ in open_units.values()]
    return sorted(units, key=lambda u: u.leaves[0])


def gather_units(leaves: Sequence[LeafLayout], bucket: int) -> list[Unit]:
    """Returns the units in which lazy leaves are brought on use: near neighbours only, so that a window stays small.

    Leaves that are not sent, or sent in a code, travel alone: in a shared block, leaves of unlike magnitude would share
    a scale.
    """

    def alone(leaf: LeafLayout) -> bool:
        return leaf.used.dim is None or leaf.ways.use.quantization is not None or leaf.places.quantization is not None

    pieces = operator.attrgetter("sent")
    lazy = [i for i, leaf in enumerate(leaves) if leaf.lazy]
    shared = [i for i in lazy if not alone(leaves[i])]
    units = make_units(leaves, shared, bucket, lambda leaf: (leaf.dtypes.compute, leaf.zero_axes), 4 * bucket, pieces)
    nbytes = [leaf.numel * leaf.dtypes.compute.itemsize for leaf in leaves]
    units += [Unit.of(leaves, (i,), nbytes[i], pieces) for i in lazy if alone(leaves[i])]
    # Units depend on the layout alone, so all ranks have the same units with the same numbers.
    return sorted(units, key=lambda u: u.leaves[0])


def refresh_units(leaves: Sequence[LeafLayout], zero: Zero) -> list[Unit]:
    """Returns the units in which resident leaves are gathered after their shards were updated."""
    members = [i for i, leaf in enumerate(leaves) if leaf.refreshed and leaf.trainable]
    key = lambda leaf: (leaf.dtypes.param, (leaf.zero_axes, leaf.home, leaf.ways.kept.is_plain))  # noqa: E731
    return make_units(leaves, members, zero.travel.bucket_bytes, key, math.inf, operator.attrgetter("pieces"))


def reduce_units(leaves: Sequence[LeafLayout], zero: Zero, mesh: Mesh) -> list[Unit]:
    """Returns the units in which gradients are reduced: the same at stages 1, 2 and 3, so that their bits are the same.

    Leaves that are not sent, or sent in a code, are not packed: blocks of a code must not span leaves.
    """

    def alone(leaf: LeafLayout) -> bool:
        return mesh.axis_size(leaf.reduce_axes + leaf.extra_axes) == 1 or leaf.ways.reduce.quantization is not None

    trainable = [i for i, leaf in enumerate(leaves) if leaf.trainable]
    nbytes = [leaf.numel * leaf.dtypes.reduce.itemsize for leaf in leaves]
    units = [Unit.of(leaves, (i,), nbytes[i], _choose_message) for i in trainable if alone(leaves[i])]
    shared = [i for i in trainable if not alone(leaves[i])]
    cut, whole = ([i for i in shared if leaves[i].ways.reduce.scatters == on] for on in (True, False))
    units += make_units(leaves, cut, zero.travel.bucket_bytes, _reduce_key, math.inf, _choose_message)
    # Whole gradients are packed in any case, so that they can be summed in place: in messages of an efficient size.
    size = max(zero.travel.bucket_bytes, WHOLE_BUCKET) if zero.travel.bucket_bytes else 0
    return units + make_units(leaves, whole, size, _reduce_key, math.inf, _choose_message)


def _reduce_key(leaf: LeafLayout) -> tuple[torch.dtype, object]:
    way = leaf.ways.reduce
    where = leaf.distinct_axes, leaf.reduce_axes, leaf.extra_axes, leaf.ways.summed.memory_kind
    return leaf.dtypes.reduce, (leaf.dtypes.accum, way.scatters, way.quantization, *where)


def _choose_message(leaf: LeafLayout) -> Cuts:
    """Returns the message of its gradient: each rank's rows, or the whole."""
    return leaf.pieces if leaf.ways.reduce.scatters else Cuts(leaf.block)
