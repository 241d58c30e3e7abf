"""Where summed gradients wait for the update: on the device, on the host, or on disk."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardfn.core import Arriving, MemoryKind, Stored
from shardfn.memory import AnyPool, on_host, to_host

# Bytes of shares that may be on their way from the device: it holds them until they have left.
LEAVING_BYTES = 24 << 20


class Parts:
    """This rank's shares of the summed gradients, by unit, each in its memory; later microbatches are added there.

    Args:
        homes: the memory of each unit.
        dtypes: in which each unit is added up.
        pool: the disk; needed by units that are kept there.
    """

    def __init__(self, homes: Sequence[MemoryKind], dtypes: Sequence[torch.dtype], pool: AnyPool | None) -> None:
        self._homes, self._dtypes, self._pool = homes, dtypes, pool
        self._at: dict[int, Tensor | Stored] = {}
        self._coming: dict[int, Arriving[Tensor]] = {}
        self._leaving: list[tuple[int, int]] = []

    def __contains__(self, unit: int) -> bool:
        return unit in self._at or unit in self._coming

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({*self._at, *self._coming}))

    def home(self, unit: int) -> MemoryKind:
        """The memory of a unit."""
        return self._homes[unit]

    def add(self, unit: int, part: Tensor, *, last: bool) -> None:
        """Adds a share that lies on the device; one that is kept elsewhere begins its way, and is added there.

        Args:
            unit: whose share.
            part: the share, in the dtype in which it travelled; what is never added to stays on the device as it came,
                so that a whole gradient travels on in that dtype.
            last: whether nothing will be added to it any more.
        """
        if self._homes[unit] != "device":
            self._settle(unit)
            self._coming[unit] = to_host(part)
            self._hold_back(unit, part.nbytes)
            return
        before = self._at.get(unit)
        if before is not None:
            assert isinstance(before, Tensor)
            part = before + part.to(self._dtypes[unit])
        self._at[unit] = part if last else part.to(self._dtypes[unit])

    def finish(self) -> None:
        """Says that nothing will be added any more."""
        for unit, x in self._at.items():
            if isinstance(x, Tensor):
                self._at[unit] = x.to(self._dtypes[unit])

    def __getitem__(self, unit: int) -> Tensor | Stored:
        self._settle(unit)
        return self._at[unit]

    def pop(self, unit: int) -> Tensor | Stored:
        """The share of a unit, which is let go."""
        self._settle(unit)
        return self._at.pop(unit)

    def drop(self, unit: int) -> None:
        """Lets go of a unit, if it is there."""
        self._coming.pop(unit, None)
        self._at.pop(unit, None)

    def _hold_back(self, unit: int, nbytes: int) -> None:
        """Waits for the oldest shares while too many are on their way."""
        self._leaving = [(u, n) for u, n in self._leaving if u in self._coming and not self._coming[u].done()]
        self._leaving.append((unit, nbytes))
        while sum(n for _, n in self._leaving) > LEAVING_BYTES and len(self._leaving) > 1:
            self._settle(self._leaving.pop(0)[0])

    def _settle(self, unit: int) -> None:
        coming = self._coming.pop(unit, None)
        if coming is None:
            return
        with on_host():
            part, before = coming.result().to(self._dtypes[unit]), self._at.pop(unit, None)
            if before is not None:
                part = (before if isinstance(before, Tensor) else before.load()).add_(part)
            self._at[unit] = part if self._homes[unit] == "host" else send_home(part, "disk", self._pool)


def send_home(x: Tensor, kind: MemoryKind, pool: AnyPool | None) -> Tensor | Stored:
    """A tensor in the memory `kind`, where it has memory of its own."""
    if kind == "device":
        return x
    if kind == "host":
        return to_host(x).result()
    assert pool is not None
    return pool.write(x).result()


class Slice:
    """A part of what is stored flat, as a tensor of its own shape: `Stored`, in its turn.

    Args:
        base: 1-D.
        start: the first element.
        shape: the shape of the part.
    """

    def __init__(self, base: Stored, start: int, shape: torch.Size) -> None:
        self._base, self._start, self.shape = base, start, shape

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self._base.dtype

    @property
    def kind(self) -> MemoryKind:
        """The memory kind of the base."""
        return self._base.kind

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def load(self) -> Tensor:
        """The whole of it."""
        return self.read().result()

    def read(self, lo: int = 0, hi: int | None = None, out: Tensor | None = None) -> "_Shaped":
        """Rows `lo:hi` of dim 0; of a 0-d tensor, all there is."""
        row = self.shape[1:].numel()
        hi = (self.shape[0] if self.shape else 1) if hi is None else hi
        shape = torch.Size((hi - lo, *self.shape[1:])) if self.shape else self.shape
        flat = None if out is None else out.view(-1)
        return _Shaped(self._base.read(self._start + lo * row, self._start + hi * row, flat), shape)


class _Shaped:
    """A transfer whose value gets another shape."""

    def __init__(self, inner: Arriving[Tensor], shape: torch.Size) -> None:
        self._inner, self._shape = inner, shape

    def done(self) -> bool:
        """Whether `result()` would return at once."""
        return self._inner.done()

    def result(self) -> Tensor:
        """The value."""
        return self._inner.result().view(self._shape)
