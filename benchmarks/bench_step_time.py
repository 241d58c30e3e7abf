"""Seconds per step of shardfn and its peers, in interleaved rounds.

In each round every peer takes `--steps` steps in turn, while the other peers' processes sleep on a pipe. The ratio is
formed within a round, so a machine that slows down for a while slows both sides of it.
"""

import argparse
import statistics
import time
from collections.abc import Callable

from _model import FULL, batches
from _pairs import Group
from _report import publish, table


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    groups = {name: Group(serve, args.world, (name,)).ready() for name in args.peers}
    times: dict[str, list[float]] = {name: [] for name in args.peers}
    losses: dict[str, float] = {}
    for group in groups.values():
        group.ask(args.warmup)
    for turn in range(args.rounds):
        for name in args.peers[turn % len(args.peers) :] + args.peers[: turn % len(args.peers)]:
            answers = groups[name].ask(args.steps)
            losses[name] = statistics.mean(loss for _, loss in answers)
            times[name].append(max(seconds for seconds, _ in answers))
    for group in groups.values():
        group.close()
    _report(args, times, losses)


def serve(rank: int, world: int, name: str) -> Callable[[int], tuple[float, float]]:
    """Builds one peer; its answer to k is (seconds per step, last loss) of k steps."""
    import torch.distributed as dist
    from _peers import build

    step, data = build(name)(rank, world, FULL), batches(FULL, rank, world)

    def answer(steps: int) -> tuple[float, float]:
        rows = [next(data) for _ in range(steps)]
        dist.barrier()
        start = time.perf_counter()
        losses = [step(tokens) for tokens in rows]
        return (time.perf_counter() - start) / steps, float(losses[-1])

    return answer


def _report(args: argparse.Namespace, times: dict[str, list[float]], losses: dict[str, float]) -> None:
    rows = []
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times[args.base], strict=True)]
        low, mid, high = _quartiles(ratios)
        median = statistics.median(seconds)
        speed = FULL.batch * FULL.tokens / median
        ratio = f"{mid:.3f}", f"{low:.3f} .. {high:.3f}"
        rows.append([name, f"{median:.4f}", f"{min(seconds):.4f}", f"{speed:.0f}", *ratio, f"{losses[name]:.5f}"])
    head = ["peer", "median s/step", "best", "tokens/s", f"ratio to {args.base}", "quartiles", "last loss"]
    note = f"World {args.world}, one thread a rank, {args.rounds} rounds of {args.steps} steps; {FULL}"
    publish("Step time", f"{note}\n\n{table(head, rows)}", out=args.out, data={"seconds": times}, as_json=args.json)


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, mid, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, mid, high


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", default="ddp,fsdp2,shardfn0,shardfn1,shardfn2,shardfn3", help="see _peers.py")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="steps a peer takes in one round")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first round")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--base", default="", help="the peer that ratios refer to (ddp, or loop at world 1)")
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--json", action="store_true", help="also the raw seconds")
    args = parser.parse_args()
    args.peers = args.peers.split(",")
    wanted = args.base or ("loop" if args.world == 1 else "ddp")
    args.base = wanted if wanted in args.peers else args.peers[0]
    return args


if __name__ == "__main__":
    main()
