"""Kills a run of PPO at random instants, and compares each continuation with a run that was not killed, bit for bit.

    OMP_NUM_THREADS=1 python benchmarks/bench_rl_kills.py --out benchmarks/results/rl_kills_CPU_YYYYMM.md

The run is examples/rlhf/ppo_arithmetic.py, from weights that imitation has made before. It saves the state, the rollout
and beta after each update. Runs are forks of this process, so that packages are imported once. For each kill a number
of updates and a part of the time of the next one are drawn; then the fork gets SIGKILL, and another one goes on in its
directory. Equal are all rows of metrics.jsonl, and all leaves of the last checkpoint. A run that had ended before its
kill does not count.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
from typing import Any

import torch
from _report import publish, table

from shardfn.checkpoint import diff, steps

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples/rlhf"


def main() -> None:
    """Kills, goes on, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the instants (%(default)s)")
    parser.add_argument("--options", default="--imitate 10 --prompts 4 --iterations 6 --lr 3e-4", help="%(default)s")
    parser.add_argument("--folder", default="", help="for the runs; default a temporary one")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    __import__("ppo_arithmetic")
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(args.folder or temporary)
        whole, rows = folder / "whole", list[list[Any]]()
        first, last, updates = _times(args.options, whole)
        draw, started = random.Random(args.seed), 0
        while len(rows) < args.kills:
            started += 1
            place = folder / f"run{started}"
            shutil.copytree(whole / "sft", place / "sft")
            after, part = draw.randrange(updates), draw.random()
            delay = part * ((last - first) / max(updates - 1, 1) if after else first)
            saved = _killed(args.options, place, after, delay)
            if saved is None:
                continue
            _until_its_end(args.options, place)
            rows.append([len(rows) + 1, after, f"{delay:.2f}", saved, *_equal(place, whole)])
            print(rows[-1], flush=True)
    equal = sum(row[-1] == row[-2] == "equal" for row in rows)
    head = ["kill", "after update", "and seconds", "newest save", "metrics", "checkpoint"]
    text = f"`{args.options}`, {updates} updates in {last:.1f} s. {equal} of {len(rows)} continuations are equal."
    publish("PPO, killed at random instants", f"{text}\n\n{table(head, rows)}", out=args.out)


def _start(options: str, folder: pathlib.Path) -> int:
    """A fork that runs the example; its id."""
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["ppo_arithmetic.py", *options.split(), "--out", str(folder)]
        sys.modules["ppo_arithmetic"].main()
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def _until_its_end(options: str, folder: pathlib.Path) -> float:
    begin = time.monotonic()
    _, status = os.waitpid(_start(options, folder), 0)
    if status:
        raise RuntimeError(f"the run in {folder} failed:\n" + (folder / "log.txt").read_text()[-2000:])
    return time.monotonic() - begin


def _times(options: str, folder: pathlib.Path) -> tuple[float, float, int]:
    """The seconds of the first save and of the end of a run from weights of imitation, and its number of updates."""
    _until_its_end(options, folder)
    shutil.rmtree(folder / "ppo")
    begin, pid = time.monotonic(), _start(options, folder)
    _saved(folder, 1)
    first = time.monotonic() - begin
    os.waitpid(pid, 0)
    return first, time.monotonic() - begin, steps(folder / "ppo")[-1]


def _saved(folder: pathlib.Path, least: int) -> int:
    """The number of the newest checkpoint, when that is at least `least`."""
    while True:
        newest = steps(folder / "ppo")[-1:] if (folder / "ppo").exists() else []
        if (newest or [0])[0] >= least:
            return (newest or [0])[0]
        time.sleep(0.005)


def _killed(options: str, folder: pathlib.Path, after: int, delay: float) -> int | None:
    """The newest checkpoint of a run that is killed some time after one of its updates; None if it had ended."""
    pid = _start(options, folder)
    _saved(folder, after)
    time.sleep(delay)
    os.killpg(pid, signal.SIGKILL)  # it has not been waited for, so the id is its own
    _, status = os.waitpid(pid, 0)
    return _saved(folder, 0) if os.WIFSIGNALED(status) else None


def _equal(one: pathlib.Path, other: pathlib.Path) -> tuple[str, str]:
    rows = [[json.loads(line) for line in (x / "metrics.jsonl").read_text().splitlines()] for x in (one, other)]
    same = rows[0] == rows[1], diff(one / "ppo", other / "ppo") == []
    return "equal" if same[0] else "DIFFERENT", "equal" if same[1] else "DIFFERENT"


if __name__ == "__main__":
    main()
