"""The cost of following values along axes: microseconds an operation, with and without, on one process.

    python benchmarks/bench_following.py [--ops 20000] [--rounds 15]

Each round times every operation in both ways, in turn; the difference is formed within a round. One process suffices,
as the operations send no messages: operands are noted as varying along one axis of a mesh of two ranks.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _report import publish, table

from shardfn.collectives import AxisTypeMode
from shardfn.core import make_mesh


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    mode = AxisTypeMode(make_mesh({"dp": 2}, device="cpu", abstract=True), ("dp",))
    operations = _operations(mode)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in operations}
    for _ in range(args.rounds):
        for name, f in operations.items():
            alone = _seconds(f, args.ops)
            with mode:
                taken[name].append((alone, _seconds(f, args.ops)))
    rows = []
    for name, pairs in taken.items():
        more = [1e6 * (b - a) for a, b in pairs]
        low, mid, high = statistics.quantiles(more, n=4)
        rows.append(
            [name, f"{1e6 * statistics.median(a for a, _ in pairs):.2f}", f"{mid:.2f}", f"{low:.2f} .. {high:.2f}"]
        )
    head = ["operation", "alone, us", "more when followed, us", "quartiles"]
    note = f"{args.ops} calls of each in each of {args.rounds} rounds, tensors of 16 elements"
    publish("The cost of following values along axes", f"{note}\n\n{table(head, rows)}", out=args.out)


def _seconds(f: Callable[[], Any], num: int) -> float:
    start = time.perf_counter()
    for _ in range(num):
        f()
    return (time.perf_counter() - start) / num


def _operations(mode: AxisTypeMode) -> dict[str, Callable[[], Any]]:
    x, y, w, b = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 4), torch.ones(4)
    g = torch.ones(4, 4, requires_grad=True)
    for t in (x, y, w, b, g):
        mode.declare(t, ("dp",))
    return {
        "x * y": lambda: x * y,
        "g * y, with a gradient": lambda: g * y,
        "x.sum()": lambda: x.sum(),
        "x.view(2, 8)": lambda: x.view(2, 8),
        "x[1:3, None]": lambda: x[1:3, None],
        "x.shape": lambda: x.shape,
        "torch.cat([x, y])": lambda: torch.cat([x, y]),
        "F.linear(x, w, b)": lambda: F.linear(x, w, b),
        "x.add_(y)": lambda: x.add_(y),
    }


if __name__ == "__main__":
    main()
