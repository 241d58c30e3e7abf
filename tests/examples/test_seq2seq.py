"""Covers `examples/seq2seq.py`: it writes a report, with experts in both halves."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.nightly
def test_it_writes_a_report(tmp_path: pathlib.Path) -> None:
    sizes = ["--steps", "4", "--dim", "16", "--words", "20", "--experts", "3"]
    command = [sys.executable, str(ROOT / "examples/seq2seq.py"), *sizes, "--out", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert 0 <= found["accuracy"] <= 1 and found["curve"][-1][0] == 4
    assert "accuracy on 64 unseen lines" in done.stdout
