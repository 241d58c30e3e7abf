"""A small step of two ranks beside DDP's: seconds by the wall, processor seconds, and where those of Python go.

    python benchmarks/bench_small_step.py --out benchmarks/results/small_step.md

Each rank builds all peers, which then take turns, so that other load on the machine slows all of them alike; a ratio
is formed within a turn. By the wall it is the slower rank, of the processor the sum of all ranks, with all threads.
With `--profile shardfn3` rank 0 then prints where its processor time goes: by part of the step, and by function, per
step. The parts are measured without the profiler, each without the parts inside it.
"""

import argparse
import collections
import contextlib
import cProfile
import functools
import importlib
import os
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from _model import Size, batches
from _pairs import Group
from _report import publish, table
from bench_step_time import ratios

TINY = Size(num_layers=8, d_model=64, num_heads=4, tokens=32, vocab=512, batch=4)
PEERS = "ddp,loop,shardfn0,shardfn1,shardfn3,shardfn3:jit=graph"
# The parts of an eager step, each with its function.
PARTS = {
    "agreement on what to run": "engine.step._run_call:agree_on_step",
    "rounds of agreement": "collectives.transport._rounds:Rounds.exchange",
    "leaves made ready": "engine.execution._run_backward:enter",
    "forward": "engine.execution._run_backward:Performer._forward",
    "backward": "engine.execution._run_backward:Performer._differentiate",
    "gradients taken": "engine.execution._run_backward:Performer._take",
    "messages laid out": "collectives.transport._packing:Packing.laid",
    "transfers started": "collectives.transport._memory:Lanes._start",
    "transfers waited for": "collectives.transport._memory:Lanes.wait",
    "writes looked for": "leaves._writes:Watch.check",
    "measures": "engine.execution._step_run:measure",
    "gradients cut": "engine.transfers._reduce:Reducer.gradients",
    "update": "engine.execution._step_run:update_in",
    "the optimizer's kernel": "optim._adam:fused_adamw_",
    "parameters made whole": "engine.execution._update:refresh",
    "next state": "engine.execution._step_run:next_state",
    "the graph": "engine.execution._graphs:Ready.__call__",
}


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    group = Group(serve, args.world, (args.peers, TINY)).ready()
    for name in args.peers:
        group.ask((name, args.warmup))
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in args.peers}
    for turn in range(args.rounds):
        shift = turn % len(args.peers)
        for name in args.peers[shift:] + args.peers[:shift]:
            answers = group.ask((name, args.steps))
            turns[name].append((max(wall for wall, _ in answers), sum(used for _, used in answers)))
    for name in args.profile:
        group.ask((f"profile {name}", args.steps))
    group.close()
    rows, base = [], list(zip(*turns[args.peers[0]], strict=True))
    for name, taken in turns.items():
        row = [name]
        for seconds, other in zip(map(list, zip(*taken, strict=True)), map(list, base), strict=True):
            low, mid, high = ratios(seconds, other)
            row += [f"{1e3 * statistics.median(seconds):.2f}", f"{mid:.3f}", f"{low:.3f} .. {high:.3f}"]
        rows.append(row)
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    note = f"World {args.world}, one thread a rank, {args.rounds} rounds of {args.steps} steps; {TINY}; load at the end"
    head = ["peer", "wall ms", f"/ {args.peers[0]}", "quartiles", "processor ms", f"/ {args.peers[0]}", "quartiles"]
    publish("A small step", f"{note} {load}\n\n{table(head, rows)}", out=args.out, data=turns, as_json=args.json)


def serve(rank: int, world: int, names: list[str], size: Size) -> Callable[[tuple[str, int]], tuple[float, float]]:
    """Builds all peers; the answer to (peer, k) is a step's seconds by the wall and by the processor, over k steps."""
    from _peers import build

    peers = {name: build(name)(rank, world, size) for name in names}
    data = {name: batches(size, rank, world) for name in names}

    def answer(asked: tuple[str, int]) -> tuple[float, float]:
        name, steps = asked
        kind, _, peer = name.rpartition(" ")
        rows = [next(data[peer]) for _ in range(steps)]
        run = functools.partial(lambda step: [step(tokens) for tokens in rows], peers[peer])
        if kind:
            _profiled(run, steps, aloud=rank == 0)
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        run()
        return (time.perf_counter() - start) / steps, (time.process_time() - used) / steps

    return answer


def _profiled(run: Callable[[], Any], steps: int, *, aloud: bool) -> None:
    """Runs it twice, by parts and by functions."""
    with _by_part() as spent:
        start = time.thread_time()
        run()
        whole = time.thread_time() - start
    profile = cProfile.Profile(time.thread_time)
    profile.runcall(run)
    if not aloud:
        return
    rows = [*spent.items(), ("the rest", whole - sum(spent.values())), ("all of it", whole)]
    text = [[part, f"{1e3 * seconds / steps:.2f}"] for part, seconds in rows if seconds]
    print(table(["part", "processor ms a step, this thread"], text), flush=True)
    found: Any = pstats.Stats(profile)
    calls = sorted(((own, num, where) for where, (_, num, own, *_) in found.stats.items()), reverse=True)
    lines = [[f"{os.path.basename(file)}:{name}", f"{num / steps:.0f}", f"{1e3 * own / steps:.3f}"]
             for own, num, (file, _, name) in calls[:40]]  # fmt: skip
    total = sum(num for _, num, _ in calls) / steps
    print(f"{total:.0f} calls a step\n\n{table(['function', 'calls', 'ms, with the profiler'], lines)}", flush=True)


@contextlib.contextmanager
def _by_part() -> Iterator[dict[str, float]]:
    """Processor seconds of this thread by `PARTS`, while it is open."""
    spent: dict[str, float] = collections.defaultdict(float)
    inside, before = [0.0], list[tuple[Any, str, Any]]()

    def timed(part: str, f: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> Any:
            inside.append(0.0)
            start = time.thread_time()
            try:
                return f(*args, **kwargs)
            finally:
                seconds = time.thread_time() - start
                spent[part] += seconds - inside.pop()
                inside[-1] += seconds

        return call

    for part, where in PARTS.items():
        module, _, path = where.partition(":")
        *classes, name = path.split(".")
        owner = functools.reduce(getattr, classes, importlib.import_module(f"shardfn.{module}"))
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, timed(part, getattr(owner, name)))
    try:
        yield spent
    finally:
        for owner, name, f in before:
            setattr(owner, name, f)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=lambda x: x.split(","), default=PEERS.split(","), help="see _peers.py")
    parser.add_argument("--profile", type=lambda x: x.split(","), default=[], help="peers of shardfn, of --peers")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="steps a peer takes in one round")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the first round")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--json", action="store_true", help="also the raw numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
