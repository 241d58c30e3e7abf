"""Covers examples/slow_network.py: two ranks train, and send a small part of what Adam sends."""

import pathlib
import re
import subprocess
import sys

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "slow_network.py"


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
