"""Forms of values along a mesh axis, and sharding rules, from forms of operands to forms of results.

A value of a program that was written for a single device has a form along an axis:

    WHOLE      every rank holds it, computed alike: it counts once (type I)
    VARYING    every rank holds it, and each uses it in its own way: gradients are parts of a sum (type V)
    cut(d, g)  rank i holds block i of dim d, which is cut at multiples of g as `torch.chunk` cuts (type V); of a dim
               in which several things lie in sequence, block i of each of these parts
    PARTIAL    every rank holds a summand (type V)
    rows       every rank holds a summand, and each row of the value is zeros on all ranks but its owner (type V)

A rule offers strategies, and a planner chooses a strategy for each op. For example, a product of x [m, k] and w [k, n]
may be cut along m, along n, or along k with a PARTIAL result. Collectives convert values of other forms.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import axis_index, axis_size, pmax, psum, pvary
from shardfn.core import chunk_bounds


class Form(NamedTuple):
    """Form of a value along an axis.

    Attributes:
        kind: kind as above.
        dim: dim that is cut.
        multiple: number that divides the dim. Blocks begin at multiples of the number.
        parts: size and multiple of each part, for a dim whose parts are cut separately, for example queries, keys and
            values of a single projection. `multiple` is then 1.
        owner: groups of own rows, each owned by a rank.
    """

    kind: Literal["whole", "varying", "cut", "partial", "rows"]
    dim: int = 0
    multiple: int = 1
    parts: "Parts" = ()
    owner: "Owner | None" = None

    def __str__(self) -> str:
        if self.kind != "cut":
            return "own rows" if self.kind == "rows" else self.kind
        parts = f" by parts of {[size for size, _ in self.parts]}" if self.parts else ""
        return f"cut along dim {self.dim}{parts}" + (f" in units of {self.multiple}" if self.multiple > 1 else "")


Parts = tuple[tuple[int, int], ...]


class Owner(NamedTuple):
    """Groups of own rows.

    Attributes:
        sizes: name of the value that has the sizes of the groups, or the ends.
        ends: whether the value has ends.
        num: number of groups.
        multiple: number of groups. Ranks cut at multiples of the number.
    """

    sizes: str
    ends: bool
    num: int
    multiple: int


WHOLE, VARYING, PARTIAL = Form("whole"), Form("varying"), Form("partial")


@functools.lru_cache(maxsize=4096)
def cut(dim: int, size: int, num: int, multiple: int = 1, parts: Parts = ()) -> Form:
    """Returns the form of a dim of `size` that is cut over `num` ranks, for example 7 rows on 3 ranks.

    The least multiple that gives the same blocks.

    Example:
        >>> print(cut(0, 8, 2, multiple=4)), print(cut(0, 12, 2, multiple=4)), print(cut(1, 12, 2, parts=((6, 1),) * 2))
        cut along dim 0
        cut along dim 0 in units of 4
        cut along dim 1 by parts of [6, 6]
        (None, None, None)
    """
    least = [(one, multiple_of(one, lengths(one, num, g)) or g) for one, g in parts or ((size, multiple),)]
    return Form("cut", dim, 1, tuple(least)) if len(least) > 1 else Form("cut", dim, least[0][1])


def blocks(size: int, num: int, form: Form) -> tuple[tuple[int, ...], ...]:
    """Returns for each part of a cut dim the lengths of the blocks.

    Example:
        >>> blocks(12, 2, cut(0, 12, 2)), blocks(12, 2, cut(0, 12, 2, parts=((8, 1), (4, 1))))
        (((6, 6),), ((4, 4), (2, 2)))
    """
    return tuple(lengths(one, num, g) for one, g in form.parts or ((size, form.multiple),))


def lengths(size: int, num: int, multiple: int = 1) -> tuple[int, ...]:
    """Returns the lengths of the blocks.

    Example:
        >>> lengths(7, 3), lengths(12, 2, multiple=4)
        ((3, 3, 1), (8, 4))
    """
    bounds = [chunk_bounds(size // multiple, num, i) for i in range(num)]
    return tuple(multiple * (stop - start) for start, stop in bounds)


def multiple_of(size: int, held: Sequence[int]) -> int | None:
    """Returns the least multiple that cuts `size` in these blocks, or None if no multiple does.

    Example:
        >>> multiple_of(12, (8, 4)), multiple_of(12, (4, 8)), multiple_of(7, (3, 3, 1))
        (4, None, 1)
    """
    if lengths(size, len(held)) == tuple(held):
        return 1
    most = math.gcd(size, *held)  # a multiple divides all blocks
    tried = (g for g in range(2, most + 1) if most % g == 0)
    return next((g for g in tried if lengths(size, len(held), g) == tuple(held)), None)


class Ranks:
    """Ranks along the axis, for the `run` of a strategy.

    Attributes:
        axis: name.
        num: number of ranks.
        index: this rank's index.
        functions: function that computes the same as an op, by op, with derivatives of any order.
    """

    def __init__(self, axis: str, functions: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        self.axis, self.num, self.index = axis, axis_size(axis), int(axis_index(axis))
        self.functions = functions or {}

    def psum(self, x: Tensor) -> Tensor:
        """Returns the sum, whole."""
        return psum(x, self.axis)

    def pmax(self, x: Tensor) -> Tensor:
        """Returns the maximum, whole, not differentiable."""
        return pmax(x, self.axis)

    def pvary(self, x: Tensor) -> Tensor:
        """Returns a whole value as a varying one."""
        return pvary(x, self.axis)

    def bounds(self, size: int, multiple: int = 1) -> tuple[int, int]:
        """Returns the begin and the end of this rank's block of a dim."""
        start, stop = chunk_bounds(size // multiple, self.num, self.index)
        return multiple * start, multiple * stop

    def local(self, shape: Sequence[int], form: Form) -> list[int]:
        """Returns the shape of this rank's part of a value."""
        out = list(shape)
        if form.kind == "cut":
            out[form.dim] = sum(self.own(shape[form.dim], form))
        return out

    def own(self, size: int, form: Form) -> list[int]:
        """Returns the lengths of this rank's blocks of the parts of a cut dim."""
        return [each[self.index] for each in blocks(size, self.num, form)]

    def block(self, x: Tensor, form: Form) -> Tensor:
        """Returns this rank's part of a value that is here as a whole, and cut in the form."""
        taken, start = [], 0
        for size, multiple in form.parts or ((x.shape[form.dim], form.multiple),):
            first, last = self.bounds(size, multiple)
            taken.append(x.narrow(form.dim, start + first, last - first))
            start += size
        return taken[0] if len(taken) == 1 else torch.cat(taken, form.dim)


Run = Callable[[Ranks, Sequence[Any], dict[str, Any]], Any]


class Strategy(NamedTuple):
    """Way to compute an op on parts.

    Attributes:
        ins: form that each tensor among the operands must have, in order.
        outs: form of each result.
        run: function of the arguments, with parts in the place of tensors. None: the op is called.
        sent: bytes that `run` sends, forward and backward, a rank.
        note: messages of `run`, in words.
        beside: names of values that `run` receives after the arguments, whole. Such values are operands of earlier ops.
    """

    ins: tuple[Form, ...]
    outs: tuple[Form, ...]
    run: Run | None = None
    sent: float = 0.0
    note: str = ""
    beside: tuple[str, ...] = ()


class Operand(NamedTuple):
    """Tensor as a rule sees the tensor: the shape of the whole value, and the name of the op that makes the value."""

    shape: tuple[int, ...]
    itemsize: int
    number: int = 0
    name: str = ""

    @property
    def ndim(self) -> int:
        """Returns the number of dims."""
        return len(self.shape)


@dataclasses.dataclass(frozen=True)
class OpUse:
    """Op of a program, as the op's rule sees the op.

    Attributes:
        target: overload.
        args: arguments by position, with `Operand` in the place of tensors.
        kwargs: keyword arguments by name.
        operands: tensors among the arguments, in order.
        forms: forms in which the operands come.
        outs: results that are tensors.
        num: number of ranks along the axis.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Operand, ...]
    forms: tuple[Form, ...]
    outs: tuple[Operand, ...]
    num: int

    def arg(self, at: int, name: str, default: Any = None) -> Any:
        """Returns an argument by position, or by name."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)

    def cut(self, dim: int, size: int, multiple: int = 1, parts: Parts = ()) -> Form:
        """Returns the form of a cut dim."""
        return cut(dim, size, self.num, multiple, parts)


Rule = Callable[[OpUse], list[Strategy]]


def whole(use: OpUse) -> Strategy:
    """Returns the strategy that always holds: whole operands give whole results."""
    return Strategy((WHOLE,) * len(use.operands), (WHOLE,) * len(use.outs))
