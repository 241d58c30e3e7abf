"""The gain of prefetching and bucketing in a captured step on a slow network: 2 ranks, 1 Gbit/s, ZeRO stage 3.

The peers differ in the options of `sf.jit` only; none leaves a pass out. The base of the ratios goes without prefetch
and bucket; the peer after it does not overlap its reductions with the backward either. The schedule of the last one is
chosen by the cost model, for the link as `sf.graph.calibrate` finds it; the candidates are printed. Ratios are
formed within rounds as in `bench_step_time.py`. With `--timeline FOLDER` one more step of each peer is recorded as a
Chrome trace: compute, and the transfers in flight.
Needs root and iproute2, see `slow_link.py`; where they are missing it prints the reason and ends.
"""

import argparse
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from _model import FULL, Size, batches
from _pairs import Group
from _report import table
from bench_step_time import add_arguments, base_of, measure, report
from slow_link import Link, describe, why_unavailable

ON = "shardfn3:jit=graph"
OFF = f"{ON}:jit_prefetch=none:jit_bucket=none"
CHOSEN = f"{ON}:jit_cluster=calibrate"
PEERS = f"{ON},{ON}:jit_prefetch=none,{ON}:jit_bucket=none,{OFF},{OFF}:jit_reductions=none,{CHOSEN}"


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    if reason := why_unavailable():
        print(f"skipped: {reason}")
        return
    size = Size(num_layers=args.layers, batch=args.batch)
    args.base = base_of(args.base or OFF, args.peers)
    with Link(args.world, args.rate) as link:
        more = [describe(link.check())]
        times, losses = measure(args.peers, args, size=size, link=link) if args.rounds else ({}, {})
        if CHOSEN in args.peers:
            more.append(_candidates(args, size, link))
        if args.timeline:
            more.append(_timelines(args, size, link))
    report(f"Captured steps at {args.rate}", args, times, losses, size=size, more="\n\n".join(more))


def serve_choice(rank: int, world: int, size: Size) -> Callable[[None], str]:
    """Measures the link; its answer is the cluster found, and the candidates for the step's schedule."""
    from _model import loss, params
    from _peers import adamw

    import shardfn as sf

    mesh = sf.make_mesh({"dp": world})
    cluster, rows = sf.graph.calibrate(mesh), next(batches(size, rank, world))
    f = sf.jit(loss(size), backend="graph", cluster=cluster)
    step = sf.sharded_step(f, adamw(), mesh=mesh, batch=sf.P("dp"), zero=sf.Zero(stage=3))
    lowered = step.lower(params(size), {"tokens": rows})
    without = sf.jit(loss(size), backend="graph", prefetch=None, bucket=None)
    off = sf.sharded_step(without, adamw(), mesh=mesh, batch=sf.P("dp"), zero=sf.Zero(stage=3))
    least = off.lower(params(size), {"tokens": rows}).estimate(cluster).seconds

    def answer(request: None) -> str:
        del request
        table = f"{lowered.schedule_table()}\n  {least:>12.6f} s  without prefetch and bucket"
        return f"{cluster.between}\n{cluster.device.flops}\n{table}"

    return answer


def _candidates(args: argparse.Namespace, size: Size, link: Link) -> str:
    group = Group(serve_choice, args.world, (size,), link=link).ready()
    text = group.ask(None)[0]
    group.close()
    return f"What the cost model was told, and what it chose from, in another run\n\n```text\n{text}\n```"


def serve_timeline(rank: int, world: int, name: str, size: Size) -> Callable[[None], list[dict[str, Any]]]:
    """Builds one peer and warms it up; its answer is the events of one step."""
    import torch.distributed as dist
    from _peers import build
    from _timeline import Recorder

    step, data = build(name)(rank, world, size), batches(size, rank, world)
    for _ in range(3):
        step(next(data))

    def answer(request: None) -> list[dict[str, Any]]:
        del request
        rows = next(data)
        dist.barrier()
        return Recorder(rank).record(lambda: step(rows))

    return answer


def _timelines(args: argparse.Namespace, size: Size, link: Link) -> str:
    from _timeline import shares, trace

    rows = []
    for name in args.peers:
        group = Group(serve_timeline, args.world, (name, size), link=link).ready()
        ranks = group.ask(None)
        group.close()
        file = pathlib.Path(args.timeline) / f"timeline_{re.sub('[^a-z0-9]+', '_', name)}_{args.rate}{args.suffix}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(trace(ranks, f"{name}, {args.rate}, {size}"), separators=(",", ":")) + "\n")
        found = shares(ranks[0])
        rows.append([name, *(f"{v:.3f}" for v in found.values()), f"`{file.name}`"])
    head = ["peer", "step, s", "waited", "transfers in flight", "of these behind compute", "trace"]
    return "One recorded step, rank 0\n\n" + table(head, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, peers=PEERS, rounds=6)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--layers", type=int, default=6, help="6 take less than 3 s a step at 1 Gbit/s")
    parser.add_argument("--batch", type=int, default=FULL.batch)
    parser.add_argument("--timeline", default="", help="folder for one Chrome trace a peer")
    parser.add_argument("--suffix", default="", help="of the traces' names, as _epyc2_202611")
    return parser.parse_args()


if __name__ == "__main__":
    main()
