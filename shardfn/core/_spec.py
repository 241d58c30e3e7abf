"""`P` and `Sharding`: where each dim of a leaf lives on the mesh.

`P("dp", None, ("tp", "sp"))` has one entry a tensor dim: `None` (whole), an axis name, or a tuple of names from major
to minor. Trailing `None`s may be left out. Blocks are cut as `torch.chunk` cuts them: ceil(size / n) rows each, the
last blocks short or empty, so any size will do, for example 7 rows on 3 ranks as 3, 3, 1.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from ._keywords import explains_fields

MemoryKind = Literal["device", "host", "disk"]
# The kinds of memory in which a value is a tensor.
TENSOR_KINDS: frozenset[MemoryKind] = frozenset({"device", "host"})

# Code outside of this room compares no memory kinds: it calls these, or the operations of `StoredValue`. They also take
# text that may be no memory kind, as arguments of users are before they are checked.


def is_device(kind: str) -> bool:
    """Returns whether a value of this memory kind lies in the device's memory.

    Example:
        >>> is_device("device"), is_device("host")
        (True, False)
    """
    return kind == "device"


def is_disk(kind: str) -> bool:
    """Returns whether a value of this memory kind is on disk, where a value is not a tensor and never overwritten."""
    return kind == "disk"


def is_in_memory(kind: str, *memories: str) -> bool:
    """Returns whether a value of this memory kind lies in one of some memories.

    Example:
        >>> is_in_memory("host", "host", "disk"), is_in_memory("host", "device")
        (True, False)
    """
    return kind in memories


def kind_when_loaded(kind: MemoryKind) -> MemoryKind:
    """Returns the memory in which the elements of a value are found: of a value on disk, the host.

    Example:
        >>> kind_when_loaded("device"), kind_when_loaded("disk")
        ('device', 'host')
    """
    return "host" if kind == "disk" else kind


def find_directory_problem(kinds: Iterable[str], directory: object) -> Literal["missing", "idle"] | None:
    """Returns "missing" if values on disk have no directory, "idle" if a directory has no values on disk, else None.

    Args:
        kinds: memory kinds of the values.
        directory: the directory or pool, or None.

    Example:
        >>> find_directory_problem(["host", "disk"], None), find_directory_problem(["host"], "/fast")
        ('missing', 'idle')
    """
    needed = "disk" in kinds
    return None if needed == (directory is not None) else "missing" if needed else "idle"


Entry = None | str | tuple[str, ...]
# Quantization of frozen weights, in groups of 32 elements of the last dim: 34 and 20 bytes a group.
Quantization = Literal["int8", "int4"]


class P:
    """PartitionSpec: an entry per tensor dim. Immutable and hashable. `P()` replicates.

    Raises:
        TypeError: an entry is neither `None`, a name, nor a tuple of names.
        ValueError: an axis name occurs twice.

    Example:
        >>> P("dp", None) == P("dp")
        True
        >>> P(("dp", "tp")).axes
        ('dp', 'tp')
    """

    __slots__ = ("entries",)
    entries: tuple[Entry, ...]

    def __init__(self, *entries: Any) -> None:
        clean = [_normalize_entry(e) for e in entries]
        while clean and clean[-1] is None:
            clean.pop()
        names = [n for e in clean for n in _entry_names(e)]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ValueError(f"P{entries!r} uses axis {twice[0]!r} twice. An axis can shard only one dim.")
        object.__setattr__(self, "entries", tuple(clean))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("P is immutable. Build a new one.")

    @property
    def axes(self) -> tuple[str, ...]:
        """Returns every axis name in the spec, in order of dims."""
        return tuple(n for e in self.entries for n in _entry_names(e))

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """Returns the axes that shard tensor dim `dim`, major to minor."""
        return _entry_names(self.entries[dim]) if dim < len(self.entries) else ()

    def with_axes(self, dim: int, axes: tuple[str, ...]) -> "P":
        """Returns this spec with `axes` added as the minor-most axes of `dim`."""
        entries = list(self.entries) + [None] * (dim + 1 - len(self.entries))
        both = _entry_names(entries[dim]) + axes
        entries[dim] = both[0] if len(both) == 1 else both
        return P(*entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(("P", self.entries))

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self.entries))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return P, self.entries


@explains_fields(codes="quantization={value!r}")
@dataclasses.dataclass(frozen=True)
class Sharding:
    """Layout and memory of one leaf: JAX's `NamedSharding` without the mesh.

    Attributes:
        spec: the layout.
        memory_kind: the memory in which the leaf is stored: "device", "host" or "disk".
        stacked: whether the leading dim stacks equal layers, [L, *shape of a layer], that are used in sequence. ZeRO
            then cuts each layer, and gathers each layer for use. See `shardfn.scan`. An axis that cuts the leading dim
            itself gives each rank some of the layers, as in the stages of a pipeline.
        quantization: "int8" or "int4" for a leaf that is not trained and stored quantized, see
            `kernels.quantize_blocks`. Each use dequantizes the leaf. None keeps the elements.

    Example:
        >>> Sharding(P("dp")).memory_kind
        'device'
        >>> Sharding(P(None, "tp"), stacked=True).stacked, Sharding(P("pp", "tp"), stacked=True).spec
        (True, P('pp', 'tp'))
        >>> Sharding(quantization="int4").quantization
        'int4'
    """

    spec: P = P()  # noqa: RUF009  # P is immutable
    memory_kind: MemoryKind = "device"
    stacked: bool = False
    quantization: Quantization | None = None


def chunk_bounds(size: int, n: int, index: int) -> tuple[int, int]:
    """Returns start and stop of block `index` when `size` rows are cut in `n`, as by `torch.chunk`.

    Example:
        >>> [chunk_bounds(7, 4, i) for i in range(4)]
        [(0, 2), (2, 4), (4, 6), (6, 7)]
        >>> [chunk_bounds(2, 4, i) for i in range(4)]
        [(0, 1), (1, 2), (2, 2), (2, 2)]
    """
    step = -(-size // n)
    return min(size, index * step), min(size, (index + 1) * step)


def block_slices(
    shape: tuple[int, ...], spec: P, sizes: Mapping[str, int], coords: Mapping[str, int]
) -> tuple[slice, ...]:
    """Returns the block of a leaf of global `shape` that the rank at `coords` holds, as slices.

    Args:
        shape: global shape.
        spec: layout.
        sizes: axis sizes. A missing axis has size 1.
        coords: the rank's index on each axis.

    Example:
        >>> block_slices((7, 4), P("dp"), {"dp": 2}, {"dp": 1})
        (slice(4, 7, None), slice(0, 4, None))
    """
    out = []
    for dim, size in enumerate(shape):
        start, stop = 0, size
        for axis in spec.dim_axes(dim):
            lo, hi = chunk_bounds(stop - start, sizes.get(axis, 1), coords.get(axis, 0))
            start, stop = start + lo, start + hi
        out.append(slice(start, stop))
    return tuple(out)


def _normalize_entry(e: Any) -> Entry:
    if e is None or isinstance(e, str):
        return e
    if isinstance(e, tuple | list) and all(isinstance(n, str) for n in e):
        return None if not e else e[0] if len(e) == 1 else tuple(e)
    raise TypeError(
        f"P entry {e!r} is of type {type(e).__name__}: neither None, an axis name, nor a tuple of axis names. A P has"
        " an entry for each dim of the tensor, the mesh axis that cuts it: P(None, 'tp') cuts dim 1 along 'tp'."
    )


def _entry_names(e: Entry) -> tuple[str, ...]:
    return () if e is None else (e,) if isinstance(e, str) else e
