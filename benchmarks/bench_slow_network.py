"""1-bit Adam beside Adam on slow links: seconds per step over bandwidths, and the bandwidth from which it does not pay.

2 ranks behind real links (`slow_link.py`), a GPT of 33.7M parameters, two sizes of batch: one in which a step computes
for long, and one in which it mostly communicates. Peers take their steps in interleaved rounds as in
`bench_step_time.py`; those of 1-bit Adam are in its compressed phase. The bytes that a step sends are read off the
counters of the links, and the floor of a step is its time on the loopback (including the small cost of sending there)
plus these bytes over the bandwidth. "unlimited" is the loopback.

    python benchmarks/bench_slow_network.py --plot benchmarks/results/slow_network.png

Other questions are other peers. ZeRO++ on two nodes of two ranks, three dimensions on four nodes of two, 1-bit LAMB:

    Z=shardfn3:nodes=2; python benchmarks/bench_slow_network.py --world 4 --per-node 2 --base $Z --peers \
        $Z,$Z:secondary_axis=gpu,$Z:gather=int8,$Z:reduce=int4,$Z:gather=int8:secondary_axis=gpu:reduce=int4
    python benchmarks/bench_slow_network.py --world 8 --per-node 2 --batch 8 --base shardfn_3d:tp=8 --peers \
        shardfn_3d:tp=8,shardfn3,shardfn_3d:pp=2:tp=2,shardfn_3d:pp=4:tp=2
    python benchmarks/bench_slow_network.py --batch 32 --base shardfn0:tx=lamb:microbatches=8 --peers \
        shardfn0:tx=lamb:microbatches=8,shardfn0:tx=onebit_lamb:microbatches=8

Needs root and iproute2, see `slow_link.py`; where they are missing it prints the reason and ends.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from _model import FULL, Size, batches
from _pairs import Group
from _report import publish, table
from slow_link import Link, bits_per_second, describe, why_unavailable

OURS = "shardfn0:tx=onebit_adam"
PEERS = f"ddp,shardfn1,{OURS}"
SIZES = {"computes": FULL, "communicates": dataclasses.replace(FULL, tokens=64, batch=2)}
LOOPBACK = "unlimited"


@dataclasses.dataclass
class Measured:
    """Seconds of each round, and bytes that a rank sent in a step."""

    seconds: list[float]
    sent: float = math.nan

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def main() -> None:
    args = _arguments()
    if reason := why_unavailable():
        print(f"skipped: {reason}")
        return
    rates = [r for r in args.rates if r != LOOPBACK]
    found: dict[str, dict[str, dict[str, Measured]]] = {name: {} for name in args.sizes}
    links: list[str] = []
    for rate in [LOOPBACK, *rates]:
        for name in args.sizes:
            found[name][rate], link = _measure(args, rate, _size(name, args))
        links += [f"{rate}: {link}"] if link else []
    parts = [part for name in args.sizes for part in _part(name, found[name], args)]
    body = "\n\n".join([f"{args.rounds} rounds, one thread a rank.", *parts, "Links: " + "; ".join(links)])
    data = {n: {r: {p: dataclasses.asdict(m) for p, m in x.items()} for r, x in y.items()} for n, y in found.items()}
    publish("Steps over bandwidths", body, out=args.out, data=data, as_json=args.json)
    if args.plot:
        _plot(args.plot, found)


def _size(name: str, args: argparse.Namespace) -> Size:
    return dataclasses.replace(SIZES[name], batch=args.batch or SIZES[name].batch)


def _measure(args: argparse.Namespace, rate: str, size: Size) -> tuple[dict[str, Measured], str]:
    """Every peer's steps at one rate, in interleaved rounds."""
    with contextlib.ExitStack() as stack:
        link = None if rate == LOOPBACK else stack.enter_context(Link(args.world, rate, per_node=args.per_node))
        told = describe(link.check()) if link else ""
        groups = {name: Group(serve, args.world, (name, size), link=link).ready() for name in args.peers}
        for group in groups.values():
            stack.callback(group.close)
        for name, group in groups.items():
            group.ask(4 if "onebit" in name else 1)
        out = {name: Measured([]) for name in args.peers}
        for turn in range(args.rounds):
            for name in args.peers[turn % len(args.peers) :] + args.peers[: turn % len(args.peers)]:
                answers = groups[name].ask(1)
                out[name].seconds.append(max(seconds for seconds, _ in answers))
                out[name].sent = max(sent for _, sent in answers)
        for name, m in out.items():
            print(f"{rate} {size.tokens}x{size.batch} {name}: {m.median:.3f} s, {m.sent:.0f} bytes", flush=True)
    return out, told


def serve(rank: int, world: int, name: str, size: Size) -> Callable[[int], tuple[float, float]]:
    """Builds one peer; its answer to k is (seconds, bytes sent) of a step, over k steps."""
    import time

    import torch.distributed as dist
    from _peers import build

    whole = name.startswith("shardfn_3d")  # its ranks take their rows themselves
    step, data = build(name)(rank, world, size), batches(size, *((0, 1) if whole else (rank, world)))

    def answer(steps: int) -> tuple[float, float]:
        rows = [next(data) for _ in range(steps)]
        dist.barrier()
        before, start = _sent(), time.perf_counter()
        for tokens in rows:
            step(tokens)
        seconds = time.perf_counter() - start
        dist.barrier()
        return seconds / steps, (_sent() - before) / steps

    return answer


def _sent() -> int:
    """Bytes that this rank's node has sent on its links; on the loopback those of both ranks and all others."""
    with open("/proc/net/dev") as file:
        rows = [line.split(":") for line in file if ":" in line]
    return sum(int(rest.split()[8]) for name, rest in rows if name.strip() != "lo")


def _part(name: str, found: dict[str, dict[str, Measured]], args: argparse.Namespace) -> Iterator[str]:
    size = _size(name, args)
    yield f"## {size.tokens} tokens, batch {size.batch}"
    head = ["link", "peer", "median s", "bytes sent", "floor s", "/ floor", f"{args.base} / it", "quartiles"]
    rows: list[list[Any]] = []
    for rate, peers in found.items():
        for peer, m in peers.items():
            bare = found[LOOPBACK][peer].median
            floor = bare + (0 if rate == LOOPBACK else m.sent * 8 / bits_per_second(rate))
            gains = sorted(a / b for a, b in zip(peers[args.base].seconds, m.seconds, strict=True))
            low, mid, high = statistics.quantiles(gains, n=4, method="inclusive") if len(gains) > 1 else gains * 3
            sent = "" if rate == LOOPBACK else f"{m.sent / 1e6:.2f}e6"
            over = "" if rate == LOOPBACK else f"{m.median / floor:.3f}"
            rows.append(
                [rate, peer, f"{m.median:.4f}", sent, f"{floor:.4f}", over, f"{mid:.2f}", f"{low:.2f} .. {high:.2f}"]
            )
    yield table(head, rows)
    for other in args.peers:
        if other != OURS and OURS in args.peers:
            yield f"{OURS} and {other} take the same time at {_break_even(found, other)}."


def _break_even(found: dict[str, dict[str, Measured]], other: str) -> str:
    """Where the two curves cross: on lines of seconds over seconds a bit, which a step's time nearly is."""
    points = sorted((bits_per_second(r), p[other].median / p[OURS].median) for r, p in found.items() if r != LOOPBACK)
    points.append((math.inf, found[LOOPBACK][other].median / found[LOOPBACK][OURS].median))
    for (slow, above), (fast, below) in itertools.pairwise(points):
        if above >= 1 > below:
            share = (above - 1) / (above - below)
            bit = 1 / slow + share * ((0 if math.isinf(fast) else 1 / fast) - 1 / slow)
            return f"about {1 / bit / 1e6:.0f} Mbit/s" if bit > 0 else "no bandwidth measured"
    return "more than any bandwidth measured" if points[-1][1] >= 1 else "less than any bandwidth measured"


def _plot(path: str, found: dict[str, dict[str, dict[str, Measured]]]) -> None:
    import matplotlib

    matplotlib.cache_stats("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(6 * len(found), 4.2), squeeze=False)
    for axis, (name, rates) in zip(axes[0], found.items(), strict=True):
        size = SIZES[name]
        for peer in next(iter(rates.values())):
            shown = [(bits_per_second(r) / 1e6, p[peer].median) for r, p in rates.items() if r != LOOPBACK]
            xs, ys = zip(*sorted(shown), strict=True)
            (line,) = axis.plot(xs, ys, marker="o", label=peer)
            axis.axhline(rates[LOOPBACK][peer].median, color=line.get_color(), linestyle=":", linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel="Mbit/s", ylabel="seconds per step (dotted: loopback)")
        axis.set_title(f"33.7M parameters, 2 ranks, {size.tokens} tokens, batch {size.batch}")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=lambda x: x.split(","), default=PEERS.split(","), help="see _peers.py")
    parser.add_argument(
        "--rates", type=lambda x: x.split(","), default=["50mbit", "100mbit", "300mbit", "1gbit", "3gbit"]
    )
    parser.add_argument("--sizes", type=lambda x: x.split(","), default=list(SIZES))
    parser.add_argument("--base", default="ddp", help="the peer that gains refer to")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=1, help="ranks of a node, which share memory and one link")
    parser.add_argument("--batch", type=int, default=0, help="rows of all ranks (that of the size)")
    parser.add_argument("--plot", default="", help="PNG file")
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--json", action="store_true", help="also the raw numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
