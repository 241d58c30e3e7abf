"""Shared parts of tables of mistakes: their rows, the checks of these, and a step of one leaf to make them with."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.core import tree_leaves

# The mesh of all mistakes of a test on several ranks.
_SHARED: list[sf.Mesh] = []


class Mistake(NamedTuple):
    """A mistake of a user, and its error.

    The message has both texts; in them " ... " is any text between, and a line ends with a newline.

    Attributes:
        sentence: the mistake, as the name of its test.
        call: makes it.
        error: the kind of error or warning.
        names: the argument or leaf, and the values that disagree.
        remedy: the correction.
    """

    sentence: str
    call: Callable[[], Any]
    error: type[Exception] | tuple[type[Exception], ...]
    names: str
    remedy: str


def cases(mistakes: Sequence[Mistake]) -> list[Any]:
    """The rows of a table as parameters of a test; two in three run at night."""
    night = pytest.mark.nightly
    return [pytest.param(row, id=row.sentence, marks=night if i % 3 else ()) for i, row in enumerate(mistakes)]


def check(mistake: Mistake) -> None:
    """Fails unless a mistake's error is of its kind and has its texts."""
    assert (fault := _fault_of(mistake)) is None, fault


def check_on_all_ranks(mistakes: Sequence[Mistake], axes: Mapping[str, int] | None = None) -> None:
    """Makes all mistakes on one mesh of the program's ranks: none waits for another, and each has the error."""
    with sf.make_mesh(axes, device="cpu") as mesh:
        _SHARED[:] = [mesh]
        faults = [fault for row in mistakes if (fault := _fault_of(row)) is not None]
        _SHARED.clear()
    assert not faults, "\n".join(faults)


def mesh_of() -> sf.Mesh:
    """The mesh of a mistake."""
    return _SHARED[0] if _SHARED else sf.make_mesh()


def loss_of(params: dict, batch: dict) -> Tensor:
    return ((batch["x"] @ params["w"]) ** 2).mean()


def params_of() -> dict:
    return {"w": torch.ones(3, 2)}


def batch_of() -> dict:
    return {"x": torch.ones(4, 3)}


def made(loss: Any = loss_of, optimizer: Any = None, **options: Any) -> Any:
    return sf.sharded_step(loss, optimizer or sf.optim.adamw(0.1), **{"mesh": mesh_of(), **options})


def begun(loss: Any = loss_of, **options: Any) -> tuple[Any, Any]:
    step = made(loss, **options)
    return step, step.init(params_of())


def run(loss: Any = loss_of, params: Any = None, batch: Any = None, **options: Any) -> Any:
    """One step; a refused one leaves the state as it is."""
    step = made(loss, **options)
    state = step.init(params_of() if params is None else params)
    try:
        return step(state, batch_of() if batch is None else batch)
    except Exception as error:
        if any(x.donated for x in tree_leaves(state.params)):
            raise AssertionError("the refused call has consumed the state") from error
        raise


def using(use: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    """Uses a step and a first state."""
    return lambda: use(*begun())


def after_a_step(use: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    """Uses a step and a state that it has consumed."""

    def call() -> Any:
        step, state = begun()
        step(state, batch_of())
        return use(step, state)

    return call


def _fault_of(mistake: Mistake) -> str | None:
    with sys.modules["shape_checks"].unchecked(), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            mistake.call()
        except mistake.error as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ()), ""])
        except Exception as error:
            return f"{mistake.sentence}: {type(error).__name__}, not {mistake.error}: {error}"
        else:
            return f"{mistake.sentence}: there is no error"
    missing = [part for part in (mistake.names, mistake.remedy) if not _is_in(part, text)]
    return f"{mistake.sentence}: {missing} not in: {text}" if missing else None


def _is_in(part: str, text: str) -> bool:
    """Whether the pieces of a part follow one another in a text."""
    at = 0
    for piece in part.split(" ... "):
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True
