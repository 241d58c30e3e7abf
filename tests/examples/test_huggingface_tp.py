"""Covers the example that puts a Hugging Face Llama on tp x dp: under ten lines, and the losses of the plain loop."""

import difflib
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/huggingface_tp.py"


def _losses(*args: str, ranks: int = 0) -> list[float]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    line = [sys.executable, *launch, str(EXAMPLE), "--steps", "4", *args]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(x) for x in re.findall(r"step \d+ loss ([\d.]+)", done.stdout)]


def test_fewer_than_ten_lines_are_changed() -> None:
    text = EXAMPLE.read_text()
    bodies = [
        text.partition(f"def {name}(")[2].partition("\n\n\n")[0].splitlines()[1:] for name in ("plain", "sharded")
    ]
    added = [x for x in difflib.ndiff(bodies[0], bodies[1]) if x.startswith("+ ")] + [
        x for x in text.splitlines() if x[:3] == "CUT"
    ]
    assert len(added) < 10
    assert all(x.endswith("# shardfn") for x in added)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_losses_are_those_of_the_plain_loop(ranks: int) -> None:
    want = _losses("--plain")
    assert len(want) == 4 and want[-1] < want[0]
    assert _losses("--tp", "2", ranks=ranks) == pytest.approx(want, abs=2e-5)
