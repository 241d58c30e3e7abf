"""Covers docs/autodidact.py: it runs, its assertions hold, and its output is right."""

import pathlib
import runpy

import pytest
import torch

FILE = pathlib.Path(__file__).parents[1] / "docs/autodidact.py"


def test_it_runs_and_prints_the_output_that_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_default_dtype()
    try:
        runpy.run_path(str(FILE), run_name="__main__")
    finally:
        torch.set_default_dtype(before)
    said = capsys.readouterr().out
    for text in (
        "(3, 5) (3, 5) (1, 5)",
        "forward: tied bias scale tied - and in the backward: tied scale",
        "[19, 19, 7]",
    ):
        assert text in said


def test_it_needs_torch_alone() -> None:
    imports = [line for line in FILE.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert {line.split()[1].split(".")[0] for line in imports} == {"functools", "torch"}
