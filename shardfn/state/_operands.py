"""The operands of an update, leaf by leaf: columns of values, rows of them, and the leaves stepped so far."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.core import MemoryKind, P, StoredValue
from shardfn.memory import AnyPool
from shardfn.optim import GradientTransformation


@dataclasses.dataclass(frozen=True)
class UpdateOperand:
    """One leaf that takes part in an update: a parameter, a gradient, or a leaf of the optimizer's state.

    Attributes:
        held: value before. A tensor is overwritten, a value on disk is not.
        home: memory of the value before.
        read: whether the update looks at the value before.
        kept: whether a tensor is not overwritten either: the new rows are separate host memory.
    """

    held: StoredValue
    home: MemoryKind
    read: bool = True
    kept: bool = False


@dataclasses.dataclass(frozen=True)
class LeafRows:
    """Rows `lo:hi` of a leaf along dim 0; the whole leaf if `hi=None`."""

    leaf: int
    lo: int = 0
    hi: int | None = None

    def of(self, x: Tensor) -> Tensor:
        """These rows of a tensor, as a view."""
        return x if self.hi is None else x[self.lo : self.hi]

    def shape(self, whole: torch.Size) -> torch.Size:
        """Returns the shape of these rows of a leaf of that shape."""
        return whole if self.hi is None else torch.Size((self.hi - self.lo, *whole[1:]))


@dataclasses.dataclass(frozen=True)
class Update:
    """The operands of one update.

    Attributes:
        optimizer: the rule.
        treedef: the structure of params.
        specs: for each leaf of params, how its rows are cut out of the global leaf.
        numels: elements on a rank for each leaf of params: the same number on all ranks, since a rule may sum over
            ranks, and so leaves must go through the update in the same groups everywhere.
        params: for each leaf of params, this rank's rows, or None where it is frozen.
        grads: likewise, the summed gradient.
        state: for each leaf of the optimizer's state.
        state_treedef: structure.
        owners: the owner in params of each leaf of the optimizer's state, or None for counters.
        scale: a factor by which gradients are multiplied first.
        device: where states of the device are stepped.
        pool: the disk.
        chunk: bytes of a chunk.
    """

    optimizer: GradientTransformation
    treedef: Any
    specs: Sequence[P]
    numels: Sequence[int]
    params: Sequence[UpdateOperand | None]
    grads: Sequence[UpdateOperand | None]
    state: Sequence[UpdateOperand]
    state_treedef: Any
    owners: Sequence[int | None]
    scale: Tensor | None
    device: torch.device
    pool: AnyPool | None
    chunk: int


@dataclasses.dataclass
class UpdatedLeaves:
    """The new values of leaves stepped so far, by leaf of params and of the optimizer's state, and their measures."""

    params: dict[int, StoredValue] = dataclasses.field(default_factory=dict)
    state: dict[int, StoredValue] = dataclasses.field(default_factory=dict)
    measures: dict[int, Tensor] = dataclasses.field(default_factory=dict)
