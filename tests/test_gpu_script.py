"""Covers scripts/gpu: its parts run on a CPU, one that fails or has no time costs its own figures alone."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def _run(out: pathlib.Path, *arguments: str) -> dict[str, object]:
    env = os.environ | {"PYTHON": sys.executable}
    command = ["scripts/gpu", "--device", "cpu", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.mark.nightly
def test_its_parts_run_on_a_cpu(tmp_path: pathlib.Path) -> None:
    found = _run(tmp_path / "gpu.json")
    wrong = {name: part for name, part in found.items() if isinstance(part, dict) and "error" in part}
    assert not wrong
    parity = found["parity"]
    assert isinstance(parity, dict) and parity["cases"] > 20 and not parity["failed"]


def test_a_part_without_time_is_left_out_and_named(tmp_path: pathlib.Path) -> None:
    found = _run(tmp_path / "gpu.json", "--parts", "machine,offload", "--seconds", "0")
    assert found["machine"] == found["offload"] == "left out: no time is left"


@pytest.mark.nightly
def test_a_part_that_is_stopped_leaves_the_others(tmp_path: pathlib.Path) -> None:
    found = _run(tmp_path / "gpu.json", "--parts", "parity,machine", "--seconds", "6")
    parity = found["parity"]
    assert isinstance(parity, dict) and "error" in parity and "machine" in found
