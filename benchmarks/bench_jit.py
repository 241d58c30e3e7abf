"""Seconds per step with and without `sf.jit`, against FSDP2 with and without torch.compile, in interleaved rounds.

As `bench_step_time.py`, with the ratio of every peer to every other; and with `--capture` the cost of the first step,
in fresh processes: once with empty caches on disk, once with those that the first run left.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from _model import FULL, batches
from _pairs import Group
from _report import publish, table
from bench_step_time import Times, add_arguments, base_of, measure, ratios, report

PEERS = "shardfn3,shardfn3:jit=graph,shardfn3:jit=inductor,fsdp2,fsdp2_compile,fsdp2_compile_whole,ddp"


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    first = _first_steps(args) if args.capture else ""
    if args.rounds == 0:
        publish("First step", first, out=args.out)
        return
    args.base = base_of(args.base or "shardfn3", args.peers)
    times, losses = measure(args.peers, args)
    report(
        "Step time of captured steps", args, times, losses, more="\n\n".join(filter(None, (_pairwise(times), first)))
    )


def serve_first(rank: int, world: int, name: str) -> Callable[[None], dict[str, float]]:
    """Builds one peer; its answer is the seconds of its first step, and of its capture and compilation."""
    import torch.distributed as dist
    from _peers import build

    step, data = build(name)(rank, world, FULL), batches(FULL, rank, world)

    def answer(request: None) -> dict[str, float]:
        del request
        found, rows = {}, next(data)
        for key in ("first", "second"):
            dist.barrier()
            start = time.perf_counter()
            step(rows)
            found[key] = time.perf_counter() - start
        info = getattr(step, "cache_info", None)
        if info is not None:
            found |= {"capture": info().capture_seconds, "compile": info().compile_seconds}
        return found

    return answer


def _first_steps(args: argparse.Namespace) -> str:
    rows: list[list[Any]] = []
    for name in args.peers:
        with tempfile.TemporaryDirectory() as cache:
            for caches in ("empty", "filled"):
                rows.append([name, caches, *_first_step(name, args.world, cache)])
    head = ["peer", "caches on disk", "first step, s", "of it capture", "compile", "second step"]
    return "The first step, in fresh processes, the slower rank\n\n" + table(head, rows)


def _first_step(name: str, world: int, cache: str) -> list[str]:
    # Where compiled code is kept, by torch.compile and by sf.jit.
    places = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    before = {k: os.environ.get(k) for k in places}
    os.environ.update(places)
    try:
        group = Group(serve_first, world, (name,)).ready()
        answers = group.ask(None)
        group.close()
    finally:
        for key, value in before.items():
            os.environ.pop(key)
            os.environ.update({} if value is None else {key: value})
    worst = {key: max(a[key] for a in answers) for key in answers[0]}
    return [f"{worst[k]:.2f}" if k in worst else "" for k in ("first", "capture", "compile", "second")]


def _pairwise(times: Times) -> str:
    rows = []
    for name in times:
        cells = []
        for other in times:
            low, mid, high = ratios(times[name], times[other])
            cells.append("" if name == other else f"{mid:.3f} ({low:.3f} .. {high:.3f})")
        rows.append([name, *cells])
    return "Row / column, median and quartiles\n\n" + table(["", *times], rows) if len(times) > 1 else ""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, peers=PEERS)
    parser.add_argument(
        "--capture", action="store_true", help="also the cost of the first step; with --rounds 0 only that"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
