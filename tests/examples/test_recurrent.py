"""Covers `examples/recurrent.py`: both methods write a report, on one process."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["iss", "antman"])
def test_it_writes_a_report(method: str, tmp_path: pathlib.Path) -> None:
    sizes = ["--steps", "4", "--hidden", "16", "--dim", "16", "--strength", "560", "--groups", "4"]
    command = [sys.executable, str(ROOT / "examples/recurrent.py"), method, *sizes, "--out", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert rows[0]["parameters"] > rows[1]["parameters"]
    assert "perplexity" in (tmp_path / "report.md").read_text()
