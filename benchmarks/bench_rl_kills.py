"""Kills a run of PPO at random instants, and compares each continuation with a run that was not killed, bit for bit.

    OMP_NUM_THREADS=1 python benchmarks/bench_rl_kills.py --out benchmarks/results/rl_kills_CPU_YYYYMM.md

The run is examples/rlhf/ppo_arithmetic.py, which makes its first weights by imitation, and saves the state, the rollout
and beta after each update. Runs are forks of this process, so that packages are imported once. An instant is drawn
uniformly from the duration of a whole run; the fork gets SIGKILL, and another one goes on in its directory. Equal are
all rows of metrics.jsonl, and all leaves of the last checkpoint. A run that had ended is not counted.
"""

import argparse
import json
import os
import pathlib
import random
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
        seconds = _until_its_end(args.options, folder / "whole")
        rows: list[list[Any]] = []
        draw, started = random.Random(args.seed), 0
        while len(rows) < args.kills:
            started += 1
            place, instant = folder / f"run{started}", draw.random() * seconds
            row = _killed(args.options, place, instant)
            if row is not None:
                _until_its_end(args.options, place)
                rows.append([len(rows) + 1, f"{instant:.2f}", *row, *_equal(place, folder / "whole")])
                print(rows[-1], flush=True)
    whole = sum(row[-1] == row[-2] == "equal" for row in rows)
    head = ["kill", "after, s", "part", "updates saved", "metrics", "checkpoint"]
    text = f"`{args.options}`; a whole run takes {seconds:.1f} s. {whole} of {len(rows)} continuations are equal."
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


def _killed(options: str, folder: pathlib.Path, instant: float) -> list[Any] | None:
    """The part of the run, and the updates saved, at the kill; None if the run had ended."""
    pid = _start(options, folder)
    time.sleep(instant)
    ended, _ = os.waitpid(pid, os.WNOHANG)
    if ended:
        return None
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    saved = steps(folder / "ppo")[-1:] if (folder / "ppo").exists() else []
    return ["PPO" if saved else "before the first save", saved[0] if saved else 0]


def _equal(one: pathlib.Path, other: pathlib.Path) -> tuple[str, str]:
    rows = [[json.loads(line) for line in (x / "metrics.jsonl").read_text().splitlines()] for x in (one, other)]
    same = rows[0] == rows[1], diff(one / "ppo", other / "ppo") == []
    return "equal" if same[0] else "DIFFERENT", "equal" if same[1] else "DIFFERENT"


if __name__ == "__main__":
    main()
