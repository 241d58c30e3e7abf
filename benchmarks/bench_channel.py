"""Seconds of one collective of a channel: through memory, by gloo, and the plain copy of the bytes that must move.

One group of processes a world has both channels. A round runs each way in turn, so what slows the machine for a while
slows all of them; ratios are formed within a round. The slowest rank counts. Processor time is that of all ranks and
their threads: on a machine that others use it is steadier than seconds.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from _pairs import Group
from _report import publish, table

WAYS = ("memory", "gloo", "copy")
OPS = ("all_gather", "reduce_scatter", "all_reduce")


class Case(NamedTuple):
    """One cell: an operation over `nbytes` on each rank (of the gathered result, or of the sum), `times` in a row."""

    op: str
    nbytes: int
    way: str
    times: int


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="2,3,4")
    parser.add_argument("--sizes", default="1024,65536,1048576,16777216,134217728,268435456")
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", default="")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    worlds, sizes = ([int(x) for x in text.split(",")] for text in (args.worlds, args.sizes))
    load, raw, parts = os.getloadavg(), [], []
    for world in worlds:
        group, rows = Group(serve, world).ready(), []
        for op in args.ops.split(","):
            for nbytes in sizes:
                found = measure(group, op, nbytes, args.rounds)
                raw.append({"world": world, "op": op, "bytes": nbytes, **found})
                rows.append(row(op, nbytes, found))
        group.close()
        head = ["operation", "bytes", *WAYS, "memory / gloo", "memory / copy", "processor: / gloo", "/ copy"]
        parts.append(f"World {world}, one thread a rank, {args.rounds} rounds\n\n" + table(head, rows))
    said = " ".join(f"{x:.1f}" for x in (*load, *os.getloadavg()))
    note = (
        "Microseconds of the best round; ratios are medians over rounds. `copy` is a memcpy, on all ranks at once, of"
        " the bytes that each must get from the others, into memory that is there. Gathers and sums are in place. Load"
        f" of the machine (1, 5, 15 minutes) before and after: {said}."
    )
    publish("Channels", "\n\n".join([note, *parts]), out=args.out, data={"cells": raw}, as_json=args.json)


def measure(group: Group, op: str, nbytes: int, rounds: int) -> dict[str, list[list[float]]]:
    """By way, for each round: seconds of the slowest rank, and processor seconds of all."""
    times = max(1, min(100, (1 << 22) // nbytes))
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for turn in range(rounds + 1):
        for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
            answers = group.ask(Case(op, nbytes, way, times))
            if turn:  # the first is a warm-up
                found[way].append([max(wall for wall, _ in answers), sum(cpu for _, cpu in answers)])
    return found


def row(op: str, nbytes: int, found: dict[str, list[list[float]]]) -> list[str]:
    """A row of the table."""

    def ratio(other: str, which: int) -> str:
        pairs = zip(found["memory"], found[other], strict=True)
        return f"{statistics.median(a[which] / max(b[which], 1e-9) for a, b in pairs):.2f}"

    best = [f"{1e6 * min(wall for wall, _ in found[way]):.0f}" for way in WAYS]
    return [op, f"{nbytes:,}", *best, ratio("gloo", 0), ratio("copy", 0), ratio("gloo", 1), ratio("copy", 1)]


def serve(rank: int, world: int) -> Callable[[Case], tuple[float, float]]:
    """The answer to a case is seconds and processor seconds of one operation."""
    import torch
    import torch.distributed as dist

    import shardfn as sf
    from shardfn.collectives import Channels

    mesh, made = sf.make_mesh({"dp": world}, device="cpu"), {}
    for way in ("memory", "gloo"):
        os.environ["SHARDFN_CHANNEL"] = way
        made[way] = Channels(mesh)
        assert bool(made[way].gather(("dp",)).shared_bytes) == (way == "memory")
        made[way].reduce(("dp",))
    place: dict[str, Any] = {}

    def answer(case: Case) -> tuple[float, float]:
        n = case.nbytes // 4 // world
        if place.get("n") != n:
            place.update(n=n, a=torch.ones(n * world), b=torch.ones(n * world))
        run = _runner(made.get(case.way), case, place["a"], place["b"], n, rank, world)
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(case.times):
            run()
        out = (time.perf_counter() - wall) / case.times, (time.process_time() - cpu) / case.times
        dist.barrier()
        return out

    return answer


def _runner(channels: Any, case: Case, a: Any, b: Any, n: int, rank: int, world: int) -> Callable[[], object]:
    sizes = [n] * world
    if channels is None:
        part = a[n:], b[n:]
        return lambda: [part[0].copy_(part[1]) for _ in range(1 + (case.op == "all_reduce"))]
    if case.op == "all_gather":
        own = a[rank * n : rank * n + n]
        return lambda: channels.gather(("dp",)).all_gather(own, sizes, a, settled=True).result()
    if case.op == "reduce_scatter":
        return lambda: channels.reduce(("dp",)).reduce_scatter(b, sizes, reuse=True).result()
    return lambda: channels.reduce(("dp",)).all_reduce(b).result()


if __name__ == "__main__":
    main()
