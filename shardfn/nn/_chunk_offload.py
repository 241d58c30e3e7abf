"""Tensors of chunks that wait on the host or on disk, and come back a chunk ahead of use."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.core import Pending
from shardfn.memory import AnyPool, Fetch, stored_of, to_host, token_of

Bundle = tuple[Tensor, ...]


class OffloadedChunks:
    """Bundles of tensors that wait on the host or on disk.

    Args:
        device: device to which bundles return.
        pool: pool of files. None is the host.
        kept: waiting tensors and tokens.
        width: the number of tensors of a bundle in `kept`.
    """

    def __init__(self, device: torch.device, pool: AnyPool | None, kept: Sequence[Tensor] = (), width: int = 1) -> None:
        self._device, self._pool, self._width = device, pool, width
        self._kept, self._going = list(kept), list[tuple[Pending[Any], bool]]()

    @property
    def kept(self) -> list[Tensor]:
        """Returns host tensors, and tokens of tensors on disk, once all have left."""
        self.settle()
        return self._kept

    def send(self, bundle: Bundle) -> None:
        """Sends a bundle away, once the bundle before has left."""
        self.settle()
        self._width = len(bundle)
        self._going = [(to_host(x), x.numel() > 0) for x in bundle]

    def settle(self) -> None:
        """Waits until all sent bundles have arrived."""
        going, self._going = self._going, []
        for pending, some in going:
            host = pending.result()
            if self._pool is not None and some:
                host = token_of(self._pool.write(host).result())
            self._kept.append(host)

    def come(self, order: Iterable[int]) -> Iterator[Bundle]:
        """Yields the bundles of given numbers. The next bundle is on the way while a bundle is in use."""
        before: list[Fetch] | None = None
        for i in order:
            coming = [self._fetch_tensor(x) for x in self.kept[i * self._width : (i + 1) * self._width]]
            if before is not None:
                yield tuple(x.result() for x in before)
            before = coming
        if before is not None:
            yield tuple(x.result() for x in before)

    def _fetch_tensor(self, x: Tensor) -> Fetch:
        on_disk = self._pool is not None and x.dtype == torch.int64
        fetch = Fetch(stored_of(x).read() if on_disk else x, self._device)
        if not on_disk:
            fetch.move()
        return fetch


class Sums:
    """Sums that wait on the host between additions."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._sums = device, dict[int, Pending[Tensor]]()

    def add(self, i: int, x: Tensor) -> None:
        """Adds to sum i."""
        before = self.take(i)
        self._sums[i] = to_host(x if before is None else before + x)

    def take(self, i: int) -> Tensor | None:
        """Removes and returns sum i, on the device, or None if nothing was added."""
        found = self._sums.pop(i, None)
        return None if found is None else Fetch(found.result(), self._device).result()
