"""`Spare`: host memory that chunks of an update hand on to one another."""

import torch
from torch import Tensor

from shardfn.memory import host_empty


class Spare:
    """Host memory that chunks hand on to one another: fresh pages cost more than the work on them."""

    def __init__(self) -> None:
        # Free buffers have no other holder: a chunk waits for all transfers from and to a buffer before it gives it
        # back.
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns a tensor of that shape, of any content."""
        free = self._free.get((shape.numel(), dtype))
        return free.pop().view(shape) if free else host_empty(shape, dtype)

    def give(self, buffers: list[Tensor]) -> None:
        """Takes back buffers that are not used any more."""
        for x in buffers:
            self._free.setdefault((x.numel(), x.dtype), []).append(x)
