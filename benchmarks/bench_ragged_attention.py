"""`kernels.ragged_attention` beside torch's attention on dense tensors, on one thread: ratios of processor time.

The order of the cases rotates, and ratios are formed within a round. A ratio above 1 means that the exact kernel is
faster, though it also writes the cache and reads it through shuffled tables. `floor` is `sum()` over the keys and
values that are read. `bf16` has a cache in bfloat16, beside torch's attention in float32.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from _report import publish, table

from shardfn import kernels

HEADS = ((8, 8, 64), (8, 2, 64), (32, 8, 128))
BLOCK = 16
# Multiply-adds of one timed sample.
WORK = 1e8


class Case(NamedTuple):
    """Sequences, the tokens of each in the call, and their context with these tokens."""

    sequences: int
    tokens: int
    context: int


DECODE = (Case(1, 1, 256), Case(1, 1, 2048), Case(1, 1, 16384), Case(8, 1, 1024), Case(32, 1, 512))
PROMPTS = (Case(1, 32, 1024), Case(1, 128, 128), Case(1, 512, 512), Case(1, 256, 2048), Case(1, 2048, 2048))


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    body = [f"{args.rounds} rounds; times of torch's attention divided by those of the exact kernel, medians"]
    for name, cases in (("Decode", DECODE), ("Prompts", PROMPTS)):
        head = "H, G, K", "sequences x tokens, context", "fp32", "quartiles", "bf16", "floor / fp32", "GB/s", "GF/s"
        body += [name, table(head, [_line(heads, case, args.rounds) for heads in HEADS for case in cases])]
    body += [f"load of the machine at the end: {os.getloadavg()[0]:.1f}"]
    publish("Exact attention over a paged cache", "\n\n".join(body), out=args.out)


def _line(heads: tuple[int, int, int], case: Case, rounds: int) -> tuple[str, ...]:
    (H, G, K), (S, T, C) = heads, case
    dense = torch.randn(2, S, G, C, K)
    calls = _calls(heads, case, dense)
    times: dict[str, list[float]] = {name: [] for name in calls}
    pairs = S * (T * C - T * (T - 1) // 2)
    num, names = max(1, int(WORK / (2 * pairs * H * K))), list(calls)
    for turn in range(rounds + 1):
        for name in names[turn % 4 :] + names[: turn % 4]:
            start = time.process_time()
            for _ in range(num):
                calls[name]()
            if turn:
                times[name].append((time.process_time() - start) / num)

    def ratio(one: str, other: str) -> list[float]:
        return statistics.quantiles([a / b for a, b in zip(times[one], times[other], strict=True)], n=4)

    low, middle, high = ratio("torch", "fp32")
    seconds = statistics.median(times["fp32"])
    return (
        f"{H}, {G}, {K}",
        f"{S} x {T}, {C}",
        f"{middle:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{ratio('torch', 'bf16')[1]:.2f}",
        f"{ratio('floor', 'fp32')[1]:.2f}",
        f"{dense.nbytes / seconds / 1e9:.1f}",
        f"{4 * pairs * H * K / seconds / 1e9:.0f}",
    )


def _calls(heads: tuple[int, int, int], case: Case, dense: torch.Tensor) -> dict[str, Callable[[], object]]:
    (H, G, K), (S, T, C) = heads, case
    q, k, v = (torch.randn(S * T, x, K) for x in (H, G, G))
    width = -(-C // BLOCK)
    tables = torch.randperm(S * width).view(S, width).int()
    positions = torch.arange(C - T, C).repeat(S).int()
    sequences = torch.arange(S).repeat_interleave(T).int()
    slots = tables[sequences.long(), positions.long() // BLOCK] * BLOCK + positions % BLOCK
    plan = slots, positions, sequences, tables
    wide = torch.randn(S * width, 2, G, BLOCK, K)
    narrow = wide.bfloat16()
    dense_q = q.view(S, T, H, K).transpose(1, 2).contiguous()
    mask = None if T in (1, C) else torch.ones(T, C, dtype=torch.bool).tril(C - T)
    how = {"is_causal": T == C > 1, "attn_mask": mask, "enable_gqa": H != G}
    attention = torch.nn.functional.scaled_dot_product_attention
    return {
        "torch": lambda: attention(dense_q, dense[0], dense[1], **how),
        "fp32": lambda: kernels.ragged_attention(q, k, v, wide, *plan),
        "bf16": lambda: kernels.ragged_attention(q, k, v, narrow, *plan),
        "floor": lambda: dense.sum(),
    }


if __name__ == "__main__":
    main()
