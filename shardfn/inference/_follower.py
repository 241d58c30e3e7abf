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


def _nothing(*given: Any) -> None:
    del given


def _empty(*given: Any) -> dict[Any, Any]:
    del given
    return {}


class Follower(NamedTuple):
    """Hooks; `Follower()` is the identity. They are pure functions of calls that all ranks make alike.

    Attributes:
        admit: refuses a request, or returns a value for `begin`; the request may never begin.
        begin: takes the name of a request that begins, and that value.
        ends: the ends of choices with tokens that were drawn; it has those that earlier followers have found.
        before: takes the state before the schedule takes these tokens.
        fields: of the `Token` of an output.
        take: takes the outputs of the last plan.
        columns: the arguments of `Runner.run` for the next plan.
        ran: takes that plan and its results.
    """

    admit: Callable[[Request], Any] = _nothing
    begin: Callable[[str, Any], None] = _nothing
    ends: Callable[[Sequence[Drawn], Ends], Ends] = _empty
    before: Callable[[State], None] = _nothing
    fields: Callable[[Output], dict[str, Any]] = _empty
    take: Callable[[Sequence[Output]], None] = _nothing
    columns: Callable[[State, Plan], dict[str, Any]] = _empty
    ran: Callable[[Plan, Results], None] = _nothing
