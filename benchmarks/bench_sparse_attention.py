"""Block-sparse attention on a CPU, forward and backward, beside dense attention: ours tile by tile, and torch's.

Three questions. At `--tokens` tokens and about 5% of the blocks, the time of `nn.BlockSparse` beside that of
`nn.Blockwise` over all pairs times the density; 1 is a kernel that is as fast a pair as the dense one. At `--long`
tokens, how much faster the fixed layout of Sparse Transformers is than torch's `scaled_dot_product_attention`, with
windows of the square root of the number of blocks, as in the paper, and with DeepSpeed's default of 4. And
`nn.Blockwise` over all pairs beside torch's kernel. Cases take turns within a round, whose order rotates, and ratios
are formed within a round: on a machine that others use too, ratios mean something and seconds do not. Seconds are the
processor's: a thread may wait for its turn.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from _report import publish, table

import shardfn as sf
from shardfn import nn

DENSE, BLOCKWISE = "torch's SDPA", "Blockwise, all pairs"


class Case(NamedTuple):
    """A kernel call, and the share of all pairs that its blocks have."""

    run: Callable[[], object]
    density: float


Times = dict[str, list[float]]


def main() -> None:
    """Measures and reports."""
    args = arguments()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    parts = [
        f"{args.rounds} rounds, {args.threads} threads, {args.dtype}, 1 sample, {args.heads} heads of {args.dim},"
        f" blocks of {args.block}; CPU seconds are medians of forward and backward"
    ]
    for length, make in ((args.tokens, wide_cases), (args.long, long_cases)):
        if length:
            qkv = [torch.randn(1, length, args.heads, args.dim).to(dtype).requires_grad_() for _ in range(3)]
            cases = make(qkv, args.block)
            times = measure(cases, args.rounds)
            parts += [f"{length} tokens", report(cases, times)]
    parts.append(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    publish("Block-sparse attention", "\n\n".join(parts), out=args.out)


def wide_cases(qkv, block):
    """Layouts of about 5% beside dense attention, causal and not."""
    T, own = qkv[0].shape[1], {"block": block}
    both = {
        "bigbird, 2 random": nn.layouts.bigbird(T, random=(2, sf.key(0)), **own),
        "local window of 7": nn.layouts.local_window(T, num_window_blocks=7, attention="bidirectional", **own),
    }
    cases = dense_cases(qkv, nn.Full(), "")
    return cases | {name: case(qkv, layout, nn.BlockSparse()) for name, layout in both.items()}


def long_cases(qkv, block):
    """The fixed layout beside torch's kernel."""
    T = qkv[0].shape[1]
    root = round((T / block) ** 0.5)
    cases = {DENSE: case(qkv, nn.Full(), nn.Dense()), f"{DENSE}, causal": case(qkv, nn.Causal(), nn.Dense())}
    for local in (root, 4):
        layout = nn.layouts.fixed(T, block=block, num_local_blocks=local)
        cases[f"fixed, windows of {local}"] = case(qkv, layout, nn.BlockSparse())
        layout = nn.layouts.fixed(T, block=block, num_local_blocks=local, attention="unidirectional")
        cases[f"fixed, windows of {local}, causal"] = case(qkv, nn.Causal() & layout, nn.BlockSparse())
    return cases


def dense_cases(qkv, mask, suffix):
    return {
        DENSE + suffix: case(qkv, mask, nn.Dense()),
        BLOCKWISE + suffix: case(qkv, mask, nn.Blockwise()),
        "BlockSparse, all pairs" + suffix: case(qkv, mask, nn.BlockSparse()),
    }


def case(qkv, mask, impl):
    T = qkv[0].shape[1]
    layouts = [m for m in mask.parts if isinstance(m, nn.BlockLayout)]
    dy = torch.randn_like(qkv[0])

    def run():
        y = nn.attention(*qkv, mask=mask, impl=impl)
        return torch.autograd.grad(y, qkv, dy)

    density = float(layouts[0].blocks.mean()) if layouts else mask.count((0, T), (0, T)) / T**2
    return Case(run, density)


def measure(cases: dict[str, Case], rounds: int) -> Times:
    times: Times = {name: [] for name in cases}
    names = list(cases)
    for turn in range(rounds + 1):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            begin = time.process_time()
            cases[name].run()
            if turn:
                times[name].append(time.process_time() - begin)
    return times


def report(cases: dict[str, Case], times: Times) -> str:
    head = ["case", "blocks", "CPU s", "torch / it", "quartiles", "it / (Blockwise x blocks)", "quartiles"]
    rows = []
    for name, taken in times.items():
        causal = f"{DENSE}, causal" if name.endswith("causal") else DENSE
        faster = [a / b for a, b in zip(times[causal], taken, strict=True)]
        share = cases[name].density
        dense = times.get(BLOCKWISE)
        per = [b / (a * share) for a, b in zip(dense, taken, strict=True)] if dense else None
        rows.append([name, f"{share:.1%}", f"{statistics.median(taken):.3f}", *spread(faster), *spread(per)])
    return table(head, rows)


def spread(ratios: list[float] | None) -> list[str]:
    """The median and the quartiles."""
    if ratios is None:
        return ["", ""]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--tokens", type=int, default=8192, help="of the first table; 0 leaves it out")
    add("--long", type=int, default=16384, help="of the second")
    add("--heads", type=int, default=2)
    add("--dim", type=int, default=64)
    add("--block", type=int, default=64)
    add("--dtype", default="float32")
    add("--threads", type=int, default=1)
    add("--rounds", type=int, default=7)
    add("--out", default="", help="Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
