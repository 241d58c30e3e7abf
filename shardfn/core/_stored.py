"""`Stored`: the interface of a value that is not in memory: its shape and dtype, and a way to fetch it.

The type is defined here so that rooms which carry such values need not import the room that keeps them.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ._pending import Pending
from ._placement import Code
from ._spec import MemoryKind


@runtime_checkable
class Stored(Protocol):
    """A value that is kept elsewhere than in a tensor, for instance on disk. Immutable.

    Attributes:
        shape: as a tensor's.
        dtype: as a tensor's.
        kind: the memory kind of the place.
        code: the code to which its elements are rounded, see `Placement.code`; None = not rounded.
        nbytes: the bytes of the value in its place.

    Example:
        >>> isinstance(torch.zeros(2), Stored)
        False
    """

    @property
    def shape(self) -> torch.Size:
        """The shape of the value."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the value."""
        ...

    @property
    def kind(self) -> MemoryKind:
        """The memory kind of the place."""
        ...

    @property
    def code(self) -> Code | None:
        """The code to which its elements are rounded; None = not rounded."""
        ...

    @property
    def nbytes(self) -> int:
        """The bytes of the value in its place."""
        ...

    def flat(self) -> "Stored":
        """The same value as one dim."""
        ...

    def load(self) -> Tensor:
        """The whole value as a fresh host tensor; waits for it."""
        ...

    def read(self, lo: int = 0, hi: int | None = None, out: Tensor | None = None) -> Pending[Tensor]:
        """Rows `lo:hi` of dim 0, asynchronously, in `out` or in a fresh host tensor."""
        ...


class Absent:
    """A placeholder for a leaf of a mesh without this rank: `Stored`, with a dtype, no elements and no value.

    Args:
        ndim: of the leaf.
        dtype: of the leaf.
        kind: the memory that others keep it in.
        why: the error's text.
    """

    nbytes = 0
    code: Code | None = None

    def __init__(self, ndim: int, dtype: torch.dtype, kind: MemoryKind, why: str) -> None:
        self.shape, self.dtype, self._why = torch.Size([0] * ndim), dtype, why
        self.kind: MemoryKind = kind

    def flat(self) -> "Absent":
        """The same, as one dim."""
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
