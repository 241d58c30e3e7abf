"""Trains a dense GPT and others with experts on the same text, and compares losses, parameters and time.

    python examples/train_moe.py
    python examples/train_moe.py --experts 16 --top-k 4 --steps 800 --seeds 5
    python examples/train_moe.py --models moe pr-moe mos alone --layers 8 --every 2 --top-k 1 --experts 16
    torchrun --nproc-per-node 2 examples/train_moe.py --exchange tokens

`--models` are dense, moe (`--experts` in every `--every`-th layer), pr-moe (a pyramid, `--pyramid` experts by layer,
each with the layer's dense MLP), mos (a Mixture-of-Students: PR-MoE's model without each 8th layer, which begins with
its trained weights and learns from it in the first `--taught` part of `--student-steps`), and alone, the same student
without a teacher.

An expert is 1 / top_k as wide as the dense model's feed-forward part, so a token meets equally many weights in both;
the router's come on top. A seed draws the weights and the order of the text, which is the same for both models.
By default (without --data) the text is the sources of Python's standard library, as bytes.

On several ranks each has its rows of the batch and its block of the experts, and rows travel to their experts
(`--exchange tokens`), or experts to the rows (`weights`). Losses are those of one rank but for rounding.

Files in --out: tokens.bin, curves.json, curves.md, and curves.png where matplotlib is installed.
"""

import argparse
import dataclasses
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
    models = configs(args)
    sizes = {name: gpt.num_params(config) for name, config in models.items()}
    for name, config in models.items():
        active = sizes[name] if config.experts is None else moe.num_active_params(config)
        say(f"{name}: {sizes[name]:,} parameters, {config.num_layers} layers, a token uses {active:,}")
    curves, seconds = {name: [] for name in models}, {name: [] for name in models}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        trained = {}
        for name, config in models.items():
            begin = time.monotonic()
            teacher = (models["PR-MoE"], trained["PR-MoE"]) if name in STUDENTS.values() else None
            taught = name == STUDENTS["mos"]
            curve, trained[name] = train(config, text, seed, args, mesh, teacher, taught)
            curves[name].append(curve)
            seconds[name].append((time.monotonic() - begin) / curve[-1][0])
            say(f"seed {seed}, {name}: loss {curve[-1][1]:.4f}, {time.monotonic() - begin:.0f} s")
    if mesh.rank == 0:
        report(curves, sizes, seconds, args)
    if dist.is_initialized():
        dist.destroy_process_group()


STUDENTS = {"mos": "PR-MoE + MoS", "alone": "the student alone"}


def configs(args):
    """The models by name, in the order of training."""
    size = {"num_layers": args.layers, "d_model": args.dim, "num_heads": args.heads, "max_len": args.length}
    dense = gpt.Config.llama_like(vocab_size=256, d_ff=args.width, tie_embeddings=True, **size)
    # A single choice is weighted by its probability, through which the router learns.
    route = functools.partial(layers.top_k, renormalise=args.top_k > 1)
    how = {"every": args.every, "balance": 0.01, "axes": "ep", "exchange": EXCHANGES[args.exchange]}
    experts = moe.Experts(num=args.experts, top_k=args.top_k, d_ff=args.width // args.top_k, route=route, **how)
    models = {"dense": dense, f"{args.experts} experts": dataclasses.replace(dense, experts=experts)}
    names = dict(zip(("dense", "moe"), models, strict=True)) | {"pr-moe": "PR-MoE"} | STUDENTS
    if "pr-moe" in args.models:
        route = functools.partial(layers.top_k, renormalise=False)
        pyramid = moe.Experts(num=tuple(args.pyramid), top_k=1, route=route, residual=True, **how)
        models["PR-MoE"] = dataclasses.replace(dense, experts=pyramid)
    if STUDENTS.keys() & set(args.models):
        small, _ = moe.student(models["PR-MoE"], gpt.init(models["PR-MoE"], sf.key(0)))
        models |= dict.fromkeys(STUDENTS.values(), small)
    return {name: models[name] for name in (names[x] for x in names if x in args.models)}


def distilled(config, large, params, batch, *, weight):
    """The cross entropy, the balance of experts, and with a weight the divergence from the teacher."""

    def of_logits(logits, shifted):
        total, count = sf.nn.cross_entropy_sum(logits, shifted["targets"])
        if weight is None:
            return sf.WeightedMean(total, count)
        taught = gpt.apply(large, params["teacher"], shifted["tokens"])
        return sf.WeightedMean(total + weight * sf.distill.logits(logits, taught, shifted["targets"]).total, count)

    return gpt.loss(config, params["student"], batch, of_logits=of_logits)


def train(config, text, seed, args, mesh, teacher=None, taught=False):
    """Returns the loss of validation after every `eval_every` steps, as pairs (step, loss), and the parameters.

    A `teacher` is a config and whole parameters. A student begins with its layers, and is `taught` by it or not.
    """
    rank, world = mesh.axis_index("ep"), mesh.axis_size("ep")
    training, validation = sf.data.Batches(text, args.batch, args.length, seed).split(0.02)
    held_out = [validation(i, rank=rank, world=world) for i in range(args.eval_batches)]

    def evaluate(params, batch):
        # Validation is cross entropy alone, without the term that balances experts.
        params = params if teacher is None else params["student"]
        logits = gpt.apply(config, params, batch["tokens"][:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())
        return sf.pmean(loss, "ep")

    steps, first = (args.steps, 0) if teacher is None else (args.student_steps, args.steps)
    peak = args.lr if teacher is None else args.lr / 2
    schedule = sf.optim.warmup_cosine_decay_schedule(0.0, peak, steps // 20 + 1, steps + 1, args.lr / 10)
    optimizer = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(schedule, b2=0.95, weight_decay=0.1))
    how = {"mesh": mesh, "batch": sf.P("ep"), "zero": sf.Zero(stage=args.zero, axis="ep")}
    wrap = functools.partial(sf.jit, backend="graph") if args.jit else lambda loss: loss
    if teacher is None:
        step = sf.sharded_step(wrap(functools.partial(gpt.loss, config)), optimizer, specs=gpt.specs(config), **how)
        state = step.init(functools.partial(gpt.init, config), sf.key(seed))
        at = lambda state: step  # noqa: E731
    else:
        large, params = teacher
        step = sf.distill.staged_step(
            functools.partial(distilled, config, large),
            optimizer,
            until=int(args.taught * steps) if taught else 0,
            wrap=wrap,
            specs={"student": gpt.specs(config), "teacher": gpt.specs(large)},
            trainable={"student": True, "teacher": False},
            **how,
        )
        state, at = step.init({"student": moe.student(large, params)[1], "teacher": params}), step.at
    curve = []
    for n in range(steps):
        state, _ = step(state, training(first + n, rank=rank, world=world))
        if (n + 1) % args.eval_every == 0 or n + 1 == steps:
            losses = [at(state).apply(evaluate, state, batch).item() for batch in held_out]
            curve.append((n + 1, statistics.mean(losses)))
    return curve, sf.unshard(state.params)


def steps_to(curve, loss):
    """The step at which a curve reaches a loss, between measurements on a straight line; None if it never does."""
    (before, high), *rest = [(0, float("inf")), *curve]
    for step, low in rest:
        if low <= loss:
            return step if high == float("inf") else before + (step - before) * (high - loss) / (high - low)
        before, high = step, low
    return None


def report(curves, sizes, seconds, args):
    """Prints and writes the tables of losses and sizes, the steps to the first model's last loss, and the plot."""
    first, *others = curves
    shown = sorted({step for runs in curves.values() for step, _ in runs[0]})
    lines = ["| step | " + " | ".join(curves) + " |", "|---" * (1 + len(curves)) + "|"]
    for step in shown:
        found = ([dict(c).get(step) for c in runs] for runs in curves.values())
        lines.append(f"| {step} | " + " | ".join(spread([x for x in each if x is not None]) for each in found) + " |")
    lines += [
        "",
        "| model | parameters | of the first | last loss | to the first | ms a step |",
        "|---|---|---|---|---|---|",
    ]
    last = {name: [curve[-1][1] for curve in runs] for name, runs in curves.items()}
    for name, losses in last.items():
        ratios = [a / b - 1 for a, b in zip(losses, last[first], strict=True)]
        size = f"{sizes[name]:,} | {sizes[name] / sizes[first]:.2f}"
        percent = " ".join(f"{100 * x:+.2f} %" for x in ratios)
        lines.append(f"| {name} | {size} | {spread(losses)} | {percent} | {1e3 * statistics.mean(seconds[name]):.0f} |")
    for other in others[:1] if args.models[0] == "dense" else []:
        reached = [steps_to(curve, loss) for curve, loss in zip(curves[other], last[first], strict=True)]
        ratios = [step / args.steps for step in reached if step is not None]
        lines.append(f"\nSteps of {other} to the last loss of {first}, as a part of its steps: " + spread(ratios))
        lines[-1] += f" ({len(ratios)} of {len(last[first])} seeds reach it)."
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
    for n, (name, runs) in enumerate(curves.items()):
        for i, curve in enumerate(runs):
            axes.plot(*zip(*curve, strict=True), color=f"C{n}", lw=1, label=None if i else name)
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
    add(
        "--models",
        nargs="+",
        choices=("dense", "moe", "pr-moe", *STUDENTS),
        default=["dense", "moe"],
        help="%(default)s",
    )
    add("--every", type=int, default=1, help="distance of layers with experts (%(default)s)")
    add("--pyramid", type=int, nargs="+", default=[4, 4, 8, 8], help="experts of PR-MoE by layer (%(default)s)")
    add("--student-steps", type=int, default=500, help="of students, after their teacher's (%(default)s)")
    add("--taught", type=float, default=0.6, help="part of these steps with the teacher (%(default)s)")
    add("--first-seed", type=int, default=0, help="%(default)s")
    add("--experts", type=int, default=8, help="of each layer (%(default)s)")
    add("--top-k", type=int, default=2, help="experts of a token (%(default)s)")
    add("--exchange", choices=tuple(EXCHANGES), default="tokens", help="between ranks (%(default)s)")
    add("--zero", type=int, choices=(0, 1, 2, 3), default=1, help="ZeRO stage (%(default)s)")
    add("--jit", action="store_true", help="capture each step as a graph: the same losses, in less time")
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
    if set(args.models) & set(STUDENTS) and "pr-moe" not in args.models:
        parser.error("--models mos and alone are students of pr-moe; add pr-moe")
    if args.width % args.top_k:
        parser.error(f"--width {args.width}: an expert is 1 / --top-k {args.top_k} of it; choose a multiple")
    return args


if __name__ == "__main__":
    main()
