"""`StoredValue`: a block wherever and however it is kept. `Stored`: the interface of a block that is no tensor.

The types are defined here so that rooms which carry such values need not import the rooms that keep them. The
operations on them that move a value (`store`, `prefetch`, successors, inputs and outputs of graphs) are in
`shardfn.state`.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

import torch
from torch import Tensor

from ._pending import Pending
from ._placement import AnyQuantization
from ._spec import MemoryKind


@runtime_checkable
class StoredValue(Protocol):
    """A block of a leaf, wherever it is kept: on the device, the host or disk; in codes; a slice or a stack of these.

    A tensor is one by its attributes. On the device it is the identity element: `store`, `load` and `prefetch` return
    it unchanged, and in a graph it stands for itself. So code for any value has no cost for a plain tensor.

    Attributes:
        shape: shape of the value.
        dtype: dtype of its elements; in codes, of the decoded elements.
        nbytes: number of bytes in its place.

    Example:
        >>> x: StoredValue = torch.zeros(2)
        >>> load(x) is x
        True
    """

    @property
    def shape(self) -> torch.Size:
        """Shape of the value."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its elements."""
        ...

    @property
    def nbytes(self) -> int:
        """Number of bytes in its place."""
        ...


@runtime_checkable
class Stored(StoredValue, Protocol):
    """A `StoredValue` that is no tensor of its elements, for instance a value on disk. Immutable.

    Attributes:
        kind: memory kind of the place.
        quantization: code that the elements are rounded to, see `Placement.quantization`. None: they are not rounded.

    Example:
        >>> isinstance(torch.zeros(2), Stored)
        False
    """

    @property
    def kind(self) -> MemoryKind:
        """Returns the memory kind of the place."""
        ...

    @property
    def quantization(self) -> AnyQuantization | None:
        """Returns the quantization of the elements, or None if they are not rounded."""
        ...

    def flat(self) -> "Stored":
        """Returns the same value as one dim."""
        ...

    def load(self) -> Tensor:
        """The whole value as a fresh host tensor; waits for it."""
        ...

    def read(self, lo: int = 0, hi: int | None = None, out: Tensor | None = None) -> Pending[Tensor]:
        """Rows `lo:hi` of dim 0, asynchronously, in `out` or in a fresh host tensor."""
        ...


def as_stored(value: StoredValue) -> Stored | None:
    """Returns a value that is no tensor; None for a tensor."""
    return None if isinstance(value, Tensor) else cast(Stored, value)


def are_tensors(values: Sequence[Any]) -> TypeGuard[list[Tensor]]:
    """Returns whether all values are tensors, on the device or the host.

    Example:
        >>> are_tensors([torch.zeros(2)]), are_tensors([torch.zeros(2), None])
        (True, False)
    """
    return all(map(isinstance, values, itertools.repeat(Tensor)))


def load(value: StoredValue) -> Tensor:
    """Returns a value as a tensor, in the memory where it lies; reads and decodes it where it is no tensor.

    Example:
        >>> load(torch.ones(2))
        tensor([1., 1.])
    """
    return value if isinstance(value, Tensor) else cast(Stored, value).load()


def read_rows(value: StoredValue, lo: int = 0, hi: int | None = None, out: Tensor | None = None) -> Pending[Tensor]:
    """Starts to read rows `lo:hi` of dim 0 of a value, into `out` or a fresh host tensor; a tensor's rows are a view.

    Example:
        >>> read_rows(torch.arange(3), 1).result()
        tensor([1, 2])
    """
    if isinstance(value, Tensor):
        rows = value[lo:hi] if value.ndim else value
        return Pending.of(rows if out is None else out.copy_(rows))
    return cast(Stored, value).read(lo, hi, out)


class Absent:
    """A placeholder for a leaf of a mesh without this rank: `Stored`, with a dtype, no elements and no value.

    Args:
        ndim: of the leaf.
        dtype: of the leaf.
        kind: the memory that others keep it in.
        why: the error's text.
    """

    nbytes = 0
    quantization: AnyQuantization | None = None

    def __init__(self, ndim: int, dtype: torch.dtype, kind: MemoryKind, why: str) -> None:
        self.shape, self.dtype, self._why = torch.Size([0] * ndim), dtype, why
        self.kind: MemoryKind = kind

    def flat(self) -> "Absent":
        """The same, as a single dim."""
        return Absent(1, self.dtype, self.kind, self._why)

    def load(self) -> Tensor:
        """There is nothing to load.

        Raises:
            ValueError: always.
        """
        raise ValueError(self._why)

    def read(self, lo: int = 0, hi: int | None = None, out: Tensor | None = None) -> Pending[Tensor]:
        """There is nothing to read.

        Raises:
            ValueError: always.
        """
        raise ValueError(self._why)
