"""Random number that a forward requests and mostly does not need."""

from typing import Any


class Undrawn:
    """Uniform number in [0, 1) that cannot be drawn for lack of a key.

    Models draw such a number for each layer in every configuration, and compare the number with the rate of skipped
    layers, most often 0. A comparison with the same result for all numbers in [0, 1) gives the result, for example `x <
    0`. Any other use is an error.

    Args:
        remedy: words for the way to give a key.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy

    def __lt__(self, other: Any) -> bool:
        return self._compare_known("<", other)

    def __ge__(self, other: Any) -> bool:
        return not self._compare_known(">=", other)

    def _compare_known(self, sign: str, other: Any) -> bool:
        """Returns whether the number is less than `other`, if equal for all numbers in [0, 1)."""
        if isinstance(other, int | float) and not 0 < other < 1:
            return other >= 1
        return self._raise_undrawn(f"asks whether it {sign} {other!r}")

    def __gt__(self, other: Any) -> bool:
        return self._raise_undrawn(f"asks whether it > {other!r}")

    def __le__(self, other: Any) -> bool:
        return self._raise_undrawn(f"asks whether it <= {other!r}")

    def _raise_undrawn(self, what: str) -> Any:
        raise ValueError(
            f"the forward of the module draws a number from torch's generator (rand) and {what}: ranks, or a"
            f" recomputation, would get different ones. Draw by a key: {self._remedy}; or turn off the random parts"
            " (module.eval(), or its option in the model's configuration)."
        )

    def __getattr__(self, name: str) -> Any:
        return self._raise_undrawn(f"takes its {name}")

    def __bool__(self) -> bool:
        return self._raise_undrawn("branches on it")

    def __float__(self) -> float:
        return self._raise_undrawn("takes its value")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        found = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Undrawn))
        return found._raise_undrawn(f"gives it to {getattr(func, '__name__', func)}")
