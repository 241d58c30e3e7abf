"""`kernels.row_linear` beside torch's linear, on one thread: ratios of processor time, formed within a round.

The order of the cases rotates. A ratio above 1 means that the exact kernel is faster. `bf16` has packed weights in
bfloat16, beside torch's linear in float32.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from _report import publish, table

from shardfn import kernels

SHAPES = ((512, 512), (512, 1408), (1408, 512), (512, 8192))
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 768)
# Multiply-adds of one timed sample.
WORK = 3e8


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = [_line(k, n, m, args.rounds) for k, n in SHAPES for m in ROWS]
    head = ("k, n, rows", "fp32", "quartiles", "bf16", "quartiles", "GF/s")
    worst = min(float(line[1]) for line in lines)
    body = [
        f"{args.rounds} rounds; times of torch's linear divided by those of the exact kernel, medians",
        table(head, lines),
        f"the smallest median in float32 is {worst}; load of the machine at the end: {os.getloadavg()[0]:.1f}",
    ]
    publish("Exact linear layers", "\n\n".join(body), out=args.out)


def _line(k: int, n: int, m: int, rounds: int) -> tuple[str, ...]:
    x, weight = torch.randn(m, k), torch.randn(n, k)
    packed, narrow = kernels.pack_rows(weight), kernels.pack_rows(weight.bfloat16())
    cases: dict[str, Callable[[], object]] = {
        "torch": lambda: torch.nn.functional.linear(x, weight),
        "fp32": lambda: kernels.row_linear(x, packed, n),
        "bf16": lambda: kernels.row_linear(x, narrow, n),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    num, names = max(1, int(WORK / (m * k * n))), list(cases)
    for turn in range(rounds + 1):
        for name in names[turn % 3 :] + names[: turn % 3]:
            start = time.process_time()
            for _ in range(num):
                cases[name]()
            if turn:
                times[name].append((time.process_time() - start) / num)
    out = [f"{k}, {n}, {m}"]
    for name in ("fp32", "bf16"):
        low, middle, high = statistics.quantiles([a / b for a, b in zip(times["torch"], times[name], strict=True)], n=4)
        out += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
    return *out, f"{2 * m * k * n / statistics.median(times['fp32']) / 1e9:.0f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
