"""Covers shardfn/engine/step/_run_call.py: the order in which a call is admitted, agreed on, run and finished."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import shardfn as sf
from shardfn.collectives import Agreed, Constant, current_mesh
from shardfn.engine.step._run_call import AdmittedCall, run_call


class Case:
    """A call that notes its parts, each with whether the mesh is bound."""

    def __init__(self) -> None:
        self.mesh = sf.make_mesh({"dp": 1})
        self.log: list[tuple[str, bool]] = []

    def note(self, part: str) -> None:
        self.log.append((part, current_mesh() is self.mesh))

    def admit(self) -> AdmittedCall:
        self.note("admit")

        def then(control: Any, agreed: Agreed) -> list[Agreed]:
            self.note("then")
            return [agreed]

        def run(comms: Any, agreed: list[Agreed]) -> int:
            self.note("run")
            return len(agreed)

        def end(comms: Any, result: int) -> int:
            self.note("end")
            return result + 1

        return AdmittedCall("a call", Constant.of("facts"), run, (True, False), ("", ()), then, end, self.around)

    @contextlib.contextmanager
    def around(self, agreed: list[Agreed]) -> Iterator[None]:
        self.note("around")
        assert agreed == [Agreed(known=(True, False))]
        yield


def test_a_call_runs_with_the_mesh_bound_between_its_agreement_and_its_end() -> None:
    case = Case()
    assert run_call(case.mesh, case.admit) == 2
    parts = ("admit", False), ("then", False), ("around", False), ("run", True), ("end", False)
    assert case.log == list(parts)


def test_a_call_that_is_not_admitted_does_not_run() -> None:
    case = Case()

    def refuse() -> AdmittedCall:
        case.admit()
        raise ValueError("no rows")

    with pytest.raises(ValueError, match="no rows"):
        run_call(case.mesh, refuse)
    assert case.log == [("admit", False)]
