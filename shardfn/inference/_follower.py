"""The hooks by which texts, grammars, embeddings, adapters and routes follow an engine's requests, beside the schedule.

A step calls each hook of all followers before the next one, in the order of their fields, from `ends` on.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ._drawn import Drawn, Ends
from ._plan import Plan
from ._requests import Request
from ._runner import Results
from ._schedule import Output
from ._state import State


def _do_nothing(*given: Any) -> None:
    del given


def _return_empty(*given: Any) -> dict[Any, Any]:
    del given
    return {}


class Follower(NamedTuple):
    """Hooks. `Follower()` is the identity. They are pure functions of calls that all ranks make alike.

    Attributes:
        admit: refuses a request, or returns a value for `begin`. The request may never begin.
        begin: takes the name of a request that begins, and that value.
        ends: the ends of choices with tokens that were drawn. It has those that earlier followers have found.
        before: takes the state before the schedule takes these tokens.
        moved: takes the moves of keys and values that the next step begins with.
        fields: fields of the `Token` of an output.
        take: takes the outputs of the last plan.
        columns: the arguments of `Runner.run` for the next plan.
        ran: takes that plan and its results.
    """

    admit: Callable[[Request], Any] = _do_nothing
    begin: Callable[[str, Any], None] = _do_nothing
    ends: Callable[[Sequence[Drawn], Ends], Ends] = _return_empty
    before: Callable[[State], None] = _do_nothing
    moved: Callable[[Sequence[tuple[int, int]]], None] = _do_nothing
    fields: Callable[[Output], dict[str, Any]] = _return_empty
    take: Callable[[Sequence[Output]], None] = _do_nothing
    columns: Callable[[State, Plan], dict[str, Any]] = _return_empty
    ran: Callable[[Plan, Results], None] = _do_nothing


def together(followers: Sequence[Follower]) -> Follower:
    """One follower that calls each hook of several, in their order.

    Example:
        >>> first = Follower(ends=lambda drawn, ends: {("a", 0, 5): "stop"})
        >>> second = Follower(ends=lambda drawn, ends: {("b", 0, 7): "stop"} if ends else {})
        >>> together([first, second]).ends([], {})
        {('a', 0, 5): 'stop', ('b', 0, 7): 'stop'}
    """

    def begin_each(name: str, admitted: Sequence[Any]) -> None:
        for one, value in zip(followers, admitted, strict=True):
            one.begin(name, value)

    def find_ends(drawn: Sequence[Drawn], found: Ends) -> Ends:
        new: Ends = {}
        for one in followers:
            new |= one.ends(drawn, found | new)
        return new

    def call_each(hook: str) -> Callable[..., None]:
        def call_hooks(*given: Any) -> None:
            for one in followers:
                getattr(one, hook)(*given)

        return call_hooks

    def join_results(hook: str) -> Callable[..., dict[str, Any]]:
        return lambda *given: {k: v for one in followers for k, v in getattr(one, hook)(*given).items()}

    return Follower(
        admit=lambda request: [one.admit(request) for one in followers],
        begin=begin_each,
        ends=find_ends,
        before=call_each("before"),
        moved=call_each("moved"),
        fields=join_results("fields"),
        take=call_each("take"),
        columns=join_results("columns"),
        ran=call_each("ran"),
    )
