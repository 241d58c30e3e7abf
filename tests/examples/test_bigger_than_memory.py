"""Covers examples/bigger_than_memory.py: it trains under its limit, and resumes from its directory bit for bit."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "bigger_than_memory.py"


def _losses(*options: str) -> list[str]:
    small = ["--layers", "2", "--dim", "64", "--threads", "1", "--verbose", "--memory-mb", "600"]
    command = [sys.executable, str(EXAMPLE), *small, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return re.findall(r"step \d+ loss (\S+)", done.stdout)


@pytest.mark.nightly
def test_it_goes_on_with_the_losses_of_a_run_in_memory(tmp_path: pathlib.Path) -> None:
    where = "--directory", str(tmp_path / "states")
    begun = _losses("--steps", "1", *where)
    rest = _losses("--steps", "3", *where)
    assert [*begun, *rest] == _losses("--steps", "3", "--in-memory")
    assert len(rest) == 2
