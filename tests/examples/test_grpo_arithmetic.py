"""The arithmetic examples: GRPO learns, on one process and two alike, and goes on bit for bit after a kill; tools."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from shardfn.checkpoint import diff, steps

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/rlhf/grpo_arithmetic.py"
ALONE = [sys.executable]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SHORT = ["--imitate", "30", "--prompts", "4", "--iterations", "3"]


def start(command: list[str], *options: str, example: pathlib.Path = EXAMPLE) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, str(example), *options], env=env, cwd=ROOT, start_new_session=True, **how)


def run(command: list[str], *options: str, example: pathlib.Path = EXAMPLE, seconds: float = 400) -> str:
    process = start(command, *options, example=example)
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks of a launcher: it is the leader of its session
            process.communicate()
    assert process.returncode == 0, err[-3000:]
    return out


def test_a_run_that_takes_too_long_is_ended(tmp_path: pathlib.Path) -> None:
    script, pid = tmp_path / "sleeps.py", tmp_path / "pid"
    script.write_text(
        f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(600)"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        run([sys.executable], example=script, seconds=5)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def rows(folder: pathlib.Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_a_run_has_metrics_and_checkpoints(tmp_path: pathlib.Path) -> None:
    out = run(ALONE, *SHORT, "--every", "1", "--out", str(tmp_path))
    assert "iteration 2: reward" in out and "right after" in out
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, 7)) and steps(tmp_path / "checkpoints") == [5, 6]
    assert all(row["exact"] == 1 for row in found[::2])  # the first epoch of each rollout
    assert {"reward", "kl", "entropy", "length", "clipped", "missing"} <= set(found[0])


@pytest.mark.nightly
def test_a_run_one_behind_is_one_version_behind_and_has_the_same_bits_again(tmp_path: pathlib.Path) -> None:
    for name in ("one", "two"):
        run(ALONE, *SHORT, "--behind", "1", "--out", str(tmp_path / name))
    found = rows(tmp_path / "one")
    assert found == rows(tmp_path / "two") and diff(tmp_path / "one/checkpoints", tmp_path / "two/checkpoints") == []
    assert found[0]["weight"] == 1 and all(row["weight"] != 1 for row in found[2:])
    assert all(row["exact"] == 1 for row in found[::2])


@pytest.mark.nightly
def test_a_run_one_behind_is_the_synchronous_one_while_weights_are_the_same(tmp_path: pathlib.Path) -> None:
    for rate in ("0", "1e-3"):
        for behind in ("0", "1"):
            run(ALONE, *SHORT, "--lr", rate, "--behind", behind, "--out", str(tmp_path / rate / behind))
    synchronous, one = (rows(tmp_path / "0" / behind) for behind in ("0", "1"))  # weights never move
    assert synchronous == one and all(row["exact"] == row["weight"] == 1 for row in one)
    synchronous, one = (rows(tmp_path / "1e-3" / behind) for behind in ("0", "1"))
    assert synchronous[:2] == one[:2] and synchronous[2] != one[2]  # both begin with answers of the first weights


@pytest.mark.nightly
@pytest.mark.parametrize("behind", ["0", "1"])
def test_two_ranks_draw_the_same_answers(tmp_path: pathlib.Path, behind: str) -> None:
    how = [*SHORT, "--behind", behind]
    run(ALONE, *how, "--iterations", "2", "--out", str(tmp_path / "one"))
    # From here on: Adam's first updates are as large for gradients that are rounding alone as for others.
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    run(ALONE, *how, "--iterations", "4", "--out", str(tmp_path / "one"))
    run(TWO, *how, "--iterations", "4", "--zero", "3", "--out", str(tmp_path / "two"))
    one, two = (rows(tmp_path / name)[4:] for name in ("one", "two"))
    assert len(one) == 4
    for a, b in zip(one, two, strict=True):
        assert all(abs(a[k] - b[k]) <= 1e-5 * max(abs(a[k]), 1) for k in ("loss", "reward", "kl", "entropy"))
        assert a["exact"] == b["exact"] or a["step"] % 2 == 0


@pytest.mark.nightly
@pytest.mark.parametrize(("part", "behind"), [(0, "0"), (1, "0"), (2, "0"), (3, "0"), (4, "1"), (5, "1")])
def test_a_run_that_is_killed_anywhere_goes_on_bit_for_bit(tmp_path: pathlib.Path, part: int, behind: str) -> None:
    options = [*SHORT, "--iterations", "12", "--behind", behind]
    run(ALONE, *options, "--out", str(tmp_path / "whole"))
    draw = random.Random(part)
    killed = 0
    for _ in range(5):
        process = start(ALONE, *options, "--out", str(tmp_path / "killed"))
        begin = time.monotonic()
        folder = tmp_path / "killed/checkpoints"
        so_far = steps(folder)[-1:] if folder.exists() else []
        while process.poll() is None and time.monotonic() < begin + 120:
            if folder.exists() and steps(folder)[-1:] != so_far:
                break
            time.sleep(0.01)
        time.sleep(draw.random() * 0.4)
        killed += process.poll() is None
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    run(ALONE, *options, "--out", str(tmp_path / "killed"))
    assert killed and rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert diff(tmp_path / "killed/checkpoints", tmp_path / "whole/checkpoints") == []


@pytest.mark.nightly
def test_ppo_runs() -> None:
    out = run(ALONE, *SHORT, "--every", "1", example=EXAMPLE.with_name("ppo_arithmetic.py"))
    lines = [line for line in out.splitlines() if line.startswith("iteration")]
    assert len(lines) == 3 and all("actor/exact 1.000" in line for line in lines)


@pytest.mark.nightly
@pytest.mark.parametrize(("seed", "behind"), [(0, "0"), (1, "0"), (0, "1"), (1, "1")])
def test_rewards_rise(tmp_path: pathlib.Path, seed: int, behind: str) -> None:
    run(ALONE, "--seed", str(seed), "--behind", behind, "--out", str(tmp_path))
    found = rows(tmp_path)
    first, last = ([row["reward"] for row in part[::2]] for part in (found[:20], found[-20:]))
    # Ten rollouts of 32 problems: the problems of a rollout differ, its 8 answers to each are counted as one.
    error = (2 * 0.25 / (10 * 32)) ** 0.5
    assert sum(last) / 10 - sum(first) / 10 > 5 * error
    assert sum(row["kl"] for row in found[-20::2]) / 10 < 1


@pytest.mark.nightly
def test_answers_learn_to_call_a_tool() -> None:
    out = run(ALONE, "--iterations", "30", "--every", "1", example=EXAMPLE.with_name("tool_arithmetic.py"))
    lines = [line for line in out.splitlines() if line.startswith("iteration")]
    rewards = [float(line.split("reward ")[1].split(",")[0]) for line in lines]
    assert len(lines) == 30 and all("exact 1.000" in line for line in lines)
    # Five rollouts of 32 problems, the 8 answers to each counted as one.
    error = (2 * 0.25 / (5 * 32)) ** 0.5
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 > 5 * error
