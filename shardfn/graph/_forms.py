"""How a value is spread along a mesh axis, and what a sharding rule says: from forms of operands to those of results.

A value of a program that was written for one device has one of these forms along an axis:

    WHOLE      every rank holds it, computed alike: it counts once (type I)
    VARYING    every rank holds it, and each uses it in its own way: gradients are parts of a sum (type V)
    cut(d, g)  rank i holds block i of dim d, which is cut at multiples of g as `torch.chunk` cuts (type V)
    PARTIAL    every rank holds a summand (type V)

A rule offers strategies; whoever plans a graph chooses. What a strategy does not say is converted by collectives.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from shardfn.collectives import axis_index, axis_size, pmax, psum, pvary
from shardfn.core import chunk_bounds


class Form(NamedTuple):
    """How a value is spread along an axis.

    Attributes:
        kind: see above.
        dim: which dim is cut.
        multiple: blocks begin at multiples of it; divides the dim.
    """

    kind: Literal["whole", "varying", "cut", "partial"]
    dim: int = 0
    multiple: int = 1

    def __str__(self) -> str:
        if self.kind != "cut":
            return self.kind
        return f"cut along dim {self.dim}" + (f" in units of {self.multiple}" if self.multiple > 1 else "")


WHOLE, VARYING, PARTIAL = Form("whole"), Form("varying"), Form("partial")


@functools.lru_cache(maxsize=4096)
def cut(dim: int, size: int, num: int, multiple: int = 1) -> Form:
    """The form of a dim of `size` that is cut over `num` ranks; of the multiples that give the same blocks, the least.

    Example:
        >>> cut(0, 8, 2, multiple=4), cut(0, 12, 2, multiple=4)
        (Form(kind='cut', dim=0, multiple=1), Form(kind='cut', dim=0, multiple=4))
    """
    return Form("cut", dim, multiple_of(size, lengths(size, num, multiple)) or multiple)


def lengths(size: int, num: int, multiple: int = 1) -> tuple[int, ...]:
    """The lengths of the blocks.

    Example:
        >>> lengths(7, 3), lengths(12, 2, multiple=4)
        ((3, 3, 1), (8, 4))
    """
    bounds = [chunk_bounds(size // multiple, num, i) for i in range(num)]
    return tuple(multiple * (stop - start) for start, stop in bounds)


def multiple_of(size: int, blocks: Sequence[int]) -> int | None:
    """The least multiple that cuts `size` in these blocks; None if none does.

    Example:
        >>> multiple_of(12, (8, 4)), multiple_of(12, (4, 8)), multiple_of(7, (3, 3, 1))
        (4, None, 1)
    """
    if lengths(size, len(blocks)) == tuple(blocks):
        return 1
    most = math.gcd(size, *blocks)  # a multiple divides all blocks
    tried = (g for g in range(2, most + 1) if most % g == 0)
    return next((g for g in tried if lengths(size, len(blocks), g) == tuple(blocks)), None)


class Ranks:
    """The ranks along the axis, as what a strategy runs sees them.

    Attributes:
        axis: its name.
        num: how many they are.
        index: this rank's.
    """

    def __init__(self, axis: str) -> None:
        self.axis, self.num, self.index = axis, axis_size(axis), axis_index(axis)

    def psum(self, x: Tensor) -> Tensor:
        """The sum, whole."""
        return psum(x, self.axis)

    def pmax(self, x: Tensor) -> Tensor:
        """The maximum, whole; of what is not differentiated."""
        return pmax(x, self.axis)

    def pvary(self, x: Tensor) -> Tensor:
        """What is whole, varying."""
        return pvary(x, self.axis)

    def bounds(self, size: int, multiple: int = 1) -> tuple[int, int]:
        """Where this rank's block of a dim begins and ends."""
        start, stop = chunk_bounds(size // multiple, self.num, self.index)
        return multiple * start, multiple * stop

    def local(self, shape: Sequence[int], form: Form) -> list[int]:
        """The shape of this rank's part of a value."""
        out = list(shape)
        if form.kind == "cut":
            start, stop = self.bounds(shape[form.dim], form.multiple)
            out[form.dim] = stop - start
        return out


Run = Callable[[Ranks, Sequence[Any], dict[str, Any]], Any]


class Strategy(NamedTuple):
    """One way to compute an op on parts.

    Attributes:
        ins: the form that each tensor among the operands must have, in their order.
        outs: the form of each result.
        run: computes it, of the arguments with parts in the place of tensors; None: the op itself does.
        sent: bytes that `run` sends, forward and backward, a rank.
        note: what `run` sends, in words.
    """

    ins: tuple[Form, ...]
    outs: tuple[Form, ...]
    run: Run | None = None
    sent: float = 0.0
    note: str = ""


class Operand(NamedTuple):
    """A tensor as a rule sees it: the shape is that of the whole value."""

    shape: tuple[int, ...]
    itemsize: int
    number: int = 0

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)


@dataclasses.dataclass(frozen=True)
class OpUse:
    """One op of a program, as its rule sees it.

    Attributes:
        target: the overload.
        args: by position, with `Operand` in the place of tensors.
        kwargs: by name.
        operands: the tensors among them, in order.
        forms: how the operands are spread as they come.
        outs: the results; None of those that are no tensors.
        num: ranks along the axis.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Operand, ...]
    forms: tuple[Form, ...]
    outs: tuple[Operand, ...]
    num: int

    def arg(self, at: int, name: str, default: Any = None) -> Any:
        """An argument by position, or by name."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)

    def cut(self, dim: int, size: int, multiple: int = 1) -> Form:
        """The form of a cut dim."""
        return cut(dim, size, self.num, multiple)


Rule = Callable[[OpUse], list[Strategy]]


def whole(use: OpUse) -> Strategy:
    """What always holds: whole operands give whole results."""
    return Strategy((WHOLE,) * len(use.operands), (WHOLE,) * len(use.outs))
