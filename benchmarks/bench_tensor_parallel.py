"""Seconds per step of the benchmark's GPT under tensor parallelism: shardfn's and torch's, in interleaved rounds.

Every rank gets the whole batch, and with it every peer computes the same loss. `shardfn_tp` is `models.gpt` along "tp";
`torch_tp` the same GPT of `nn.Linear`s under `parallelize_module`, with its loss in parallel along the vocabulary.
"""

import argparse

from _model import FULL, SMALL
from bench_step_time import add_arguments, base_of, measure, report


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, peers="torch_tp,shardfn_tp,shardfn_tp:sequence=1", rounds=5)
    parser.add_argument("--note", default="", help="a sentence below the table, such as what else ran on the machine")
    parser.add_argument("--small", action="store_true", help="a model of 2 layers, to see that it runs")
    args = parser.parse_args()
    size = SMALL if args.small else FULL
    args.base = base_of(args.base or "torch_tp", args.peers)
    times, losses = measure(args.peers, args, size=size, whole=True)
    report("Tensor parallelism", args, times, losses, size=size, more=args.note)


if __name__ == "__main__":
    main()
