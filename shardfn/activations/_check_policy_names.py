"""Warns if a function never assigns a name of its policy."""

import contextlib
import warnings
from collections.abc import Iterator

from shardfn.core import did_you_mean, hearing_names

from .policies import SavePolicy, names_of


@contextlib.contextmanager
def check_policy_names(who: str, policy: SavePolicy | None, done: list[None]) -> Iterator[None]:
    """Warns, around the first call of a function, of names of the policy that no value of the call has.

    Args:
        who: the transform.
        policy: the policy whose names are checked; None checks nothing.
        done: list of finished calls, empty before the first call.
    """
    names = () if policy is None else names_of(policy)
    if done or not names:
        yield
        return
    heard: dict[str, None] = {}
    with hearing_names(lambda x, name: heard.setdefault(name)):
        yield
    done.append(None)
    for name in names:
        if name not in heard:
            there = f"it has {', '.join(map(repr, heard))}" if heard else "it names none"
            warnings.warn(
                f"{who}: the policy goes by {name!r}, but no value of the function has the name ({there})."
                f"{did_you_mean(name, heard)} Name values where they are made, sf.checkpoint_name(x, {name!r}).",
                stacklevel=3,
            )
