"""Numbers that remember the axes along which they differ: `axis_index`, and results computed from it.

The numbers are not `int`s or `float`s: Python computes `0.5 * i` of an `int` without asking `i`, and the axes would be
lost.
"""

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any, NoReturn

from shardfn._torch import DisableTorchFunctionSubclass


class AxisTypeError(TypeError):
    """Error of a value that varies along an axis where it must not: a collective is missing, or is applied twice."""


class AxisNumber:
    """A rank's index along axes, or a number computed from it.

    The index has the operators of numbers, and functions of torch accept an index in place of a number. `int(i)` and
    `i.item()` are plain numbers. Python's other conversions are refused.

    Attributes:
        value: the plain number.
        axes: the axes along which ranks have different numbers.
    """

    __slots__ = ("axes", "value")
    __array_ufunc__ = None  # numpy leaves operators to this class

    def __init__(self, value: Any, axes: tuple[str, ...]) -> None:
        self.value, self.axes = value, axes

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch on plain numbers, where values are not followed."""
        del kinds
        with DisableTorchFunctionSubclass():
            return func(*with_plain_numbers(args), **with_plain_numbers(kwargs or {}))

    def item(self) -> Any:
        """Returns the plain number, for use on this rank only."""
        return self.value

    def __int__(self) -> int:
        """Returns the plain number, for use on this rank only."""
        return int(self.value)

    def __bool__(self) -> bool:
        """Refuses the truth of an index, as ranks would take different branches."""
        self._refuse_conversion(
            "the truth of a number made of sf.axis_index",
            "they would go different ways, and a number that max, min or if chooses by it would count as the same on"
            " all ranks. Compute with it: a comparison is 0 or 1, so that max(0, i - 1) is (i - 1) * (i > 0)",
        )

    def __index__(self) -> int:
        """Refuses an index of a list, as the element would count as the same on all ranks."""
        self._refuse_conversion(
            "an index, a length or a range by a number made of sf.axis_index",
            "an element that is chosen by it would count as the same on all ranks. Index a tensor: for numbers xs,"
            " torch.tensor(xs)[i]; for x.chunk(n)[i] a slice of x",
        )

    def __float__(self) -> float:
        """Refuses a float, as the result of a function of `math` would count as the same on all ranks."""
        self._refuse_conversion(
            "the float of a number made of sf.axis_index",
            "a float, and a result of math, would count as the same on all ranks. Compute with i * 1.0, and by torch:"
            " math.sin(i) is torch.tensor(i).sin()",
        )

    __complex__ = __float__

    def __invert__(self) -> "AxisNumber":
        """Returns the opposite of a comparison, and `~` of an integer."""
        return AxisNumber(not self.value if isinstance(self.value, bool) else ~self.value, self.axes)

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        """Returns a power."""
        if modulus is not None:
            return self**other % modulus
        return _apply_operator(operator.pow, self, other)

    def __round__(self, ndigits: int | None = None) -> "AxisNumber":
        """Returns a rounded number."""
        return AxisNumber(round(self.value, ndigits), self.axes)

    def __hash__(self) -> int:
        """Returns the hash of the plain number."""
        return hash(self.value)

    def __repr__(self) -> str:
        """Returns the plain number as text."""
        return repr(self.value)

    def __format__(self, spec: str) -> str:
        """Returns the plain number as text."""
        return format(self.value, spec)

    def _refuse_conversion(self, what: str, why: str) -> NoReturn:
        raise AxisTypeError(
            f"{what} differs between ranks along {', '.join(map(repr, self.axes))}: {why}. Where only this rank's own"
            " affairs depend on it, such as its prints, take int(i), a plain number."
        )


def plain(x: Any) -> Any:
    """Returns a number without axes. Any other value is returned unchanged.

    Example:
        >>> plain(AxisNumber(1, ("dp",)) > 0)
        True
    """
    return x.value if type(x) is AxisNumber else x


def with_plain_numbers(x: Any) -> Any:
    """Returns arguments of a function, with numbers without axes.

    Example:
        >>> with_plain_numbers(([AxisNumber(1, ("dp",)), 2], {"dim": 0}))
        ([1, 2], {'dim': 0})
    """
    kind = type(x)
    if kind is tuple or kind is list:
        return kind(map(with_plain_numbers, x))
    if kind is dict:
        return {k: with_plain_numbers(y) for k, y in x.items()}
    return slice(*map(plain, (x.start, x.stop, x.step))) if kind is slice else plain(x)


def _apply_operator(f: Callable[..., Any], *operands: Any) -> Any:
    """Returns `f` of numbers, as numbers along all their axes; NotImplemented for other operands."""
    axes: dict[str, None] = {}
    for x in operands:
        if type(x) is AxisNumber:
            axes.update(dict.fromkeys(x.axes))
        elif not isinstance(x, numbers.Number):
            return NotImplemented
    out = f(*map(plain, operands))
    if type(out) is tuple:  # of divmod
        return tuple(AxisNumber(y, tuple(axes)) for y in out)
    return AxisNumber(out, tuple(axes))


def _make_method(f: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    if swapped:
        return lambda self, other: _apply_operator(f, other, self)
    return lambda self, *rest: _apply_operator(f, self, *rest)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor"):
    _f = getattr(operator, f"__{_name}__")
    setattr(AxisNumber, f"__{_name}__", _make_method(_f))
    setattr(AxisNumber, f"__r{_name}__", _make_method(_f, swapped=True))
AxisNumber.__rpow__ = _make_method(operator.pow, swapped=True)  # pyright: ignore[reportAttributeAccessIssue]
AxisNumber.__divmod__ = _make_method(divmod)  # pyright: ignore[reportAttributeAccessIssue]
AxisNumber.__rdivmod__ = _make_method(divmod, swapped=True)  # pyright: ignore[reportAttributeAccessIssue]
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs"):
    setattr(AxisNumber, f"__{_name}__", _make_method(getattr(operator, _name)))
for _f in (math.floor, math.ceil, math.trunc):
    setattr(AxisNumber, f"__{_f.__name__}__", _make_method(_f))
