"""`Spare`: host memory that chunks of an update hand on to one another."""

import torch
from torch import Tensor

from shardfn.memory import host_empty


class Spare:
    """Host memory that chunks hand on to one another: fresh pages cost more than what is done to them."""

    def __init__(self) -> None:
        # Nobody else holds what is free: who gives a buffer back has waited for all transfers from and to it.
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor of that shape, of any content."""
        free = self._free.get((shape.numel(), dtype))
        return free.pop().view(shape) if free else host_empty(shape, dtype)

    def give(self, buffers: list[Tensor]) -> None:
        """Takes back what is not used any more."""
        for x in buffers:
            self._free.setdefault((x.numel(), x.dtype), []).append(x)
