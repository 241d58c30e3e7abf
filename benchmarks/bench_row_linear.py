"""`kernels.row_linear` beside torch's linear, on one thread: ratios of processor time, formed within a round.

The order of the cases rotates. A ratio above 1 means that the exact kernel is faster. `bf16` has packed weights in
bfloat16, beside torch's linear in float32. `graph` is float32 in captured graphs of both, as engines and jitted steps
run them: there ops are called without torch's dispatcher, which takes longer for an op in Python than for one in C++.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from _report import publish, table
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn import kernels
from shardfn.graph import compile_graph

SHAPES = ((512, 512), (512, 1408), (1408, 512), (512, 8192))
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 768)
# Multiply-adds of one timed sample.
WORK = 3e8
# Products of one captured graph.
PRODUCTS = 16


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = [_line(k, n, m, args.rounds) for k, n in args.shapes for m in args.rows]
    head = ("k, n, rows", "fp32", "quartiles", "bf16", "quartiles", "graph", "quartiles", "GF/s")
    alone, captured = (min(float(line[at]) for line in lines) for at in (1, 5))
    body = [
        f"{args.rounds} rounds; times of torch's linear divided by those of the exact kernel, medians",
        table(head, lines),
        f"the smallest median in float32 is {alone}, in graphs {captured}; load of the machine at the end:"
        f" {os.getloadavg()[0]:.1f}",
    ]
    publish("Exact linear layers", "\n\n".join(body), out=args.out)


def _line(k: int, n: int, m: int, rounds: int) -> tuple[str, ...]:
    x, weight = torch.randn(m, k), torch.randn(n, k)
    packed, narrow = kernels.pack_rows(weight), kernels.pack_rows(weight.bfloat16())
    num = max(1, int(WORK / (m * k * n)))

    def exact(x: Tensor, packed: Tensor) -> Tensor:
        return kernels.row_linear(x, packed, n)

    # By name, the call and its number of products.
    cases: dict[str, tuple[Callable[[], object], int]] = {
        "torch": (lambda: torch.nn.functional.linear(x, weight), 1),
        "fp32": (lambda: exact(x, packed), 1),
        "bf16": (lambda: exact(x, narrow), 1),
        "torch graph": (_captured(torch.nn.functional.linear, x, weight), PRODUCTS),
        "graph": (_captured(exact, x, packed), PRODUCTS),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            run, products = cases[name]
            calls = max(1, num // products)
            start = time.process_time()
            for _ in range(calls):
                run()
            if turn:
                times[name].append((time.process_time() - start) / (calls * products))
    out = [f"{k}, {n}, {m}"]
    for name, beside in (("fp32", "torch"), ("bf16", "torch"), ("graph", "torch graph")):
        low, middle, high = statistics.quantiles([a / b for a, b in zip(times[beside], times[name], strict=True)], n=4)
        out += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
    return *out, f"{2 * m * k * n / statistics.median(times['fp32']) / 1e9:.0f}"


def _captured(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Callable[[], object]:
    """The call of a captured graph of some products of the same tensors."""

    def products(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return tuple(product(x, weight) for _ in range(PRODUCTS))

    run = compile_graph(make_fx(products, tracing_mode="fake")(x, weight), "graph")
    return lambda: run(x, weight)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=lambda x: tuple(map(int, x.split(","))), default=ROWS)
    parser.add_argument("--shapes", type=lambda x: tuple(tuple(map(int, s.split("x"))) for s in x.split(",")))
    parser.add_argument("--out", default="")
    parser.set_defaults(shapes=SHAPES)
    return parser.parse_args()


if __name__ == "__main__":
    main()
