"""Events: the only input from outside. Rank 0 numbers them, and all ranks take the same ones in the same step."""

from dataclasses import dataclass
from typing import Any

from ._requests import Request


@dataclass(frozen=True)
class Add:
    """A request arrives, under a name that no request in progress has.

    Example:
        >>> Add(0, "a", Request((1, 2))).name
        'a'
    """

    number: int
    name: str
    request: Request


@dataclass(frozen=True)
class Cancel:
    """A request ends as "cancelled", in any phase. An unknown name, such as of one that has ended, is passed over.

    Tokens that the last plan has drawn come before the end: one of them may be the last, so that the request has ended.

    Example:
        >>> Cancel(1, "a").name
        'a'
    """

    number: int
    name: str


@dataclass(frozen=True)
class Clock:
    """The clock of rank 0, in milliseconds. No rank reads a clock of its own.

    Example:
        >>> Clock(2, 1500).time
        1500
    """

    number: int
    time: int


@dataclass(frozen=True)
class Weights:
    """The parameters change, to a larger version. Cached blocks of another version are never hit.

    Args:
        number: number of the event.
        version: version of the new parameters.
        recompute: True lets requests in progress go on under the new version at once, with their cache recomputed;
            tokens drawn before remain. False ends those that have begun under the old version first. No other begins
            until then.

    Example:
        >>> Weights(3, version=1).recompute
        True
    """

    number: int
    version: int
    recompute: bool = True


@dataclass(frozen=True)
class Drain:
    """Requests that arrive from here on end as "refused". Those in progress go on.

    Example:
        >>> Drain(4).number
        4
    """

    number: int


@dataclass(frozen=True)
class Stop:
    """A choice ends with the token that the last plan drew for a position, because of its text.

    Args:
        number: number of the event.
        name: name of the request.
        choice: choice of the request.
        at: the position of the token in its sequence.
        finish: "stop" where a stop string is complete, or a grammar; "error" where the token, which is dropped, is not
            in the grammar.

    Example:
        >>> Stop(5, "a", choice=0, at=7).at
        7
    """

    number: int
    name: str
    choice: int
    at: int
    finish: str = "stop"


def check_time(time: Any) -> None:
    """Refuses a reading of the clock that is not an integer of 63 bits.

    Raises:
        ValueError: it is another value.
    """
    if type(time) is not int or not 0 <= time < 1 << 63:
        raise ValueError(f"time is {time!r}; it must be an integer from 0 to {(1 << 63) - 1}, in milliseconds.")


Event = Stop | Add | Cancel | Clock | Weights | Drain
