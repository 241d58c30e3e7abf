"""Numbers that remember the axes along which they differ: `axis_index`, and results computed from it."""

import operator
from collections.abc import Callable
from typing import Any, NoReturn


class AxisTypeError(TypeError):
    """A value varies along an axis where it must not: a collective is missing, or one is applied twice."""


class AxisIndex(int):
    """A rank's index along axes, or an integer computed from it; otherwise an `int`.

    Attributes:
        axes: along which ranks have other numbers.
    """

    axes: tuple[str, ...]

    def __new__(cls, value: int, axes: tuple[str, ...]) -> Any:
        """An index along `axes`."""
        out = super().__new__(cls, value)
        out.axes = axes
        return out

    __hash__ = int.__hash__

    def __bool__(self) -> bool:
        """Refuses, as ranks would go different ways."""
        _refuse_truth(self.axes)


class AxisTruth(AxisIndex):
    """A comparison of such a number: 0 or 1, and for torch a boolean."""

    def __invert__(self) -> "AxisTruth":
        """The opposite."""
        return AxisTruth(not int(self), self.axes)


class AxisFloat(float):
    """A float that is computed from an index.

    Attributes:
        axes: along which ranks have other numbers.
    """

    axes: tuple[str, ...]

    def __new__(cls, value: float, axes: tuple[str, ...]) -> Any:
        """A number along `axes`."""
        out = super().__new__(cls, value)
        out.axes = axes
        return out

    __hash__ = float.__hash__

    def __bool__(self) -> bool:
        """Refuses, as ranks would go different ways."""
        _refuse_truth(self.axes)


AXIS_NUMBERS = (AxisIndex, AxisTruth, AxisFloat)


def plain(x: Any) -> Any:
    """A number without its axes; any other value unchanged.

    Example:
        >>> plain(AxisIndex(1, ("dp",)) > 0)
        True
    """
    kind = type(x)
    if kind is AxisTruth:
        return int(x) == 1
    return int(x) if kind is AxisIndex else float(x) if kind is AxisFloat else x


def _refuse_truth(axes: tuple[str, ...]) -> NoReturn:
    raise AxisTypeError(
        f"the truth of a number made of sf.axis_index differs between ranks along {', '.join(map(repr, axes))}: they"
        " would go different ways, and a number that max, min or if chooses by it would count as the same on all ranks."
        " Compute with it: a comparison is 0 or 1, so that max(0, i - 1) is (i - 1) * (i > 0). Where only this rank's"
        " own affairs depend on it, such as its prints, take int(i), a plain number."
    )


def _carrying(value: Any, axes: tuple[str, ...]) -> Any:
    kind = {bool: AxisTruth, int: AxisIndex, float: AxisFloat}.get(type(value))
    return value if kind is None else kind(value, axes)


def _binary(f: Callable[[Any, Any], Any], *, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        axes = (*self.axes, *(a for a in getattr(other, "axes", ()) if a not in self.axes))
        a, b = plain(self), plain(other)
        return _carrying(f(b, a) if swapped else f(a, b), axes)

    return method


def _unary(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: _carrying(f(plain(self)), self.axes)


for _kind in (AxisIndex, AxisFloat):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor"):
        if hasattr(_kind, f"__r{_name}__"):
            _f = getattr(operator, f"__{_name}__")
            setattr(_kind, f"__{_name}__", _binary(_f))
            setattr(_kind, f"__r{_name}__", _binary(_f, swapped=True))
    for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(_kind, f"__{_name}__", _binary(getattr(operator, _name)))
    for _name in ("neg", "pos", "abs", "invert"):
        if hasattr(_kind, f"__{_name}__"):
            setattr(_kind, f"__{_name}__", _unary(getattr(operator, _name)))
