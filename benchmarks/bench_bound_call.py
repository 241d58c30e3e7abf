"""Time of a captured sharded function's call, of a bound one's, and of its graph alone, by number of leaves.

    python benchmarks/bench_bound_call.py --leaves 20 200 1000
    torchrun --standalone --nproc-per-node 2 benchmarks/bench_bound_call.py

On several ranks these are the times of the first. The function multiplies by each leaf, so the graph has two small
operations a leaf; the difference to the graph alone is the cost of a call. The three alternate in rounds; medians and
quartiles of rounds are printed.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.collectives import GlobalTensor

CALLS, ROUNDS = 100, 15


def decode(params: list[Tensor], cache: list[Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A cache of two leaves, written in place."""
    for w in params:
        x = torch.tanh(x * w)
    for c in cache:
        c.add_(x)
    return x, cache


def measured(leaves: int, mesh: sf.Mesh) -> dict[str, list[float]]:
    """Microseconds a call, by kind, a number for each round."""
    f = sf.sharded(sf.jit(decode), mesh=mesh, in_specs=(P(),), out_specs=(None, P()), donate=1)
    params, x = f.init([torch.randn(8) for _ in range(leaves)]), torch.randn(8)
    cache = [GlobalTensor(torch.zeros(8), torch.Size([8]), P(), mesh) for _ in range(2)]
    bound = f.bind(params, cache, x)
    blocks = [p.local for p in params]

    def graph(params: list[GlobalTensor], cache: list[GlobalTensor], x: Tensor) -> tuple[Tensor, list[GlobalTensor]]:
        del params
        with torch.no_grad():
            plain(*blocks, *(c.local for c in cache), x)
        return x, cache

    plain: Callable[..., object] = bound.graph
    kinds = {"call": f, "bound": bound, "graph": graph}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        for kind, call in kinds.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                _, cache = call(params, cache, x)
            found[kind].append((time.perf_counter() - start) / CALLS * 1e6)
    return found


def _nothing(text: str) -> None:
    del text


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, nargs="+", default=[20, 200, 1000])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    leaves_of_each = parser.parse_args().leaves
    mesh = sf.make_mesh({"tp": -1})
    say = print if mesh.rank == 0 else _nothing
    say(f"torch {torch.__version__}, Python {platform.python_version()}, {mesh.size} ranks; us, median (quartiles)")
    say("| leaves | call | bound | graph alone | bound - graph |\n|---|---|---|---|---|")
    for leaves in leaves_of_each:
        found = measured(leaves, mesh)
        shown = {k: statistics.quantiles(v[2:], n=4) for k, v in found.items()}
        cells = [f"{shown[k][1]:.0f} ({shown[k][0]:.0f} to {shown[k][2]:.0f})" for k in ("call", "bound", "graph")]
        more = statistics.median(b - g for b, g in zip(found["bound"], found["graph"], strict=True))
        say(f"| {leaves} | {' | '.join(cells)} | {more:.0f} |")


if __name__ == "__main__":
    main()
