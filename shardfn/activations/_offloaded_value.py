"""A value of the forward that waits for the backward in another memory."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import FakeTensor
from shardfn.capture import CaptureError, capturing, plumbing
from shardfn.collectives import current_mesh
from shardfn.core import Pending, Stored, is_disk
from shardfn.memory import POOLS, AnyPool, Fetch, Pool, TracedPool, to_host

PoolOf = Callable[[], AnyPool]


class OffloadedTensor:
    """Bytes of a storage, from the moment when the bytes begin to leave the device.

    On disk the bytes live as long as the object.

    Args:
        flat: all of the storage, as a single row.
        to: "host" or "disk".
        pool: function that returns the pool of files, where a pool is needed.
    """

    def __init__(self, flat: Tensor, to: str, pool: PoolOf) -> None:
        self.nbytes, self._device = flat.nbytes, flat.device
        self._pool = pool() if is_disk(to) else None
        self._source: Tensor | None = flat
        # The copy runs on while the caller computes. A write to `flat` before the end of the copy spoils the copy.
        self._version, self._spoiled = flat._version, False
        self._down: Pending[Tensor] | None = to_host(flat)
        self._host: Tensor | None = None
        self._writing: Pending[Any] | None = None
        self._stored: Stored | None = None
        self._back: Fetch | None = None

    @property
    def leaving(self) -> bool:
        """Returns whether the copy to the host, or the write to disk, is still in progress."""
        return self._down is not None or self._writing is not None

    @property
    def spoiled(self) -> bool:
        """Returns whether the source was written to during the copy. The content of the copy is then undefined."""
        return self._spoiled or (self._source is not None and self._source._version != self._version)

    def settle(self, *, wait: bool) -> None:
        """Releases the source once copied, then begins the write to disk, if any. With `wait`, completes both."""
        if self._down is not None and (wait or self._down.done()):
            self._host = self._down.result()
            # Checked now, as the source is released below.
            self._spoiled, self._source, self._down = self.spoiled, None, None
            if self._pool is not None:
                self._writing = self._pool.write(self._host)
        if self._writing is not None and (wait or self._writing.done()):
            self._stored, self._writing, self._host = self._writing.result(), None, None

    def begin(self) -> None:
        """Starts the way back, or the second half of the way back."""
        # The value has not left: the source is still here.
        if self._source is not None:
            return
        with plumbing():
            if self._back is None:
                source: Tensor | Pending[Tensor] | None = self._host
                if source is None:
                    assert self._stored is not None
                    source = self._stored.read()
                self._back = Fetch(source, self._device)
            if not capturing():
                self._back.move_if_ready()

    def value(self) -> Tensor:
        """Returns the row on the device, and waits for the row if necessary."""
        # A graph knows no timing: every sent value counts as having left.
        if capturing():
            self.settle(wait=True)
        if self._source is not None:
            # Needed before the copy was done: the source is still here and is used.
            return self._source
        self.begin()
        assert self._back is not None
        with plumbing():
            return self._back.result()

    def drop(self) -> None:
        """Releases the fetched copy. The copy can be fetched again."""
        self._back = None


def flat_of(x: Tensor) -> Tensor:
    """Returns all of a tensor's storage, as a row of the tensor's dtype.

    Example:
        >>> flat_of(torch.arange(6).view(2, 3)[:, 1])
        tensor([0, 1, 2, 3, 4, 5])
    """
    x = x.detach()
    return x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)


def is_plain(x: Any) -> bool:
    """Returns whether a value is a strided `Tensor` or `Parameter`, or, in a capture, a fake tensor.

    Example:
        >>> is_plain(torch.ones(1)), is_plain(torch.ones(1).to_sparse())
        (True, False)
    """
    kinds = (Tensor, torch.nn.Parameter, FakeTensor) if capturing() else (Tensor, torch.nn.Parameter)
    return type(x) in kinds and x.layout == torch.strided


def can_leave(x: Tensor) -> bool:
    """Returns whether a tensor may be moved.

    A plain tensor on the device that covers at least a quarter of its storage.

    A smaller view stays, for example a row of a large matrix: other views may keep the storage alive, and a move would
    free nothing.
    """
    if (
        not (type(x) in (Tensor, torch.nn.Parameter) or capturing())
        or x.layout != torch.strided
        or x.is_quantized
        or x.is_conj()
    ):
        return False
    # With a GPU, host tensors stay, as host tensors are not on the device anyway.
    if x.is_meta or x.is_neg() or x.is_cuda != torch.cuda.is_available():
        return False
    storage = x.untyped_storage().nbytes()
    return storage >= SMALL and 4 * x.nbytes >= storage and storage % x.itemsize == 0


# A page. To move less costs more than it frees.
SMALL = 4096


# A pool for each directory. The pool owns the directory until the process ends.
_POOLS: dict[pathlib.Path, Pool] = {}


def pool_of(directory: str | os.PathLike[str] | None) -> PoolOf:
    """Returns the pool under a directory, or without a directory the pool of the surrounding step.

    The pool is made when the first value goes to disk.

    Raises:
        ValueError: (when called) there is neither a directory nor a step with a disk.
        CaptureError: (when called) in a capture, with a directory.
    """

    def find_pool() -> AnyPool:
        mesh = current_mesh()
        if capturing() and directory is not None:
            raise CaptureError(
                "a captured step uses only one disk, the disk of the step. Leave directory= of offload and remat out,"
                " and pass Zero(disk=Disk(...)) with leaves on disk."
            )
        if directory is None:
            pools = list((POOLS.get(mesh) or {}).values())
            if not pools:
                raise ValueError(
                    "a policy sends activations to disk, but there is no directory. Pass directory= to offload or"
                    " remat, or let the step have a disk: Zero(disk=Disk(...)) with leaves on it."
                )
            return TracedPool() if capturing() else pools[0]
        place = (pathlib.Path(directory) / f"activations{mesh.rank}").absolute()
        if place not in _POOLS:
            _POOLS[place] = Pool(place)
        return _POOLS[place]

    return find_pool
