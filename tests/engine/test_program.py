"""Covers shardfn/engine/execution/_program.py: a graph computes what its program computes eagerly; notes of graphs."""

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.collectives import GlobalTensor
from shardfn.core import tree_structure
from shardfn.engine import Planner
from shardfn.engine.execution._program import Input, Program, ProgramResults, capture_program
from shardfn.engine.loss import NoGradientError
from shardfn.graph import Leaf


def _program(differentiated: bool | None = None) -> tuple[Program, torch.Tensor, torch.Tensor]:
    mesh = sf.make_mesh({"dp": 1})
    plan = Planner(mesh, sf.P(), sf.P("dp"), sf.Zero(), True, None).plan(tree_structure(0), [torch.empty(2)])
    w, x = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])

    def run(plan: Any, comms: Any, values: list[Any]) -> ProgramResults:
        held, given = values
        tree = {"sum": held + given, "name": "a constant", "same": GlobalTensor(given * 2, given.shape, sf.P(), mesh)}
        return ProgramResults(tree, {"most": given.max()}, differentiated)

    inputs = [
        Input("w", "params", GlobalTensor(w, w.shape, sf.P(), mesh), (), trained=True, donated=True),
        Input("x", "batch", x, ("dp",), on_host=True),
    ]
    return Program(plan, inputs, run, lambda found: [("sum", ()), ("same", ()), ("most", ())]), w, x


def test_the_outputs_of_a_graph_become_the_results_of_the_eager_program() -> None:
    program, w, x = _program()
    nobody: Any = None  # the program sends nothing
    want, captured = program.run(program.plan, nobody, [w, x]), capture_program(program)
    got = captured.results(captured.gm(w, x))
    assert got.tree["name"] == "a constant" and got.tree["same"].spec == sf.P()
    torch.testing.assert_close(got.tree["sum"], want.tree["sum"], rtol=0, atol=0)
    torch.testing.assert_close(got.tree["same"].local, want.tree["same"].local, rtol=0, atol=0)
    assert got.metrics == {"most": want.metrics["most"]}
    assert captured.abstract_result()["sum"].shape == (2,)


def test_a_graph_notes_its_inputs_and_its_results() -> None:
    gm = capture_program(_program()[0]).gm
    w, x = (n for n in gm.graph.nodes if n.op == "placeholder")
    assert (w.meta["leaf"], w.meta["kind"], w.meta["memory"]) == ("w", "params", "device")
    assert (x.meta["leaf"], x.meta["kind"], x.meta["memory"]) == ("x", "batch", "host")
    assert (w.meta["enters"], x.meta["enters"]) == (Leaf("w", (), trained=True), Leaf("x", ("dp",)))
    assert gm.meta["donated"] == {w.name} and [name for name, _ in gm.meta["results"]] == ["sum", "same", "most"]


def test_a_loss_without_a_gradient_on_any_rank_is_refused() -> None:
    capture_program(_program(differentiated=True)[0]).check(lambda mine: [mine, 0])
    with pytest.raises(NoGradientError):
        capture_program(_program(differentiated=False)[0]).check(lambda mine: [mine, 0])
