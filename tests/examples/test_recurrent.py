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
    sizes = "--steps 4 --hidden 16 --dim 16 --groups 4 --tune-steps 4 --eval-every 2 --batch 4 --length 16".split()
    shrinking = "--strength 0.2 --share 0.7 0.3 --hold-steps 200 --shrink-steps 40 --check-every 1".split()
    command = [sys.executable, str(ROOT / "examples/recurrent.py"), method, *sizes, *shrinking, "--out", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    reports = []
    for _ in range(2):  # the second run trains nothing
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
        assert done.returncode == 0, done.stderr
        reports.append(json.loads((tmp_path / "report.json").read_text()))
    rows = reports[0]["rows"]
    assert rows[0]["parameters"] > rows[1]["parameters"]
    assert [row["loss"] for row in reports[1]["rows"]] == [row["loss"] for row in rows]
    assert reports[1]["curves"] == reports[0]["curves"]
    assert "perplexity" in (tmp_path / "report.md").read_text()
