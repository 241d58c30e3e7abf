"""Seconds per step of the benchmark's GPT under tensor parallelism: shardfn's and torch's, in interleaved rounds.

Every rank gets the whole batch, and with it every peer computes the same loss. `shardfn_tp` is `models.gpt` along "tp",
whose layers are written by hand; `shardfn_partition` is `sf.partition` of the loss for one device, with the same specs;
`torch_tp` the same GPT of `nn.Linear`s under `parallelize_module`, with its loss in parallel along the vocabulary. With
`:jit=graph` behind its name the step of a peer is captured as a graph.

One table has the seconds on the wall, the other those of the processor of one rank, of the same rounds.
"""

import argparse
import os
import statistics

from _model import FULL, SMALL, Size
from _report import publish, table
from bench_step_time import Times, add_arguments, measure_clocks, ratios

PEERS = "torch_tp,shardfn_tp,shardfn_partition,shardfn_tp:jit=graph,shardfn_partition:jit=graph"
# The bases of comparison for each peer, if they take part.
BASES = ("torch_tp", "shardfn_tp", "shardfn_tp:jit=graph")


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, peers=PEERS, rounds=5)
    parser.add_argument("--note", default="", help="a sentence below the tables, such as what else ran on the machine")
    parser.add_argument("--small", action="store_true", help="a model of 2 layers, to see that it runs")
    args = parser.parse_args()
    size = SMALL if args.small else FULL
    clocks, losses = measure_clocks(args.peers, args, size=size, whole=True)
    parts = [_how(args, size)]
    parts += [f"Seconds of the {clock} clock:\n\n{_of_clock(times, losses)}" for clock, times in clocks.items()]
    publish("Tensor parallelism", "\n\n".join([*parts, *filter(None, [args.note])]), out=args.out, data=clocks)


def _how(args: argparse.Namespace, size: Size) -> str:
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    return (
        f"World {args.world}, one thread a rank, {args.rounds} rounds of {args.steps} steps; {size}. A ratio is the"
        f" median of those within a round, with its quartiles. Load at the end (1, 5, 15 minutes): {load}."
    )


def _of_clock(times: Times, losses: dict[str, float]) -> str:
    bases = [base for base in BASES if base in times]
    rows = []
    for name, seconds in times.items():
        against = [ratios(seconds, times[base]) for base in bases]
        told = [f"{mid:.3f} ({low:.3f} .. {high:.3f})" for low, mid, high in against]
        rows.append([name, f"{statistics.median(seconds):.4f}", f"{min(seconds):.4f}", *told, f"{losses[name]:.5f}"])
    return table(["peer", "median", "best", *(f"ratio to {base}" for base in bases), "last loss"], rows)


if __name__ == "__main__":
    main()
