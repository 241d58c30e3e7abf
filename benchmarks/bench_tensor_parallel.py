"""Seconds per step of the benchmark's GPT under tensor parallelism: shardfn's and torch's, in interleaved rounds.

Every rank gets the whole batch, and with it every peer computes the same loss. `shardfn_tp` is `models.gpt` along "tp";
`torch_tp` the same GPT of `nn.Linear`s under `parallelize_module`, with its loss in parallel along the vocabulary.
"""

import argparse
import time
from collections.abc import Callable

from _model import FULL, SMALL, Size, batches
from _pairs import Group
from bench_step_time import Times, add_arguments, base_of, report


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, peers="torch_tp,shardfn_tp,shardfn_tp:sequence=1", rounds=5)
    parser.add_argument("--note", default="", help="a sentence below the table, such as what else ran on the machine")
    parser.add_argument("--small", action="store_true", help="a model of 2 layers, to see that it runs")
    args = parser.parse_args()
    size = SMALL if args.small else FULL
    args.base = base_of(args.base or "torch_tp", args.peers)
    groups = {name: Group(serve, args.world, (name, size)).ready() for name in args.peers}
    times: Times = {name: [] for name in args.peers}
    losses: dict[str, float] = {}
    for group in groups.values():
        group.ask(args.warmup)
    for turn in range(args.rounds):
        first = turn % len(args.peers)
        for name in args.peers[first:] + args.peers[:first]:
            answers = groups[name].ask(args.steps)
            losses[name] = answers[0][1]
            times[name].append(max(seconds for seconds, _ in answers))
    for group in groups.values():
        group.close()
    report("Tensor parallelism", args, times, losses, size=size, more=args.note)


def serve(rank: int, world: int, name: str, size: Size) -> Callable[[int], tuple[float, float]]:
    """Builds one peer; its answer to k is (seconds per step, last loss) of k steps on the whole batch."""
    import torch.distributed as dist
    from _peers import build

    step, data = build(name)(rank, world, size), batches(size, 0, 1)

    def answer(steps: int) -> tuple[float, float]:
        rows = [next(data) for _ in range(steps)]
        dist.barrier()
        start = time.perf_counter()
        losses = [step(tokens) for tokens in rows]
        return (time.perf_counter() - start) / steps, float(losses[-1])

    return answer


if __name__ == "__main__":
    main()
