"""`axis_index` as a number that remembers the axes along which ranks have different ones."""

import operator
from collections.abc import Callable
from typing import Any


class AxisIndex(int):
    """A rank's index along axes, or a number computed from it; otherwise an `int`.

    Attributes:
        axes: along which ranks have other numbers.
    """

    axes: tuple[str, ...]

    def __new__(cls, value: int, axes: tuple[str, ...]) -> "AxisIndex":
        """An index along `axes`."""
        out = super().__new__(cls, value)
        out.axes = axes
        return out

    def __neg__(self) -> "AxisIndex":
        """Minus the number."""
        return AxisIndex(-int(self), self.axes)


def _arithmetic(f: Callable[[int, int], int], *, swapped: bool) -> Callable[[AxisIndex, Any], Any]:
    def method(self: AxisIndex, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        axes = (*self.axes, *(a for a in getattr(other, "axes", ()) if a not in self.axes))
        return AxisIndex(f(int(other), int(self)) if swapped else f(int(self), int(other)), axes)

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(AxisIndex, f"__{_name}__", _arithmetic(getattr(operator, _name), swapped=False))
    setattr(AxisIndex, f"__r{_name}__", _arithmetic(getattr(operator, _name), swapped=True))
