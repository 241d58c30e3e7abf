"""Other memories -> device: this rank's piece of a leaf, in flight."""

import torch
from torch import Tensor

from shardfn.core import Pending

from ._transfer import to_device


class Fetch(Pending[Tensor]):
    """Transfer of a piece to the device in one or two steps: disk to host, host to device.

    Args:
        source: piece: a tensor on the host, or a pending transfer to the host.
        device: device of the result.
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
        """Begins the step to the device, unless this would wait."""
        if isinstance(self._source, Tensor) or (self._source is not None and self._source.done()):
            self.move()

    def done(self) -> bool:
        """Returns whether `result()` would return immediately."""
        return self._moving is not None and self._moving.done()

    def result(self) -> Tensor:
        """Waits for the piece, and returns a tensor on the device."""
        self.move()
        assert self._moving is not None
        return self._moving.result()
