"""Covers shardfn/core/_progress.py, and the work that shows bars: on the first rank, on a terminal."""

import dataclasses
import io
import pathlib
import sys

import pytest
import torch

import shardfn as sf
from shardfn import checkpoint
from shardfn.cli import Setup, parse_model, search
from shardfn.core import progress
from shardfn.testing import distributed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """From here to the end of the test; a fixture would come before pytest's own file."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return found


def test_a_bar_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with progress(range(2, 5), initial=2, total=5, desc="training", unit="step") as bar:
        for n in bar:
            bar.set_postfix(at=n)
    shown = terminal.getvalue()
    assert "training: 100%" in shown and "5/5" in shown and "at=4" in shown
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with progress(range(3), desc="training") as bar:
        assert bar.disable and list(bar) == [0, 1, 2]
        bar.update(3)
        bar.set_postfix(loss=0.5)
        bar.close()
    assert pipe.getvalue() == "" and list(progress()) == []


def test_a_line_is_written_with_and_without_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    progress(range(3)).write("step 1")
    assert capsys.readouterr().out == "step 1\n"


@distributed(world=2)
def test_other_ranks_are_silent() -> None:
    mesh, plain = sf.make_mesh({"dp": 2}, device="cpu"), sys.stderr
    sys.stderr = Terminal()
    try:
        for own in (mesh, None):
            with progress(range(3), mesh=own) as bar:
                assert bar.disable == (mesh.rank != 0)
                bar.write("a line", file=sys.stderr)
        assert (sys.stderr.getvalue() == "") == (mesh.rank != 0)
    finally:
        sys.stderr = plain


@pytest.mark.nightly
def test_saves_restores_captures_and_plans_show_theirs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr("shardfn.core._progress._SOON", 0.0)
    checkpoint.save(tmp_path, {"w": torch.ones(100)}, 7)
    checkpoint.restore(tmp_path, {"w": torch.ones(100)})
    sf.sharded_step(lambda w, x: (w * x).sum(), sf.optim.sgd(0.1)).lower(torch.ones(4), torch.ones(4))
    run = Setup("gpt2", parse_model("gpt2"), {"dp": 8}, sf.graph.cluster("a100-40"), sf.Zero(), batch=1)
    search(dataclasses.replace(run, batch=8))
    for name in ("saving step 7: ", "restoring: ", "capturing: ", "planning: "):
        assert name in terminal.getvalue()
    # Each is removed at its end.
    assert terminal.getvalue().endswith("\r")


def test_short_work_shows_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    checkpoint.save(tmp_path, {"w": torch.ones(100)}, 7)
    assert terminal.getvalue().strip() == ""
