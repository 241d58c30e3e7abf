"""The time of recurrent layers with fewer units, and with structured maps, beside the ratio of their operations.

    OMP_NUM_THREADS=1 python benchmarks/bench_recurrent.py --hidden 1500 1500 --kept 373,315 --groups 8 16

Weights are random: times do not depend on their values. A token of one sequence is bound by reading the weights, and
rows of a batch by the arithmetic. Cases take turns, and a time is the median over the rounds.
"""

import argparse
import dataclasses
import os
import pathlib
import statistics
import time

import torch
from _report import publish, table

import shardfn as sf
from shardfn.models import recurrent
from shardfn.nn.recurrent import block_diagonal, shuffled

TOKENS = 12  # of a turn, one after the other
ROWS, LENGTH = 10, 35  # of the batch


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    dense = recurrent.Config(args.words, args.dim, tuple(args.hidden), args.kind)
    configs = {f"dense, {'+'.join(map(str, dense.hidden))} units": dense}
    for kept in args.kept:
        configs[f"{kept.replace(',', '+')} units kept"] = dataclasses.replace(dense, hidden=_read_units(kept))
    for g in args.groups:
        maps = block_diagonal(g), shuffled(g)
        configs[f"blocks and shuffled blocks, {g} groups"] = dataclasses.replace(dense, maps=maps)
    cases = {name: _Case(config) for name, config in configs.items()}
    for _ in range(args.rounds):
        for case in cases.values():
            case.measure()
    first, lines = cases[next(iter(cases))], []
    for name, case in cases.items():
        lines.append(
            (
                name,
                f"{case.bytes / 2**20:.1f}",
                f"{first.flops / case.flops:.1f}x",
                f"{1e3 * case.token:.3f}",
                f"{first.token / case.token:.1f}x",
                f"{1e3 * case.batch:.1f}",
                f"{first.batch / case.batch:.1f}x",
            )
        )
    head = ("layers", "weights, MiB", "fewer operations", "a token, ms", "faster", f"{ROWS} rows of {LENGTH}, ms")
    body = [
        f"wall time of the layers (no embedding, no output layer), median of {args.rounds} rounds, one thread",
        f"caches of a core: {_read_caches()}",
        table((*head, "faster"), lines),
        f"load of the machine at the end: {os.getloadavg()[0]:.1f}",
    ]
    publish("Recurrent layers with fewer units and with structured maps", "\n\n".join(body), out=args.out)


class _Case:
    """Layers with random weights, and their times."""

    def __init__(self, config: recurrent.Config) -> None:
        self._config, self._params = config, recurrent.init(config, sf.key(0))
        self.bytes = sum(x.nbytes for x in sf.tree_leaves(self._params["layers"]))
        self.flops = recurrent.count_flops(config)
        self._rows = torch.randint(0, config.vocab_size, (ROWS, LENGTH))
        self._tokens, self._batches = list[float](), list[float]()

    @property
    def token(self) -> float:
        """Seconds of one token."""
        return statistics.median(self._tokens)

    @property
    def batch(self) -> float:
        """Seconds of the batch."""
        return statistics.median(self._batches)

    @torch.no_grad()
    def measure(self) -> None:
        """Takes a turn."""
        state = None
        for t in range(TOKENS + 2):
            start = time.perf_counter()
            state = recurrent.encode(self._config, self._params, self._rows[:1, t : t + 1], state).states
            if t > 1:  # the weights of other cases have left the caches
                self._tokens.append(time.perf_counter() - start)
        start = time.perf_counter()
        recurrent.encode(self._config, self._params, self._rows)
        self._batches.append(time.perf_counter() - start)


def _read_units(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _read_caches() -> str:
    found = pathlib.Path("/sys/devices/system/cpu/cpu0/cache")
    levels = [(x / "level", x / "size") for x in sorted(found.glob("index*"))]
    return ", ".join(f"L{level.read_text().strip()} {size.read_text().strip()}" for level, size in levels) or "unknown"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hidden", type=int, nargs="+", default=[1500, 1500])
    add("--dim", type=int, default=1500)
    add("--words", type=int, default=10_000)
    add("--kind", choices=("lstm", "gru", "highway"), default="lstm")
    add("--kept", nargs="*", default=["373,315"], help="hidden units of each layer (default: of the ISS paper)")
    add("--groups", type=int, nargs="*", default=[8, 16])
    add("--rounds", type=int, default=15)
    add("--out", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
