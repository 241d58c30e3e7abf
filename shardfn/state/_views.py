"""Slices and stacks of stored values: stored values, in their turn. Slices and stacks of tensors are tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.core import MemoryKind, Pending, Stored, StoredValue, as_stored
from shardfn.memory import QuantizedBlocks, on_host


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
    """Returns the parts of these shapes that lie in sequence in a value that is no tensor."""
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
