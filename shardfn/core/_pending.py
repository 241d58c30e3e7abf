"""`Pending`: a value under way from other ranks, another memory or another thread."""

from collections.abc import Callable
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class Pending(Generic[T_co]):
    """A value on its way. Its source must not change until it has arrived.

    The function that starts a transfer returns one; its caller asks for the value once. Any thread may ask, but only
    one at a time.

    Args:
        result: waits, and returns the value or raises the transfer's error, or None in a subclass that overrides
            `result` and `done`. (One that passed its own methods would hold itself, and so its sources.)
        done: whether the value has arrived, without waiting; default: unknown, thus False.
        left: waits until the source may be overwritten; default: when the value is there.

    Example:
        >>> Pending(lambda: 3).then(lambda x: x + 1).result()
        4
        >>> Pending.of(5).done()
        True
    """

    def __init__(
        self,
        result: Callable[[], T_co] | None = None,
        done: Callable[[], bool] | None = None,
        left: Callable[[], object] | None = None,
    ) -> None:
        self._result, self._done, self._left = result, done, left

    @staticmethod
    def of(value: U) -> "Pending[U]":
        """Returns a value that is here already."""
        return Pending(lambda: value, _is_done)

    def done(self) -> bool:
        """Returns whether `result` would return, or raise, at once, or False where this is unknown."""
        return self._done is not None and self._done()

    def result(self) -> T_co:
        """Returns the value, and waits for it.

        For a tensor on an accelerator the current stream is made to wait, not the caller.

        Raises:
            Exception: the transfer's error.
        """
        assert self._result is not None
        return self._result()

    def wait(self) -> None:
        """Waits until the source may be overwritten."""
        (self._left or self.result)()

    def then(self, f: Callable[[T_co], U]) -> "Pending[U]":
        """Returns the value `f(x)` of the arriving `x`. `f` runs where the value is asked for."""
        return Pending(lambda: f(self.result()), self.done, self.wait)


def _is_done() -> bool:
    return True
