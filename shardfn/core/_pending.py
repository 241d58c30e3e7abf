"""`Pending`: a value under way, whatever it is waiting for: other ranks, another memory, another thread."""

from collections.abc import Callable
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class Pending(Generic[T_co]):
    """A value on its way. Its source must not change until it has arrived.

    Whoever starts something gives one back; whoever wants the value asks for it once. It may be asked on any thread,
    but of two threads one at a time.

    Args:
        result: waits, and gives the value or raises what went wrong on the way; None in a subclass that overrides
            `result` and `done`. (One that passed its own methods would hold itself, and so what it waits for.)
        done: tells without waiting; default: nobody can tell.
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
        """A value that is here already."""
        return Pending(lambda: value, _yes)

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once; False where nobody can tell."""
        return self._done is not None and self._done()

    def result(self) -> T_co:
        """The value; waits for it.

        For a tensor on an accelerator the current stream is made to wait, not the caller.

        Raises:
            Exception: whatever went wrong on the way.
        """
        assert self._result is not None
        return self._result()

    def wait(self) -> None:
        """Waits until what it comes from may be overwritten."""
        (self._left or self.result)()

    def then(self, f: Callable[[T_co], U]) -> "Pending[U]":
        """The same, whose value is `f` of what arrives; `f` runs where the value is asked for."""
        return Pending(lambda: f(self.result()), self.done, self.wait)


def _yes() -> bool:
    return True
