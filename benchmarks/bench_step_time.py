"""Seconds per step of shardfn and its peers, in interleaved rounds.

In each round every peer takes `--steps` steps in turn, while the other peers' processes sleep on a pipe. The ratio is
formed within a round, so a machine that slows down for a while slows both sides of it. By the wall it is the slower
rank's seconds. `--clock processor` takes the processor's instead, of a rank with all its threads, the mean of the
ranks: waiting costs nothing, and other programs count less.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

from _model import FULL, Size, batches
from _pairs import Group
from _report import publish, table
from slow_link import Link

Times = dict[str, list[float]]
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    args.base = base_of(args.base or ("loop" if args.world == 1 else "ddp"), args.peers)
    times, losses = measure(args.peers, args)
    report("Step time", args, times, losses)


def measure(
    peers: list[str], args: argparse.Namespace, *, size: Size = FULL, link: Link | None = None, whole: bool = False
) -> tuple[Times, dict[str, float]]:
    """Seconds per step of each round by `args.clock`, and the last loss, by peer.

    Args:
        peers: see `_peers.py`; with `@DIRECTORY` behind its name a peer runs with that checkout of shardfn.
        args: has `world`, `rounds`, `steps`, `warmup`.
        size: sizes of the trained model.
        link: where the ranks live; None is the loopback.
        whole: every rank gets all rows of a batch, not its share.
    """
    times, losses = measure_clocks(peers, args, size=size, link=link, whole=whole)
    return times[getattr(args, "clock", "wall")], losses


def measure_clocks(
    peers: list[str], args: argparse.Namespace, *, size: Size = FULL, link: Link | None = None, whole: bool = False
) -> tuple[dict[str, Times], dict[str, float]]:
    """As `measure`, by each of `CLOCKS` of the same rounds."""
    groups = {name: _group(name, args.world, size, link, whole) for name in peers}
    times: dict[str, Times] = {clock: {name: [] for name in peers} for clock in CLOCKS}
    losses: dict[str, float] = {}
    for group in groups.values():
        group.ask(args.warmup)
    for turn in range(args.rounds):
        for name in peers[turn % len(peers) :] + peers[: turn % len(peers)]:
            answers = groups[name].ask(args.steps)
            losses[name] = statistics.mean(loss for _, loss in answers)
            for clock, of_peers in times.items():
                of_ranks = [seconds[clock] for seconds, _ in answers]
                of_peers[name].append(max(of_ranks) if clock == "wall" else statistics.mean(of_ranks))
    for group in groups.values():
        group.close()
    return times, losses


def _group(peer: str, world: int, size: Size, link: Link | None, whole: bool) -> Group:
    name, _, checkout = peer.partition("@")
    return Group(serve, world, (name, size, whole), link=link, checkout=checkout).ready()


def serve(
    rank: int, world: int, name: str, size: Size = FULL, whole: bool = False
) -> Callable[[int], tuple[dict[str, float], float]]:
    """Builds one peer; its answer to k is (seconds per step by each clock, last loss) of k steps."""
    import torch.distributed as dist
    from _peers import build

    step, data = build(name)(rank, world, size), batches(size, *((0, 1) if whole else (rank, world)))

    def answer(steps: int) -> tuple[dict[str, float], float]:
        rows = [next(data) for _ in range(steps)]
        dist.barrier()
        start = {clock: now() for clock, now in CLOCKS.items()}
        losses = [step(tokens) for tokens in rows]
        taken = {clock: (now() - start[clock]) / steps for clock, now in CLOCKS.items()}
        return taken, float(losses[-1])

    return answer


def report(
    title: str, args: argparse.Namespace, times: Times, losses: dict[str, float], *, size: Size = FULL, more: str = ""
) -> None:
    """Publishes one row a peer, and `more` below the table."""
    rows = []
    for name, seconds in times.items():
        low, mid, high = ratios(seconds, times[args.base])
        median = statistics.median(seconds)
        speed = size.batch * size.tokens / median
        ratio = f"{mid:.3f}", f"{low:.3f} .. {high:.3f}"
        rows.append([name, f"{median:.4f}", f"{min(seconds):.4f}", f"{speed:.0f}", *ratio, f"{losses[name]:.5f}"])
    head = ["peer", "median s/step", "best", "tokens/s", f"ratio to {args.base}", "quartiles", "last loss"]
    note = f"World {args.world}, one thread a rank, {args.rounds} rounds of {args.steps} steps; {size}"
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    note += f"; seconds of the {getattr(args, 'clock', 'wall')} clock; load at the end (1, 5, 15 minutes) {load}"
    body = "\n\n".join(part for part in (note, table(head, rows), more) if part)
    publish(title, body, out=args.out, data={"seconds": times}, as_json=args.json)


def ratios(seconds: list[float], base: list[float]) -> tuple[float, float, float]:
    """Quartiles of the ratios formed within a round."""
    return _quartiles([a / b for a, b in zip(seconds, base, strict=True)])


def base_of(wanted: str, peers: list[str]) -> str:
    """The peer that ratios refer to: the wanted one if it takes part, else the first."""
    return wanted if wanted in peers else peers[0]


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, mid, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, mid, high


def add_arguments(parser: argparse.ArgumentParser, *, peers: str, rounds: int = 10) -> None:
    """The options that all step-time benchmarks share."""
    parser.add_argument("--peers", type=lambda x: x.split(","), default=peers.split(","), help="see _peers.py")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=2, help="steps a peer takes in one round")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first round")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--base", default="", help="the peer that ratios refer to")
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--json", action="store_true", help="also the raw numbers")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, peers="ddp,fsdp2,shardfn0,shardfn1,shardfn2,shardfn3")
    return parser.parse_args()


if __name__ == "__main__":
    main()
