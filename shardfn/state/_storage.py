"""The operations on a `StoredValue`, which convert a block between the forms and memories in which it is kept.

kept       value                      load, prefetch                           store
device     a tensor                   the tensor itself                        the tensor itself
host       a tensor of the host       a copy to the device                     a copy to the host
disk       `Stored`, in a pool        a read, and a copy to the device         rows written to a new value
codes      `QuantizedBlocks`, there or on host  decoded on the device, when it is used   not: such a leaf is frozen

A tensor may be written over where it lies. A value on disk never is: its successor is a new value, so that the old
value exists until the new value is whole. `Successor` writes either of the two. In a graph a value is one tensor, and
the last four functions are the way in and out.

Slices and stacks of stored values are stored values in turn. Slices and stacks of tensors are tensors.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.capture import fakes
from shardfn.collectives import GlobalTensor
from shardfn.core import (
    MemoryKind,
    Pending,
    Placement,
    Stored,
    StoredValue,
    as_stored,
    is_device,
    is_disk,
    kind_when_loaded,
    load,
    read_rows,
)
from shardfn.memory import (
    AnyPool,
    DiskTensor,
    Fetch,
    QuantizedBlocks,
    TracedStored,
    host_empty,
    on_host,
    send,
    stored_of,
    to_host,
    token_of,
)


def store(x: Tensor, at: Placement, pool: AnyPool | None) -> StoredValue:
    """Returns a block of the device in the form of a placement; `x` itself where that is the device."""
    value = encode(x, at)
    if isinstance(value, QuantizedBlocks):
        return with_codes(value, store(value.blocks, at.with_(quantization=None), pool), at.memory_kind)
    if is_disk(at.memory_kind):
        assert pool is not None
        return _write_value(x, pool)
    return send(x, "device", at.memory_kind, x.device).result()


def encode(x: Tensor, at: Placement) -> StoredValue:
    """Returns a block in the codes of a placement; `x` itself without codes. It is not moved.

    Args:
        x: block in the memory of the placement, or without data.
        at: the placement.
    """
    if not isinstance(at.quantization, str):
        return x
    coded = QuantizedBlocks.of(x, at.quantization)
    return coded.with_blocks(coded.blocks, at.memory_kind)


def codes_of(value: StoredValue) -> StoredValue:
    """Returns the codes of a value in codes, which has no other contents; of other values, the value itself."""
    return value.blocks if isinstance(value, QuantizedBlocks) else value


def with_codes(value: StoredValue, codes: StoredValue, kind: MemoryKind) -> StoredValue:
    """Returns a value in codes like another value, with these codes in a memory: the inverse of `codes_of`."""
    assert isinstance(value, QuantizedBlocks) and isinstance(codes, Tensor)
    return value.with_blocks(codes, kind)


def apart(value: StoredValue, at: Placement, pool: AnyPool | None) -> StoredValue:
    """Returns a value with a place of its own: slices and stacks of other values are written again."""
    if not isinstance(value, StoredSlice | StoredStack):
        return value
    with on_host():
        return store(load(value), at, pool)


def start_move(
    value: StoredValue, src: MemoryKind, dst: MemoryKind, device: torch.device, pool: AnyPool | None
) -> Pending[StoredValue]:
    """Starts to move a value from a memory to another. A value that is there already is the result itself.

    Args:
        value: value in `src`.
        src: memory of the value.
        dst: memory of the result.
        device: device of the result, if `dst` is "device".
        pool: pool of the result, if `dst` is "disk".
    """
    if src == dst:
        return Pending.of(value)
    x, src = load(value), kind_when_loaded(src)
    if not is_disk(dst):
        return send(x, src, dst, device)
    assert pool is not None
    # The disk is written from the host: the copy must be there first.
    return pool.write(send(x, src, "host", device).result())


def lies_on_disk(x: Any) -> bool:
    """Returns whether a leaf of a tree is a `GlobalTensor` that is kept on disk."""
    return isinstance(x, GlobalTensor) and is_disk(x.memory_kind)


def lies_on_device(x: GlobalTensor) -> bool:
    """Returns whether a leaf is kept in the device's memory."""
    return is_device(x.memory_kind)


def common_kind(kinds: Iterable[MemoryKind]) -> MemoryKind:
    """Returns the memory where an update steps values of these memories: the device, if all are there, or the host."""
    return "device" if all(map(is_device, kinds)) else "host"


def load_at(value: StoredValue, kind: MemoryKind) -> Tensor:
    """Returns the elements of a value, in the memory `kind_when_loaded(kind)`."""
    with in_memory(kind):
        return load(value)


def in_memory(kind: MemoryKind) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which a ledger counts new tensors of the CPU in the memory where values of `kind` are."""
    return contextlib.nullcontext() if is_device(kind) else on_host()


def empty_block(
    shape: Sequence[int] | torch.Size, dtype: torch.dtype, kind: MemoryKind, device: torch.device
) -> Tensor:
    """Returns memory for a block that is kept in a memory, of any content; for a block on disk, memory of the host."""
    if is_device(kind):
        return torch.empty(shape, dtype=dtype, device=device)
    return host_empty(torch.Size(shape), dtype)


def zero_block(
    shape: Sequence[int] | torch.Size, dtype: torch.dtype, kind: MemoryKind, device: torch.device, pool: AnyPool | None
) -> StoredValue:
    """Returns a block of zeros that is kept in a memory."""
    block = empty_block(shape, dtype, kind, device)
    block.view(-1).view(torch.uint8).zero_()  # not all dtypes of codes can be filled
    return start_move(block, kind_when_loaded(kind), kind, device, pool).result()


def prefetch(value: StoredValue, kind: MemoryKind, device: torch.device) -> Tensor | Fetch:
    """Returns the elements of a value on the device, or on their way there; a tensor of the device, itself.

    The codes of a value in codes are fetched, and not decoded.
    """
    value = codes_of(value)
    if isinstance(value, Tensor):
        return value if is_device(kind) else Fetch(value, device)
    return Fetch(read_rows(value), device)


def is_read(value: StoredValue) -> bool:
    """Returns whether the first half of a fetch is a read, as from disk."""
    return not isinstance(codes_of(value), Tensor)


def fetch(value: StoredValue, kind: MemoryKind, device: torch.device) -> Tensor:
    """Returns the elements of a value on the device, and waits for them. See `prefetch`."""
    found = prefetch(value, kind, device)
    return found if isinstance(found, Tensor) else found.result()


def copy_value(value: StoredValue, kind: MemoryKind) -> StoredValue:
    """Returns a value of the same elements, for an update to consume; of a value that is not a tensor, itself."""
    if not isinstance(value, Tensor):
        return value
    with in_memory(kind):
        return value.clone()


def change(value: StoredValue, at: Placement, pool: AnyPool | None, f: Callable[[Tensor], Tensor]) -> StoredValue:
    """Returns `f(value)`, in the memory of the value, which is consumed.

    Args:
        value: value of the placement `at`.
        at: placement of the value.
        pool: pool of the result, if `value` is on disk.
        f: function that may write to its argument.
    """
    if isinstance(value, Tensor):
        return f(value)
    with on_host():
        return store(f(load(value)), at, pool)


class Successor:
    """The writer of the new value of a leaf, row by row: of the same shape, dtype and place as the value before.

    A tensor is overwritten where it lies; with `beside=True` the new value is a host tensor of its own. A value on disk
    is not touched, and the new value is another value. All rows are written once, and the rows of one `write` must not
    change until it is done. Then comes `finish`.

    Args:
        value: value before.
        kind: memory of the value.
        pool: pool of a value on disk.
        beside: whether a tensor is not overwritten.
    """

    def __init__(self, value: StoredValue, kind: MemoryKind, pool: AnyPool | None, *, beside: bool = False) -> None:
        self._shape, self._dtype, self._pool, self._made = value.shape, value.dtype, pool, None
        self._kind: MemoryKind = "host" if beside else kind
        # The tensor whose memory the new value has, or None for a value on disk.
        self._into = host_empty(value.shape, value.dtype) if beside else value if isinstance(value, Tensor) else None

    @property
    def _open_writer(self) -> Any:
        """Returns the writer of a value on disk, made when it is first needed.

        A value that is only read gets no successor.
        """
        if self._made is None:
            assert self._pool is not None
            self._made = self._pool.writer(self._shape, self._dtype)
        return self._made

    def rows(self, lo: int, hi: int | None, place: MemoryKind) -> Tensor | None:
        """Returns the memory of rows `lo:hi` of the new value, if they can be made there from `place`, else None."""
        if self._into is None or self._kind != place:
            return None
        return self._into if hi is None else self._into[lo:hi]

    def write(self, lo: int, rows: Tensor, place: MemoryKind) -> Pending[Any] | None:
        """Starts to write rows from `lo` on, which lie in the memory `place`.

        None where they are the new value's.
        """
        if self._into is None:
            return self._open_writer.write(lo, send(rows, place, "host", rows.device).result())
        if self._kind == place:  # made where they are kept; see `rows`
            return None
        into = self._into if rows.shape == self._shape else self._into[lo : lo + len(rows)]
        return send(rows, place, self._kind, into.device, into)

    def finish(self) -> StoredValue:
        """Returns the new value, when all rows are there."""
        return self._open_writer.finish() if self._into is None else self._into


def bring_rows(
    value: StoredValue,
    rows: tuple[int, int | None],
    ends: tuple[MemoryKind, MemoryKind],
    device: torch.device,
    out: Tensor | None,
) -> Tensor | Pending[Tensor]:
    """Returns rows `lo:hi` of a value in another memory, or on their way there.

    Args:
        value: value.
        rows: `lo` and `hi`; with `hi=None` the whole value.
        ends: memory of the value, and the memory where its rows are wanted.
        device: device of the rows, if they are wanted on the device.
        out: host tensor to fill, if they are wanted on the host, or None for a fresh one.
    """
    (lo, hi), (kind, place) = rows, ends
    if not isinstance(value, Tensor):
        return Fetch(read_rows(value, lo, hi), device) if is_device(place) else read_rows(value, lo, hi, out)
    return send(value if hi is None else value[lo:hi], kind, place, device, out)


def replace(value: StoredValue, kind: MemoryKind, new: StoredValue) -> StoredValue:
    """Returns the value that takes the place of `value`: a tensor with the elements of `new`, or `new` itself."""
    if not isinstance(value, Tensor):
        return new
    return send(load(new), "host", kind, value.device, value).result()


def succeed(value: StoredValue, kind: MemoryKind, x: Tensor) -> StoredValue:
    """Returns a tensor of the device in the place of `value`: on the device itself, in host memory written over."""
    if isinstance(value, Tensor):
        return x if is_device(kind) or x.data_ptr() == value.data_ptr() else to_host(x, value).result()
    assert isinstance(value, DiskTensor)  # arguments of other kinds are refused
    return _write_value(x, value.pool)


def _write_value(x: Tensor, pool: AnyPool) -> StoredValue:
    return pool.write(x if x.device.type == "cpu" else to_host(x).result()).result()


class Likeness(NamedTuple):
    """A block as a graph knows it: its shape and its placement. It holds no memory."""

    shape: torch.Size
    at: Placement

    @staticmethod
    def of(x: GlobalTensor) -> "Likeness":
        """Returns the likeness of a leaf's block."""
        return Likeness(torch.Size(x.held.shape), x.placement)


def graph_inputs(leaves: Sequence[GlobalTensor], device: torch.device) -> list[Tensor]:
    """Returns the inputs of a graph for these blocks, without data: a token for a block on disk."""
    out: list[Tensor] = []
    for x in leaves:
        if lies_on_disk(x):
            out.append(torch.empty(1, dtype=torch.int64))
        else:
            out += fakes([as_graph_value(x.held)], device if lies_on_device(x) else "cpu")
    return out


def entered(x: Tensor, like: Likeness) -> StoredValue:
    """Returns an input of a graph that is being captured, as a block."""
    return _as_block(x, like, lambda: TracedStored(x, like.shape, like.at.dtype))


def as_graph_value(value: StoredValue) -> Tensor:
    """Returns the tensor of a block in a graph: at its entrance when it runs, at its exit when it is captured."""
    value = codes_of(value)
    if isinstance(value, Tensor):
        return value
    return value.token if isinstance(value, TracedStored) else token_of(value)


def returned(x: Tensor, like: Likeness) -> StoredValue:
    """Returns a result of a graph as a block with the shape and placement of the previous block."""
    return _as_block(x, like, lambda: stored_of(x))


def _as_block(x: Tensor, like: Likeness, named: Callable[[], StoredValue]) -> StoredValue:
    """Returns the block of a tensor of a graph: itself, the block of these codes, or the block on disk."""
    quantization, kind = like.at.quantization, like.at.memory_kind
    if is_disk(kind):
        return named()
    return QuantizedBlocks(x, like.shape, like.at.dtype, quantization, kind) if isinstance(quantization, str) else x


def layers_of(value: StoredValue) -> Sequence[StoredValue]:
    """Returns the layers of a stack [L, *shape of a layer]; of a tensor, views."""
    if isinstance(value, Tensor):
        return value.unbind(0)
    if isinstance(value, QuantizedBlocks):
        return value.layers()
    shape = torch.Size(value.shape[1:])
    if not shape.numel():
        # Reads of several layers stay different values in a graph, as other ranks read elements there.
        return [StoredSlice(_read_stored(value), i, shape) for i in range(value.shape[0])]
    return slices_of(value, [shape] * value.shape[0])


def slices_of(value: StoredValue, shapes: Sequence[torch.Size]) -> Sequence[StoredValue]:
    """Returns the parts of these shapes that lie in sequence in a value that is not a tensor."""
    flat, sizes = _read_stored(value).flat(), [shape.numel() for shape in shapes]
    return [StoredSlice(flat, sum(sizes[:k]), shape) for k, shape in enumerate(shapes)]


def stack_values(parts: Sequence[StoredValue]) -> StoredValue:
    """Returns the stack of some parts of a single memory; the tensor whose rows they are, if there is such a tensor."""
    here = [x for x in parts if isinstance(x, Tensor)]
    if len(here) == len(parts):
        whole = _stack_of(here)
        return torch.stack(here) if whole is None else whole
    return StoredStack([_read_stored(x) for x in parts])


def _read_stored(value: StoredValue) -> Stored:
    out = as_stored(value)
    assert out is not None
    return out


def _stack_of(rows: Sequence[Tensor]) -> Tensor | None:
    """Returns the tensor whose rows these are, in their order, if the tensor has no other rows."""
    whole = rows[0]._base
    if whole is None or whole.shape != (len(rows), *rows[0].shape) or not whole.is_contiguous():
        return None
    starts = range(whole.storage_offset(), whole.storage_offset() + whole.numel(), max(1, rows[0].numel()))
    alike = (x._base is whole and x.dtype == whole.dtype and x.is_contiguous() for x in rows)
    return whole if all(alike) and [x.storage_offset() for x in rows] == [*starts] else None


class StoredSlice:
    """A part of a flat stored value, with a shape of its own: `Stored`, in its turn.

    Args:
        base: 1-D.
        start: the first element.
        shape: the shape of the part.
    """

    quantization: tuple[int, int] | None = None

    def __init__(self, base: Stored, start: int, shape: torch.Size) -> None:
        self._base, self._start, self.shape = base, start, shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self._base.dtype

    @property
    def kind(self) -> MemoryKind:
        """Returns the memory kind of the base."""
        return self._base.kind

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def flat(self) -> "StoredSlice":
        """The same part as a single dim."""
        return StoredSlice(self._base, self._start, torch.Size([self.shape.numel()]))

    def load(self) -> Tensor:
        """Returns the whole of it."""
        return self.read().result()

    def read(self, lo: int = 0, hi: int | None = None, out: Tensor | None = None) -> Pending[Tensor]:
        """Rows `lo:hi` of dim 0; of a 0-d tensor, all there is."""
        row = self.shape[1:].numel()
        hi = (self.shape[0] if self.shape else 1) if hi is None else hi
        shape = torch.Size((hi - lo, *self.shape[1:])) if self.shape else self.shape
        flat = None if out is None else out.view(-1)
        return self._base.read(self._start + lo * row, self._start + hi * row, flat).then(lambda x: x.view(shape))


class StoredStack:
    """Stored parts of the same shape, as one with a leading dim.

    Args:
        parts: one or more.
    """

    quantization: tuple[int, int] | None = None

    def __init__(self, parts: Sequence[Stored]) -> None:
        self._parts = parts
        self.shape = torch.Size((len(parts), *parts[0].shape))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self._parts[0].dtype

    @property
    def kind(self) -> MemoryKind:
        """Returns the memory kind of the parts."""
        return self._parts[0].kind

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return sum(x.nbytes for x in self._parts)

    def flat(self) -> Any:
        """Not stored in a single piece."""
        raise NotImplementedError

    def load(self) -> Tensor:
        """Returns the whole of it."""
        return self.read().result()

    def read(self, lo: int = 0, hi: int | None = None, out: Tensor | None = None) -> Pending[Tensor]:
        """Returns the parts `lo` to `hi - 1`."""
        parts = self._parts[lo : len(self._parts) if hi is None else hi]
        rows: Sequence[Tensor | None] = [None] * len(parts) if out is None else out.unbind(0)
        coming = [x.read(out=row) for x, row in zip(parts, rows, strict=True)]

        def result() -> Tensor:
            here = [x.result() for x in coming]
            with on_host():
                return torch.stack(here) if out is None else out

        return Pending(result, lambda: all(x.done() for x in coming))
