"""`StoredValue`: a block wherever and however it is kept. `Pending`: a value in flight.

The types are defined here so that rooms which carry such values need not import the rooms that keep them. The
operations on them that move a value (`store`, `prefetch`, successors, inputs and outputs of graphs) are in
`shardfn.state`.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeGuard, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from ._placement import AnyQuantization
from ._spec import MemoryKind

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class Pending(Generic[T_co]):
    """Value on its way. The source must not change until the value has arrived.

    The function that starts a transfer returns a `Pending`. The caller asks for the value once. Any thread may ask, but
    only a single thread at a time.

    Args:
        result: function that waits, and returns the value or raises the transfer's error. None in a subclass that
            overrides `result` and `done`. (A subclass that passed methods would hold itself, and so the sources.)
        done: function that returns whether the value has arrived, without waiting. Default: unknown, thus False.
        left: function that waits until the source may be overwritten. Default: waits for the value.

    Example:
        >>> Pending(lambda: 3).then(lambda x: x + 1).result()
        4
        >>> Pending.of(5).done()
        True
    """

    def __init__(
        self,
        result: Callable[[], T_co] | None = None,
        done: Callable[[], bool] | None = None,
        left: Callable[[], object] | None = None,
    ) -> None:
        self._result, self._done, self._left = result, done, left

    @staticmethod
    def of(value: U) -> "Pending[U]":
        """Returns a value that is here already."""
        return Pending(lambda: value, _is_done)

    def done(self) -> bool:
        """Returns whether `result` would return, or raise, at once. False if unknown."""
        return self._done is not None and self._done()

    def result(self) -> T_co:
        """Returns the value, and waits for it.

        For a tensor on an accelerator the current stream is made to wait, not the caller.

        Raises:
            Exception: the transfer's error.
        """
        assert self._result is not None
        return self._result()

    def wait(self) -> None:
        """Waits until the source may be overwritten."""
        (self._left or self.result)()

    def then(self, f: Callable[[T_co], U]) -> "Pending[U]":
        """Returns the value `f(x)` of the arriving `x`. `f` runs where the value is asked for."""
        return Pending(lambda: f(self.result()), self.done, self.wait)


def _is_done() -> bool:
    return True


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
        kind: memory of the parts.
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
