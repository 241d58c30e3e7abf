"""`distributed`: a test function on N ranks.

Ranks are processes on this machine with gloo between them, one thread each. Ranks come from a pool that lives as long
as the test session, since importing torch takes seconds. A call costs milliseconds.
"""

import functools
import inspect
import pathlib
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from ._pool import call


@runtime_checkable
class Param(Protocol):
    """A `pytest.param`: a number of ranks with marks."""

    @property
    def values(self) -> Sequence[Any]: ...


def distributed(world: int | Sequence[int | Param], timeout: float = 180.0) -> Callable[[Callable[..., Any]], Any]:
    """Runs a module-level function on every rank of a new world.

    The call `f(*args)` becomes `[f(*args) on rank 0, ..., f(*args) on rank N-1]`, each in a process that has a fresh
    default process group (none when N is 1) and the seed 0. Arguments, fixtures among them, and return values travel by
    pickle. The worker imports the function from its file, so nothing at module level may depend on the caller.

    Args:
        world: the number of ranks N, or several numbers, for which pytest runs the test one by one (a direct call then
            names a number with `world=`). A parameter called `world` receives the number. A number with marks is a
            `pytest.param(4, marks=pytest.mark.slow)`.
        timeout: limit in seconds for all ranks together.

    Returns:
        A decorator. The decorated function returns the list of the ranks' values, or None when every rank returned
        None. It raises the error of the rank that failed first, of the same type if the error can be pickled, with the
        rank's number and traceback as a note; `pytest.skip` in any rank skips. A dead rank is a `RankError`. Ranks that
        do not end in time, as in a deadlock, are a `TimeoutError` with the stack of each.

    Raises:
        ValueError: the function is not at module level, or a world is less than 1.

    Example:
        >>> @distributed(world=2)  # doctest: +SKIP
        ... def test_sum(tmp_path):
        ...     x = torch.ones(())
        ...     torch.distributed.all_reduce(x)
        ...     assert x == 2
    """
    params = [world] if isinstance(world, int) else list(world)
    worlds = [n if isinstance(n, int) else n.values[0] for n in params]
    if not worlds or min(worlds) < 1:
        raise ValueError(f"distributed(world={world!r}): a world has 1 rank or more.")

    def decorate_test(function: Callable[..., Any]) -> Any:
        signature = inspect.signature(function)
        takes_world = "world" in signature.parameters
        task = _find_task(function)

        @functools.wraps(function)
        def run_ranks(*args: Any, **kwargs: Any) -> list[Any] | None:
            n = worlds[0] if isinstance(world, int) else kwargs.pop("world", None)
            if n is None:
                raise TypeError(f"{task['qualname']} must get world=, one of {worlds} ranks.")
            kwargs |= {"world": n} if takes_world else {}
            data = _check_pickles(task["qualname"], signature.bind(*args, **kwargs))
            values = call(n, timeout, task["qualname"], {**task, "arguments": data})
            return None if all(v is None for v in values) else values

        vars(run_ranks)["__distributed__"] = function
        vars(run_ranks)["__signature__"] = _pytest_signature(signature, several=not isinstance(world, int))
        return run_ranks if isinstance(world, int) else _parametrize_world(run_ranks, params)

    return decorate_test


def _find_task(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the file and name by which a worker finds the function."""
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if file is None or "<" in function.__qualname__:
        raise ValueError(
            f"distributed: {function.__qualname__} must be at the module level of a file, so that other processes can"
            " import it."
        )
    return {
        "module": function.__module__,
        "file": str(pathlib.Path(file).resolve()),
        "qualname": function.__qualname__,
        "rewrite": "_pytest.assertion" in sys.modules,
    }


def _check_pickles(what: str, bound: inspect.BoundArguments) -> bytes:
    problems = []
    for name, value in bound.arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            problems.append(f"  - {name} = {value!r}: {error}")
    if problems:
        lines = "\n".join(problems)
        raise TypeError(f"{what}: arguments travel to the ranks by pickle, and these cannot:\n{lines}")
    return pickle.dumps((bound.args, bound.kwargs))


def _pytest_signature(signature: inspect.Signature, several: bool) -> inspect.Signature:
    """Returns the signature without `world`, or with it where pytest is to fill it in."""
    kept = [p for p in signature.parameters.values() if p.name != "world"]
    if several:
        at = next((i for i, p in enumerate(kept) if p.kind is p.VAR_KEYWORD), len(kept))
        kept.insert(at, inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY))
    return signature.replace(parameters=kept)


def _parametrize_world(run: Callable[..., Any], worlds: Sequence[int | Param]) -> Any:
    try:
        import pytest
    except ModuleNotFoundError:  # a plain script on a machine without pytest
        return run
    return pytest.mark.parametrize("world", worlds)(run)
