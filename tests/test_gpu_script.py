"""Covers scripts/gpu: its parts run on a CPU, one that fails or has no time costs its own figures alone."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import time

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
    for name in ("serving", "grouped"):
        part = found[name]
        assert isinstance(part, dict) and not [x for x in part.values() if isinstance(x, str)], part
    parity = found["parity"]
    assert isinstance(parity, dict) and parity["cases"] > 20 and not parity["failed"]


@pytest.mark.nightly
def test_a_part_without_time_is_left_out_and_named(tmp_path: pathlib.Path) -> None:
    found = _run(tmp_path / "gpu.json", "--parts", "machine,offload", "--seconds", "0")
    assert found["machine"] == found["offload"] == "left out: no time is left"


STARTS_ANOTHER = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(other.pid, flush=True)
time.sleep({seconds})
"""


@pytest.mark.day("0")
@pytest.mark.parametrize("seconds", [0, 300])
def test_no_process_of_a_part_is_left(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = importlib.import_module("bench_gpu")
    command = [sys.executable, "-c", STARTS_ANOTHER.format(seconds=seconds)]
    with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
        code = bench._code_of(command, out, err, 3)
    assert code == (None if seconds else 0), (tmp_path / "err").read_text()
    assert _has_ended(int((tmp_path / "out").read_text()))


def _has_ended(pid: int) -> bool:
    for _ in range(100):
        try:
            # An orphan that nothing waits for stays as a zombie.
            if pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.nightly
def test_a_part_that_is_stopped_leaves_the_others(tmp_path: pathlib.Path) -> None:
    found = _run(tmp_path / "gpu.json", "--parts", "parity,machine", "--seconds", "6")
    for name in ("serving", "grouped"):
        part = found[name]
        assert isinstance(part, dict) and not [x for x in part.values() if isinstance(x, str)], part
    parity = found["parity"]
    assert isinstance(parity, dict) and "error" in parity and "machine" in found
