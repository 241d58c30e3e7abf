"""Covers examples/slow_network.py: two ranks train, and send a small part of Adam's bytes."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "slow_network.py"


@pytest.mark.nightly
def test_it_sends_signs_after_the_freeze() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
    ]
    command += ["--standalone", str(EXAMPLE), "--steps", "6", "--freeze-step", "2", "--layers", "2", "--dim", "64"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    whole, signs = (int(x.replace(",", "")) for x in re.findall(r"step \d+: ([\d,]+) bytes", done.stderr + done.stdout))
    assert 20 * signs < whole


@pytest.mark.nightly
def test_it_loses_no_ground_after_the_freeze() -> None:
    found = []
    for more in ([], ["--adamw"]):
        command = [sys.executable, str(EXAMPLE), "--steps", "14", "--freeze-step", "10", "--batch", "4", *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append([float(x) for x in re.findall(r"step \d+: loss ([\d.]+) of rows", done.stderr + done.stdout)])
    (frozen, signs), (before, adamw) = found
    assert frozen == before
    assert signs < frozen and signs < adamw + 0.1
