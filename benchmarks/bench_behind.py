"""An iteration of GRPO whose answers are drawn beside the step, over one that draws them before it.

    python benchmarks/bench_behind.py --out benchmarks/results/rl_behind_CPU_YYYYMM.md

The runs are examples/rlhf/grpo_arithmetic.py with `--behind 1` and without, both with and without `--out`, one thread
for torch. All are alive and take turns of a few iterations, stopped in between by SIGSTOP, and ratios are formed within
a round: a ratio below 1 means that the thread saves time. "processor" is the ratio of all threads' seconds on a core:
the work that two threads add. "bound" is that of the busiest thread's: an idle machine saves no more than that, if
neither thread ever waits for the interpreter's lock. "waiting" is the part of a turn in which the main thread was ready
and had no core. Above a few percent, "ratio" is that of a busy machine, where two threads get two shares of the cores.
"""

import argparse
import contextlib
import itertools
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import IO, NamedTuple

from _report import publish, table

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples/rlhf/grpo_arithmetic.py"
WARM = 2  # iterations before the first turn


class Turn(NamedTuple):
    """Seconds of a turn: by the wall, on a core for all threads and for the busiest, in a queue for the main thread."""

    wall: float
    cpu: float
    busiest: float
    waiting: float


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="%(default)s")
    parser.add_argument("--turn", type=int, default=4, help="iterations of a turn (%(default)s)")
    parser.add_argument("--example", default=str(EXAMPLE), help="the program (%(default)s)")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        peers = dict[tuple[bool, str], Peer]()
        for saved, behind in itertools.product((False, True), ("0", "1")):
            options = ["--behind", behind, *(["--out", f"{folder}/{behind}"] * saved)]
            peers[saved, behind] = Peer(args.example, options, started)
        turns = {name: list[Turn]() for name in peers}
        for n in range(args.rounds):
            for name in sorted(peers, reverse=n % 2 == 1):
                turns[name].append(peers[name].turn(args.turn))
    lines = [_line(saved, turns[saved, "0"], turns[saved, "1"], args.turn) for saved in (False, True)]
    load = f"{os.getloadavg()[0]:.1f} processes were ready or running at the end, for {os.cpu_count()} cores"
    body = f"{args.rounds} rounds of {args.turn} iterations; medians, and quartiles of ratios; {load}\n\n"
    head = ["run", "before, s", "beside, s", "ratio", "quartiles", "processor", "quartiles"]
    head += ["bound", "quartiles", "waiting"]
    publish("GRPO: answers drawn beside the step", body + table(head, lines), out=args.out)


class Peer:
    """A run that is stopped unless it is its turn."""

    def __init__(self, example: str, options: list[str], started: contextlib.ExitStack) -> None:
        how = ["--iterations", "100000", "--every", "1", "--imitate", "10", *options]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, example, *how], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.callback(self.end)
        assert self._process.stdout is not None
        self._lines: IO[str] = self._process.stdout
        self._iterations(WARM + 1)  # and the line of the accuracy before
        self._send(signal.SIGSTOP)

    def turn(self, iterations: int) -> Turn:
        """Goes on; the first iteration, which the last stop has cut, does not count."""
        self._send(signal.SIGCONT)
        self._iterations(1)
        begin, before = time.perf_counter(), self._spent()
        self._iterations(iterations)
        end, spent = time.perf_counter(), self._spent()
        self._send(signal.SIGSTOP)
        ran = [seconds - before.get(task, (0.0, 0.0))[0] for task, (seconds, _) in spent.items()]
        main = self._process.pid
        return Turn(end - begin, sum(ran), max(ran), spent[main][1] - before[main][1])

    def end(self) -> None:
        """Ends the run."""
        self._send(signal.SIGKILL)
        self._process.wait()

    def _iterations(self, num: int) -> None:
        for _ in range(num):
            if not self._lines.readline():
                raise RuntimeError(f"the run ended with status {self._process.wait()}; run it alone.")

    def _send(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _spent(self) -> dict[int, tuple[float, float]]:
        """For each thread: seconds on a core, and in the queue for one."""
        tasks = pathlib.Path(f"/proc/{self._process.pid}/task")
        rows = {int(task.name): (task / "schedstat").read_text().split() for task in tasks.iterdir()}
        return {task: (int(row[0]) / 1e9, int(row[1]) / 1e9) for task, row in rows.items()}


def _line(saved: bool, before: list[Turn], beside: list[Turn], num: int) -> list[str]:
    cells = ["with --out" if saved else "without --out"]
    cells += [f"{statistics.median(turn.wall for turn in turns) / num:.3f}" for turns in (before, beside)]
    for over, under in (("wall", "wall"), ("cpu", "cpu"), ("busiest", "cpu")):
        ratios = [getattr(b, over) / getattr(a, under) for a, b in zip(before, beside, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
    waiting = (statistics.median(turn.waiting / turn.wall for turn in turns) for turns in (before, beside))
    return [*cells, ", ".join(f"{part:.0%}" for part in waiting)]


if __name__ == "__main__":
    main()
