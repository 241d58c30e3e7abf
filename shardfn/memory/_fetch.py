"""Other memories -> device: this rank's piece of a leaf, on its way from where it is kept."""

import torch
from torch import Tensor

from shardfn.core import Pending

from ._transfer import to_device


class Fetch(Pending[Tensor]):
    """A piece that comes to the device in one or two steps: from the disk to the host, from the host to the device.

    Args:
        source: the piece: a tensor of the host, or one on its way there.
        device: where it is wanted.
    """

    def __init__(self, source: Tensor | Pending[Tensor], device: torch.device) -> None:
        super().__init__()
        self._source: Tensor | Pending[Tensor] | None = source
        self._device = device
        self._moving: Pending[Tensor] | None = None

    def move(self) -> None:
        """Begins the step to the device, and waits for the disk."""
        if self._source is not None:
            host = self._source if isinstance(self._source, Tensor) else self._source.result()
            self._moving, self._source = to_device(host, self._device), None

    def move_if_ready(self) -> None:
        """Begins the step to the device if that waits for nothing."""
        if isinstance(self._source, Tensor) or (self._source is not None and self._source.done()):
            self.move()

    def done(self) -> bool:
        """Returns whether `result()` would return at once."""
        return self._moving is not None and self._moving.done()

    def result(self) -> Tensor:
        """Returns the piece, on the device, and waits for it."""
        self.move()
        assert self._moving is not None
        return self._moving.result()
