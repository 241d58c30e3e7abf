"""Events: the only input from outside. Rank 0 numbers events, and all ranks take the same events in the same step."""

from dataclasses import dataclass
from typing import Any

from ._requests import Request


@dataclass(frozen=True)
class Add:
    """Arrival of a request, under a name that no request in progress has.

    Example:
        >>> Add(0, "a", Request((1, 2))).name
        'a'
    """

    number: int
    name: str
    request: Request


@dataclass(frozen=True)
class Cancel:
    """End of a request as "cancelled", in any phase. An unknown name, for example of a finished request, is ignored.

    Tokens that the last plan has drawn come before the end. A request whose last token is drawn has ended by that
    token.

    Example:
        >>> Cancel(1, "a").name
        'a'
    """

    number: int
    name: str


@dataclass(frozen=True)
class Clock:
    """Clock of rank 0, in milliseconds. No other rank reads a clock.

    Example:
        >>> Clock(2, 1500).time
        1500
    """

    number: int
    time: int


@dataclass(frozen=True)
class Weights:
    """Change of the parameters to a larger version. Cached blocks of another version are never hit.

    Args:
        number: number of the event.
        version: version of the new parameters.
        recompute: whether requests in progress continue under the new version at once, with their KV cache recomputed
            and drawn tokens kept. False ends requests that have begun under the old version first. No other request
            begins until then.

    Example:
        >>> Weights(3, version=1).recompute
        True
    """

    number: int
    version: int
    recompute: bool = True


@dataclass(frozen=True)
class Drain:
    """Requests that arrive from now on end as "refused". Requests in progress continue.

    Example:
        >>> Drain(4).number
        4
    """

    number: int


@dataclass(frozen=True)
class Stop:
    """End of a choice, by its text, with the token that the last plan drew for a position.

    Args:
        number: number of the event.
        name: name of the request.
        choice: choice of the request.
        at: position of the token in its sequence.
        finish_reason: "stop" where a stop string or a grammar is complete, "error" where the token is not in the
            grammar. Such a token is dropped.

    Example:
        >>> Stop(5, "a", choice=0, at=7).at
        7
    """

    number: int
    name: str
    choice: int
    at: int
    finish_reason: str = "stop"


def check_time(time: Any) -> None:
    """Refuses a reading of the clock that is not an integer of 63 bits.

    Raises:
        ValueError: the reading is another value.
    """
    if type(time) is not int or not 0 <= time < 1 << 63:
        raise ValueError(f"time must be an integer from 0 to {(1 << 63) - 1}, in milliseconds, got {time!r}.")


Event = Stop | Add | Cancel | Clock | Weights | Drain
