"""A small GPT trained on the bytes of the documentation, with states of AdamW in float32, 8 bits and bfloat16.

    python benchmarks/bench_low_precision_states.py --out benchmarks/results/low_precision_states_epyc2_202611.md

All runs have the same data, seed and steps. The run "reordered" is the control: float32 with the gradient of each batch
summed in two halves, which changes nothing but last bits. It shows how far two runs drift apart by rounding alone.
"""

import argparse
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from _report import publish, table
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.models import gpt

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = gpt.Config(256, 2, 64, 4, max_len=64)
ROWS, WINDOW = 8, 100


def text() -> Tensor:
    """The bytes of the pages, in order of their names."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in pages)), dtype=torch.uint8).long()


def batches(data: Tensor, num: int, seed: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - CONFIG.max_len - 1, (num, ROWS), generator=draw)
    return [{"tokens": data[s[:, None] + torch.arange(CONFIG.max_len + 1)]} for s in starts]


def train(name: str, steps: int) -> tuple[list[float], float, int]:
    """The loss of each step, the held-out loss at the end, and the bytes of the state."""
    data = text()
    train_on, last = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    loss: Callable[..., Any] = functools.partial(gpt.loss, CONFIG)
    rate = optim.warmup_cosine_decay_schedule(0.0, 3e-3, 50, steps, 3e-4)
    tx, params = rule(name, optim.adamw(rate)), gpt.init(CONFIG, sf.key(0))
    state, update = tx.init(params), optim.inplace(tx)
    nbytes = sum(x.nbytes for x in sf.tree_leaves(state))
    gradient = sf.value_and_grad(sf.accumulate(loss, 2) if name == "reordered" else loss)
    losses = []
    for batch in batches(train_on, steps, seed=1):
        value, grads = gradient(params, batch)
        params, state = update(grads, state, params)
        losses.append(float(value))
    with torch.no_grad():
        held = [float(loss(params, batch)) for batch in batches(last, 64, seed=2)]
    return losses, sum(held) / len(held), nbytes


def rule(name: str, adamw: Any) -> Any:
    if name == "8 bits":
        return optim.quantize_states(adamw)
    if name == "8 bits linear":
        return optim.quantize_states(adamw, code="linear")
    return optim.round_states(adamw, sf.key(7)) if name == "bfloat16" else adamw


def body(steps: int, runs: dict[str, tuple[list[float], float, int]]) -> str:
    base, held, size = runs["float32"]
    rows = []
    for name, (losses, after, nbytes) in runs.items():
        mean, end = (sum(losses[k:]) / sum(base[k:]) - 1 for k in (0, -WINDOW))
        rows.append([
            name, f"{nbytes:,}", f"{nbytes / size:.4f}", f"{sum(losses[-WINDOW:]) / WINDOW:.4f}",
            f"{100 * mean:+.3f} %", f"{100 * end:+.3f} %", f"{after:.4f}", f"{100 * (after / held - 1):+.3f} %",
        ])  # fmt: skip
    head = [
        *("states", "bytes", "of float32", f"loss, last {WINDOW}", f"all {steps} steps", f"last {WINDOW}"),
        *("held out", "held out"),
    ]  # fmt: skip
    return (
        f"{steps} steps of a GPT of 2 layers, 64 dims, 64 tokens, {ROWS} rows. Differences are relative to float32.\n\n"
        + table(head, rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--states", nargs="+", default=["float32", "reordered", "8 bits", "8 bits linear", "bfloat16"])
    parser.add_argument("--out", default="", help="the report")
    args = parser.parse_args()
    runs = {name: train(name, args.steps) for name in args.states}
    publish("States of low precision", body(args.steps, runs), out=args.out)


if __name__ == "__main__":
    main()
