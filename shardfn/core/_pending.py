"""`Pending`: a value under way from other ranks, another memory or another thread."""

from collections.abc import Callable
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class Pending(Generic[T_co]):
    """Value on its way. The source must not change until the value has arrived.

    The function that starts a transfer returns a `Pending`. The caller asks for the value once. Any thread may ask, but
    only a single thread at a time.

    Args:
        result: function that waits, and returns the value or raises the transfer's error. None in a subclass that
            overrides `result` and `done`. (A subclass that passed methods would hold itself, and so the sources.)
        done: function that returns whether the value has arrived, without waiting. Default: unknown, thus False.
        left: function that waits until the source may be overwritten. Default: waits for the value.

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
        """Returns whether `result` would return, or raise, at once. False if unknown."""
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
