"""A small GPT trained on the bytes of the documentation, with states of AdamW in float32, 8 bits and bfloat16.

    python benchmarks/bench_low_precision_states.py --out benchmarks/results/low_precision_states_epyc2_202611.md

A run of a seed has the same start, data and steps with all states. The run "noise" is the control: float32 with
gradients that are changed by a thousandth at random. It shows how far two runs of a seed drift apart by such a change.
Differences are means over the seeds, with their standard errors. With `--runs FILE` an interrupted program
continues.
"""

import argparse
import functools
import json
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
STATES = ("float32", "noise", "8 bits", "8 bits linear", "bfloat16")
WINDOW, NOISE = 100, 1e-3


def text() -> Tensor:
    """The bytes of the pages, in order of their names."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in pages)), dtype=torch.uint8).long()


def batches(data: Tensor, num: int, rows: int, length: int, seed: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - length - 1, (num, rows), generator=draw)
    return [{"tokens": data[s[:, None] + torch.arange(length + 1)]} for s in starts]


def train(name: str, config: gpt.Config, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The summed losses of all steps and of the last ones, the held-out loss at the end, and the bytes of the state."""
    data = text()
    train_on, last = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    loss: Callable[..., Any] = functools.partial(gpt.loss, config)
    warmup = min(100, args.steps // 2)
    rate = optim.warmup_cosine_decay_schedule(0.0, args.rate, warmup, args.steps, args.rate / 10)
    tx, params = rule(name, optim.adamw(rate)), gpt.init(config, sf.key(seed))
    state, update = tx.init(params), optim.inplace(tx)
    nbytes = sum(x.nbytes for x in sf.tree_leaves(state))
    gradient, draw = sf.value_and_grad(loss), torch.Generator().manual_seed(seed)
    losses = []
    for batch in batches(train_on, args.steps, args.rows, config.max_len, seed=seed):
        value, grads = gradient(params, batch)
        if name == "noise":
            grads = sf.tree_map(lambda x: x * (1 + NOISE * torch.randn(x.shape, generator=draw)), grads)
        params, state = update(grads, state, params)
        losses.append(float(value))
    with torch.no_grad():
        held = [float(loss(params, batch)) for batch in batches(last, 64, 8, config.max_len, seed=2)]
    return {"all": sum(losses), "last": sum(losses[-WINDOW:]), "held": sum(held) / len(held), "bytes": nbytes}


def rule(name: str, adamw: Any) -> Any:
    if name == "8 bits":
        return optim.quantize_states(adamw)
    if name == "8 bits linear":
        return optim.quantize_states(adamw, code="linear")
    return optim.round_states(adamw, sf.key(7)) if name == "bfloat16" else adamw


def body(config: gpt.Config, args: argparse.Namespace, runs: dict[str, dict[str, Any]]) -> str:
    seeds = [s for s in range(args.seeds) if all(f"{name} {s}" in runs for name in args.states)]
    base = [runs[f"float32 {s}"] for s in seeds]
    rows = []
    for name in args.states:
        own = [runs[f"{name} {s}"] for s in seeds]
        cells = [differ([100 * (x[at] / y[at] - 1) for x, y in zip(own, base, strict=True)]) for at in KEYS]
        held = sum(x["held"] for x in own) / len(own)
        rows.append([name, f"{own[0]['bytes']:,}", f"{own[0]['bytes'] / base[0]['bytes']:.4f}", f"{held:.4f}", *cells])
    head = ["states", "bytes", "of float32", "held-out loss", f"all {args.steps} steps", f"last {WINDOW}", "held out"]
    about = (
        f"{args.steps} steps of a GPT of {config.num_layers} layers, {config.d_model} dims,"
        f" {gpt.num_params(config):,} parameters, {config.max_len} tokens, {args.rows} rows, rate {args.rate:g}."
        f" Mean differences from float32 over {len(seeds)} seeds, in percent, and their standard errors."
    )
    return f"{about}\n\n{table(head, rows)}"


KEYS = ("all", "last", "held")


def differ(found: list[float]) -> str:
    x = torch.tensor(found, dtype=torch.float64)
    error = float(x.std() / len(x) ** 0.5) if len(x) > 1 else float("nan")
    return f"{float(x.mean()):+.3f} ± {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--states", nargs="+", default=STATES, choices=STATES)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dims", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--runs", default="", help="file of the runs so far (default: none is kept)")
    parser.add_argument("--out", default="", help="the report")
    args = parser.parse_args()
    config = gpt.Config(256, args.layers, args.dims, 4, max_len=64)
    kept = pathlib.Path(args.runs) if args.runs else None
    runs: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    for seed in range(args.seeds):
        for name in args.states:
            if f"{name} {seed}" not in runs:
                runs[f"{name} {seed}"] = train(name, config, args, seed)
                if kept is not None:
                    kept.write_text(json.dumps(runs, indent=1))
    publish("States of low precision", body(config, args, runs), out=args.out)


if __name__ == "__main__":
    main()
