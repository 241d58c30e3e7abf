"""Trains a dense GPT and one with experts on the same text, with equal flops a token, and compares their losses.

    python examples/train_moe.py python examples/train_moe.py --experts 16 --top-k 4 --steps 800 --seeds 5 torchrun
    --nproc-per-node 2 examples/train_moe.py --exchange tokens

An expert is 1 / top_k as wide as the dense model's feed-forward part, so a token meets equally many weights in both;
the router's come on top. A seed draws the weights and the order of the text, which is the same for both models.
By default (without --data) the text is the sources of Python's standard library, as bytes.

On several ranks each has its rows of the batch and its block of the experts, and rows travel to their experts
(`--exchange tokens`), or experts to the rows (`weights`). Losses are those of one rank but for rounding.

Files in --out: tokens.bin, curves.json, curves.md, and curves.png where matplotlib is installed.
"""

import argparse
import functools
import importlib.util
import json
import os
import pathlib
import statistics
import time

import torch
import torch.distributed as dist

import shardfn as sf
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers

EXCHANGES = {"tokens": layers.AllToAll("ep"), "weights": layers.GatherExperts("ep")}


def main():
    args = arguments()
    if "LOCAL_RANK" in os.environ and not torch.cuda.is_available():
        torch.set_num_threads(1)
    mesh = sf.make_mesh({"ep": -1})
    say = functools.partial(print, flush=True) if mesh.rank == 0 else lambda *_: None
    text = read_text(args, mesh)
    models = {"dense": dense(args), f"{args.experts} experts": with_experts(args)}
    for name, config in models.items():
        active = gpt.num_params(config) if config.experts is None else moe.num_active_params(config)
        say(f"{name}: {gpt.num_params(config):,} parameters, a token uses {active:,}")
    curves = {name: [] for name in models}
    for seed in range(args.seeds):
        for name, config in models.items():
            begin = time.monotonic()
            curves[name].append(train(config, text, seed, args, mesh))
            say(f"seed {seed}, {name}: loss {curves[name][-1][-1][1]:.4f}, {time.monotonic() - begin:.0f} s")
    if mesh.rank == 0:
        report(curves, args)
    if dist.is_initialized():
        dist.destroy_process_group()


def dense(args):
    size = {"num_layers": args.layers, "d_model": args.dim, "num_heads": args.heads, "max_len": args.length}
    return gpt.Config.llama_like(vocab_size=256, d_ff=args.width, tie_embeddings=True, **size)


def with_experts(args):
    exchange = EXCHANGES[args.exchange]
    experts = moe.Experts(
        num=args.experts, top_k=args.top_k, d_ff=args.width // args.top_k, balance=0.01, axes="ep", exchange=exchange
    )
    size = {"num_layers": args.layers, "d_model": args.dim, "num_heads": args.heads, "max_len": args.length}
    return gpt.Config.llama_like(vocab_size=256, d_ff=args.width, tie_embeddings=True, experts=experts, **size)


def train(config, text, seed, args, mesh):
    """The loss of validation after every `eval_every` steps, as pairs (step, loss)."""
    rank, world = mesh.axis_index("ep"), mesh.axis_size("ep")
    training, validation = sf.data.Batches(text, args.batch, args.length, seed).split(0.02)
    held_out = [validation(i, rank=rank, world=world) for i in range(args.eval_batches)]

    def evaluate(params, batch):
        # Validation is cross entropy alone, without the term that balances experts.
        logits = gpt.apply(config, params, batch["tokens"][:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())
        return sf.pmean(loss, "ep")

    schedule = sf.optim.warmup_cosine_decay_schedule(0.0, args.lr, args.steps // 20 + 1, args.steps + 1, args.lr / 10)
    optimizer = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(schedule, b2=0.95, weight_decay=0.1))
    step = sf.sharded_step(
        functools.partial(gpt.loss, config),
        optimizer,
        mesh=mesh,
        specs=gpt.specs(config),
        batch=sf.P("ep"),
        zero=sf.Zero(stage=args.zero, axis="ep"),
    )
    state = step.init(functools.partial(gpt.init, config), sf.key(seed))
    curve = []
    for n in range(args.steps):
        state, _ = step(state, training(n, rank=rank, world=world))
        if (n + 1) % args.eval_every == 0 or n + 1 == args.steps:
            losses = [step.apply(evaluate, state, batch).item() for batch in held_out]
            curve.append((n + 1, statistics.mean(losses)))
    return curve


def steps_to(curve, loss):
    """The step at which a curve reaches a loss, between measurements on a straight line; None if it never does."""
    (before, high), *rest = [(0, float("inf")), *curve]
    for step, low in rest:
        if low <= loss:
            return step if high == float("inf") else before + (step - before) * (high - loss) / (high - low)
        before, high = step, low
    return None


def report(curves, args):
    """Prints and writes the table of losses, the ratio of steps to the dense model's last loss, and the plot."""
    (first, baselines), (other, found) = curves.items()
    lines = [f"| step | {first} | {other} |", "|---|---|---|"]
    for i, (step, _) in enumerate(baselines[0]):
        lines.append(f"| {step} | " + " | ".join(spread([c[i][1] for c in runs]) for runs in (baselines, found)) + " |")
    last = [curve[-1][1] for curve in baselines]
    reached = [steps_to(curve, loss) for curve, loss in zip(found, last, strict=True)]
    ratios = [step / args.steps for step in reached if step is not None]
    lines.append(f"\nSteps of {other} to the last loss of {first}, as a part of its steps: " + spread(ratios))
    lines[-1] += f" ({len(ratios)} of {len(last)} seeds reach it)."
    text = "\n".join(lines) + "\n"
    print(text, end="")
    (args.out / "curves.md").write_text(text, encoding="utf-8")
    (args.out / "curves.json").write_text(json.dumps({"args": vars(args) | {"out": None, "data": None}, **curves}))
    if importlib.util.find_spec("matplotlib"):
        draw(curves, args.out / "curves.png")


def spread(values):
    """The mean, and the sample deviation behind it."""
    if not values:
        return "-"
    return f"{statistics.mean(values):.3f}" + (f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else "")


def draw(curves, path):
    from matplotlib.figure import Figure

    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    for (name, runs), color in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
        for i, curve in enumerate(runs):
            axes.plot(*zip(*curve, strict=True), color=color, lw=1, label=None if i else name)
    axes.set(xlabel="step", ylabel="validation loss, nats a byte")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.figure.savefig(path, dpi=150)


def read_text(args, mesh):
    """Rank 0 writes the file of bytes, the others wait for it."""
    path = args.out / "tokens.bin"
    if mesh.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        sf.data.encode_files(args.data or sf.data.default_corpus(), path, sf.data.ByteTokenizer())
    if mesh.size > 1:
        dist.barrier()
    return sf.data.TokenFile.open(path)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", nargs="+", type=pathlib.Path, metavar="PATH", help="text files (the Python standard library)")
    add("--experts", type=int, default=8, help="of each layer (%(default)s)")
    add("--top-k", type=int, default=2, help="experts of a token (%(default)s)")
    add("--exchange", choices=tuple(EXCHANGES), default="tokens", help="between ranks (%(default)s)")
    add("--zero", type=int, choices=(0, 1, 2, 3), default=1, help="ZeRO stage (%(default)s)")
    add("--seeds", type=int, default=3, help="%(default)s")
    add("--steps", type=int, default=1000, help="%(default)s")
    add("--batch", type=int, default=16, help="rows of the global batch (%(default)s)")
    add("--length", type=int, default=64, help="bytes a row (%(default)s)")
    add("--layers", type=int, default=2, help="%(default)s")
    add("--dim", type=int, default=96, help="%(default)s")
    add("--heads", type=int, default=4, help="%(default)s")
    add("--width", type=int, default=384, help="of the dense feed-forward part (%(default)s)")
    add("--lr", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    add("--eval-every", type=int, default=100, help="steps (%(default)s)")
    add("--eval-batches", type=int, default=8, help="%(default)s")
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/moe"), help="%(default)s")
    args = parser.parse_args()
    if args.width % args.top_k:
        parser.error(f"--width {args.width}: an expert is 1 / --top-k {args.top_k} of it; choose a multiple")
    return args


if __name__ == "__main__":
    main()
