"""Tokens that an engine's steps have returned, until the call that waits for them takes them."""

from collections.abc import Callable, Generator, Iterable
from typing import Any

from ._results import Token


class TokenQueues:
    """Tokens by the call that takes them: of `stream` and `generate` by request, and of `step` for all other requests.

    Args:
        step: function that runs a step, and returns the tokens of the last step.
        cancel: function that ends a request in progress.
        is_known: function that returns whether a request, such as "request-0", is in progress.
    """

    def __init__(
        self, step: Callable[[], list[Token]], cancel: Callable[[str], None], is_known: Callable[[str], bool]
    ) -> None:
        self._step, self._cancel, self._is_known = step, cancel, is_known
        self._awaited: dict[str, list[Token]] = {}
        self._others: list[Token] = []

    def __contains__(self, name: str) -> bool:
        return name in self._awaited

    @property
    def empty(self) -> bool:
        """Returns whether no token waits for a call of `step`."""
        return not self._others

    def advance(self) -> None:
        """Runs a step, and keeps the tokens."""
        tokens = self._step()
        if not self._awaited:
            self._others += tokens
            return
        for token in tokens:
            self._awaited.get(token.name, self._others).append(token)

    def take_others(self) -> list[Token]:
        """Returns the tokens of requests that no call waits for."""
        found, self._others = self._others, []
        return found

    def await_request(self, name: str) -> str:
        """Keeps the tokens of a request for `stream`, and returns the name."""
        self._awaited[name] = []
        return name

    def forget(self, names: Iterable[str]) -> None:
        """Ends requests whose tokens no call waits for any more."""
        for name in names:
            if self._awaited.pop(name, None) is not None and self._is_known(name):
                self._cancel(name)

    def stream(self, name: str, left: int) -> Generator[Token, None, None]:
        """Yields the tokens of a request up to the last of its choices to end, and steps in between."""
        tokens = self._begin_stream(name, left)
        next(tokens)  # the `finally` of a generator that has not begun never runs
        return tokens

    def _begin_stream(self, name: str, left: int) -> Generator[Any, None, None]:
        """Yields None once, then the tokens. Ends the request however the iterator ends."""
        try:
            yield None
            while left:
                while not self._awaited[name]:
                    self.advance()
                due, self._awaited[name] = self._awaited[name], []
                for token in due:
                    left -= token.finish_reason is not None
                    yield token
        finally:
            self.forget([name])
