"""Shared parts of tests of mistakes: a step of one leaf, and the check that an error has its cause and its remedy."""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim

# The mesh of all mistakes of a test that makes many.
_SHARED: list[sf.Mesh] = []


class Mistake(NamedTuple):
    """An action of a user, and the error that comes: its kind, its cause and its remedy."""

    does: Callable[[], Any]
    kind: type[Exception]
    cause: str
    remedy: str


def loss_of(params: dict, batch: dict) -> Tensor:
    return ((batch["x"] @ params["w"]) ** 2).mean()


def params_of() -> dict:
    return {"w": torch.ones(3, 2)}


def batch_of() -> dict:
    return {"x": torch.ones(4, 3)}


def mesh_of() -> sf.Mesh:
    return _SHARED[0] if _SHARED else sf.make_mesh()


def made(loss: Any = loss_of, optimizer: Any = None, **options: Any) -> Any:
    return sf.sharded_step(loss, optimizer or optim.adamw(0.1), **{"mesh": mesh_of(), **options})


def begun(loss: Any = loss_of, **options: Any) -> tuple[Any, Any]:
    step = made(loss, **options)
    return step, step.init(params_of())


def run(loss: Any = loss_of, params: Any = None, batch: Any = None, **options: Any) -> Any:
    step = made(loss, **options)
    return step(step.init(params_of() if params is None else params), batch_of() if batch is None else batch)


def using(use: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    """Uses a step and a first state."""
    return lambda: use(*begun())


def problem_of(mistakes: Mapping[str, Mistake], name: str) -> str | None:
    """The fault of a mistake's error; None without one."""
    does, kind, cause, remedy = mistakes[name]
    with sys.modules["shape_checks"].unchecked(), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            does()
        except kind as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        except Exception as error:
            return f"{name}: {type(error).__name__}, not {kind.__name__}: {error}"
        else:
            return f"{name}: there is no error"
    missing = [part for part in (cause, remedy) if part not in text]
    return f"{name}: {missing} not in: {text}" if missing else None


def problems_on_one_mesh(mistakes: Mapping[str, Mistake], names: Iterable[str]) -> list[str]:
    """The faults of many mistakes' errors, on one mesh of the program's ranks."""
    with sf.make_mesh(device="cpu") as mesh:
        _SHARED[:] = [mesh]
        problems = [problem for name in names if (problem := problem_of(mistakes, name)) is not None]
        _SHARED.clear()
    return problems
