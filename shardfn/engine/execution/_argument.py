"""`Argument`: a leaf of the arguments of a sharded function, on its way to the device and back to where it is kept.

A donated leaf may be kept on the host or on disk, as parameters may: the function sees a copy on the device, and the
result that takes its place is written to the memory of the leaf. Where `in_specs` has a `Sharding` on the host, the
function sees the leaf there, and moves the parts that it needs itself.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor
from shardfn.core import P, is_device, raise_all
from shardfn.state import fetch, succeed


class Argument(NamedTuple):
    """A leaf of the arguments beyond the first.

    Attributes:
        path: where it is among the arguments.
        given: the value that the caller passed.
        spec: how a sharded leaf is cut; None for the others.
        donated: whether the function may overwrite its memory.
        position: that of its argument, counted from the first, which is 0.
        block: the copy on the device of a block that is kept elsewhere; None before, and for the others.
        on_host: whether the function sees the block in the memory of the host.
    """

    path: str
    given: Any
    spec: P | None
    donated: bool
    position: int = 0
    block: Tensor | None = None
    on_host: bool = False

    @property
    def seen(self) -> Any:
        """The value that the function sees: this rank's block, or the value that was passed."""
        if self.block is not None:
            return self.block
        return self.given.local if self.spec is not None else self.given

    @property
    def away(self) -> bool:
        """Whether its block is kept elsewhere than on the device."""
        return self.spec is not None and not is_device(self.given.memory_kind)

    @property
    def moves(self) -> bool:
        """Whether the function sees a copy on the device of a block that is kept elsewhere."""
        return self.away and not self.on_host

    def moved(self, device: torch.device) -> "Argument":
        """The same leaf with its block on the device."""
        return self._replace(block=on_device(self.given, device)) if self.moves else self


def on_device(x: GlobalTensor, device: torch.device) -> Tensor:
    """Returns a copy on the device of a block that is kept on the host or on disk."""
    return fetch(x.held, x.memory_kind, device)


def refuse_away(arguments: Sequence[Argument]) -> None:
    """Refuses arguments kept elsewhere than on the device, for a call that torch follows or transforms.

    Raises:
        ValueError: lists them.
    """
    raise_all(
        ValueError,
        "a call that is differentiated or transformed takes arguments from the device alone; reshard these to it, or"
        " call under torch.no_grad():",
        [f"{a.path} is kept at {a.given.memory_kind!r}" for a in arguments if a.away],
    )


def taking_the_place_of(given: GlobalTensor, x: Tensor) -> GlobalTensor:
    """Returns a result as the successor of a donated leaf: of its shape, its spec and its memory.

    Host memory is written over, unless the result is in it already. On disk it is a new value, and the file of the
    value before is used again.
    """
    return given.with_block(succeed(given.held, given.memory_kind, x))
