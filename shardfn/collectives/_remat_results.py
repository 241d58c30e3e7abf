"""Results of transfers that a caller around may keep, in place of a second transfer in a recomputation.

A keeper sees the result of each primitive that sends something, whole: the operations that pack and unpack messages are
no part of the function. `as_one` joins the transfers of a single collective: a name then means the collective's value.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from shardfn.core import Ambient

T = TypeVar("T")


@runtime_checkable
class RematResults(Protocol):
    """Keeper of results of transfers: `remat` with a policy, for example."""

    def transfer(self, name: str, run: Callable[[], Tensor]) -> Tensor:
        """Returns the result of a transfer: `run()`, or the result that was kept."""
        ...

    def joined(self, run: Callable[[], T]) -> T:
        """Returns `run()`. The transfers inside belong to the returned tensor, or to the first of several."""
        ...


_KEEPER = Ambient[RematResults]("a keeper of results of transfers", by_thread=True)


def keep_remat_results(keeper: RematResults) -> AbstractContextManager[RematResults]:
    """Shows the transfers of this thread to a keeper, which passes transfers on to `current_remat_results`."""
    return _KEEPER.bound(keeper)


def current_remat_results() -> RematResults | None:
    """Returns the keeper that sees the transfers now."""
    return _KEEPER.innermost()


def transferred(name: str, run: Callable[[], Tensor]) -> Tensor:
    """Returns the result of a transfer."""
    keeper = _KEEPER.innermost()
    return run() if keeper is None else keeper.transfer(name, run)


def as_one(run: Callable[[], T]) -> T:
    """Returns the value of a collective that is made of transfers and other operations."""
    keeper = _KEEPER.innermost()
    return run() if keeper is None else keeper.joined(run)


def joined(f: Callable[..., T]) -> Callable[..., T]:
    """Returns a function made of transfers as a single collective."""

    @functools.wraps(f)
    def one(*args: Any) -> T:
        return as_one(functools.partial(f, *args))

    return one
