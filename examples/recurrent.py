"""Makes LSTM language models smaller: by removing hidden units (iss), or by structured maps and a teacher (antman).

    python examples/recurrent.py iss
    python examples/recurrent.py antman
    python examples/recurrent.py iss --hidden 1500 1500 --dim 1500 --words 10000 --steps 6000 --strength 2
    torchrun --nproc-per-node 2 examples/recurrent.py iss

iss trains a word-level model twice, without and with the rule `sparse.group_shrink`, removes the units at 0, and
compares perplexity, parameters and the time of a token. `--kind highway --depth 3` takes a recurrent highway network.

antman trains a dense teacher on characters, a student with structured maps that learns from the teacher's hidden units
and logits, and the same student without a teacher.

By default (without --data) the text is the documentation in Python's standard library. Files in --out: report.md,
report.json, and curves.png where matplotlib is installed.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.util
import json
import math
import pathlib
import pydoc_data.topics
import re
import time

import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import sparse
from shardfn.models import recurrent
from shardfn.nn.recurrent import block_diagonal, grouped_low_rank, low_rank, shuffled


def main():
    args = arguments()
    torch.set_num_threads(1)
    mesh = sf.make_mesh({"dp": -1})
    training, held_out, vocab_size = read_text(args)
    config = recurrent.Config(
        vocab_size,
        args.dim,
        tuple(args.hidden),
        args.kind,
        args.depth if args.kind == "highway" else 1,
        dropout=args.dropout,
    )
    compare = {"iss": remove_units, "antman": replace_maps}[args.method]
    rows, curves = compare(config, training, held_out, args, mesh)
    if mesh.rank == 0:
        report(rows, curves, args)
    if dist.is_initialized():
        dist.destroy_process_group()


def remove_units(config, training, held_out, args, mesh):
    """The dense model, and the model of which the units at 0 are removed."""
    groups, loss = recurrent.units(config), functools.partial(recurrent.loss, config)
    curves, rows = {}, []
    dense, curves["dense"] = train(loss, config, make_optimizer(args), training, held_out, args, mesh)
    rows.append(measure("dense", config, dense, held_out))
    rule = sf.optim.chain(make_optimizer(args), sparse.group_shrink(groups, make_strength(args)))
    params, curves["with removal"] = train(
        loss, config, rule, training, held_out, args, mesh, watch=lambda x: norms_of(groups, x)
    )
    alive = sparse.find_alive(groups, params)
    smaller, fewer = recurrent.without_units(config, alive), sparse.compact(groups, params, alive)
    tokens = held_out[:2, :-1]
    torch.testing.assert_close(
        recurrent.apply(smaller, fewer, tokens), recurrent.apply(config, params, tokens), rtol=1e-3, atol=1e-4
    )
    rows.append(measure(f"hidden {smaller.hidden}", smaller, fewer, held_out))
    return rows, curves


def norms_of(groups, params):
    """The numbers of units above 0, and the median norm of a layer."""
    norms = sparse.group_norms(groups, params).values()
    return f"units {[int((x > 0).sum()) for x in norms]}, norms {[round(x.median().item(), 2) for x in norms]}"


def replace_maps(config, training, held_out, args, mesh):
    """A dense teacher, a student that learns from it, and the student without a teacher."""
    g, r = args.groups, args.rank
    structures = {
        "blocks": block_diagonal(g),
        "shuffled": shuffled(g),
        "grouped": grouped_low_rank(g, r),
        "low": low_rank(r),
    }
    student = dataclasses.replace(config, maps=tuple(structures[name] for name in args.maps))
    curves, rows, loss = {}, [], functools.partial(recurrent.loss, config)
    teacher, curves["teacher"] = train(loss, config, make_optimizer(args), training, held_out, args, mesh)
    rows.append(measure("teacher", config, teacher, held_out))
    for name, weight in (("student", args.weight), ("student without a teacher", 0.0)):
        loss = functools.partial(distilled, config, student, weight)
        params, curves[name] = train(loss, student, make_optimizer(args), training, held_out, args, mesh, teacher)
        rows.append(measure(name, student, params, held_out))
    return rows, curves


def distilled(config, student, weight, params, batch):
    """The cross entropy, and distances of hidden units and logits from the teacher's."""
    tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    found = recurrent.encode(student, params["student"], tokens)
    logits = recurrent.decode(student, params["student"], found.outputs[-1])
    loss = sf.nn.cross_entropy(logits, targets)
    if weight == 0:
        return loss
    taught = recurrent.encode(config, params["teacher"], tokens)
    names = [f"layer {i}" for i in range(len(found.outputs))]
    own, wanted = (dict(zip(names, x.outputs, strict=True)) for x in (found, taught))
    teacher = recurrent.decode(config, params["teacher"], taught.outputs[-1])
    return loss + weight * (
        sf.distill.features(own, wanted).mean() + sf.distill.logits(logits, teacher, targets).mean()
    )


def make_optimizer(args):
    return sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adam(learning_rate(args)))


def learning_rate(args):
    return sf.optim.warmup_cosine_decay_schedule(0.0, args.lr, args.steps // 20 + 1, args.steps + 1, args.lr / 10)


def make_strength(args):
    """The decrease of a unit's norm: --strength times the learning rate, between two shares of the steps.

    Later it is a 20th, which holds units at 0 against what Adam's momentum remembers of them.
    """
    rate, (first, last) = learning_rate(args), (share * args.steps for share in args.between)
    return lambda count: (
        args.strength * rate(count) * ((count >= first) * 0.05 + ((count >= first) & (count < last)) * 0.95)
    )


def train(loss, config, optimizer, training, held_out, args, mesh, teacher=None, watch=None):
    """Returns the parameters, and the loss of validation in the course of training. Leaves of a teacher are frozen."""
    how = {"mesh": mesh, "batch": sf.P("dp"), "zero": sf.Zero(stage=3)}
    if teacher is not None:
        how["trainable"] = {"student": True, "teacher": False}
    draws = args.dropout > 0 and teacher is None
    step = sf.sharded_step(loss, optimizer, **how, **({"key": sf.key(args.seed)} if draws else {}))
    own = recurrent.init(config, sf.key(args.seed))
    state = step.init(own if teacher is None else {"student": own, "teacher": teacher})
    order, curve = torch.Generator().manual_seed(args.seed), []
    rows, start = step.rows(args.batch), time.monotonic()
    for n in range(args.steps):
        at = torch.randint(len(training) - args.length - 1, (args.batch,), generator=order)
        tokens = torch.stack([training[i : i + args.length + 1] for i in at.tolist()])
        index = torch.arange(args.batch) + n * args.batch
        state, _ = step(state, {"tokens": tokens[rows], "index": index[rows]} if draws else {"tokens": tokens[rows]})
        if (n + 1) % args.eval_every == 0 or n + 1 == args.steps:
            params = sf.unshard(state.params)
            params = params if teacher is None else params["student"]
            curve.append((n + 1, loss_of(config, params, held_out)))
            if mesh.rank == 0:
                shown = f"step {n + 1}: loss {curve[-1][1]:.4f}, {time.monotonic() - start:.0f} s"
                print(shown + ("" if watch is None else f", {watch(params)}"), flush=True)
    return params, curve


def loss_of(config, params, held_out):
    with torch.no_grad():
        return recurrent.loss(config, params, {"tokens": held_out}).item()


def measure(name, config, params, held_out):
    """A row of the report. The time is of one token of one sequence: it is bound by reading the weights."""
    sizes = sum(x.numel() * x.element_size() for x in sf.tree_leaves(params["layers"]))
    state, times = recurrent.encode(config, params, held_out[:1, :4]).states, []
    with torch.no_grad():
        for t in range(4, min(held_out.shape[1], 36)):
            start = time.perf_counter()
            recurrent.encode(config, params, held_out[:1, t : t + 1], state)
            times.append(time.perf_counter() - start)
    return {
        "model": name,
        "loss": loss_of(config, params, held_out),
        "parameters": recurrent.num_params(config),
        "flops of a token in layers": recurrent.count_flops(config),
        "bytes of layers": sizes,
        "us of a token in layers": 1e6 * min(times),
    }


def report(rows, curves, args):
    first = rows[0]
    lines = ["| " + " | ".join([*first, "perplexity"]) + " |", "|---" * (len(first) + 1) + "|"]
    for row in rows:
        cells = [row["model"], f"{row['loss']:.4f}"]
        for name in list(first)[2:]:
            cells.append(f"{row[name]:,.0f} ({first[name] / row[name]:.1f}x fewer)")
        lines.append("| " + " | ".join([*cells, f"{math.exp(row['loss']):.2f}"]) + " |")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    (args.out / "report.md").write_text(text, encoding="utf-8")
    settings = vars(args) | {"out": None, "data": None}
    (args.out / "report.json").write_text(json.dumps({"args": settings, "rows": rows, "curves": curves}))
    if importlib.util.find_spec("matplotlib"):
        draw(curves, args.out / "curves.png")


def draw(curves, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), label=name)
    axes.set(xlabel="step", ylabel="loss of validation")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def read_text(args):
    """The tokens of training, rows of validation, and the number of words or characters."""
    if args.data:
        text = "\n".join(path.read_text(encoding="utf-8") for path in args.data)
    else:
        text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    pieces = re.findall(r"\w+|[^\w\s]|\n", text.lower()) if args.method == "iss" else list(text)
    limit = args.words if args.method == "iss" else 255
    known = {piece: i + 1 for i, (piece, _) in enumerate(collections.Counter(pieces).most_common(limit - 1))}
    tokens = torch.tensor([known.get(piece, 0) for piece in pieces])
    size = args.length + 1
    rows = max(len(tokens) // 20 // size, 1)
    held_out = tokens[-rows * size :].view(rows, size)[:: max(rows // 64, 1)][:64]
    return tokens[: -rows * size], held_out, len(known) + 1


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("method", choices=("iss", "antman"))
    add("--data", type=pathlib.Path, nargs="+", help="files of text")
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/recurrent"))
    add("--kind", choices=("lstm", "gru", "highway"), default="lstm")
    add("--depth", type=int, default=3, help="depth of a highway network")
    add("--hidden", type=int, nargs="+", default=[128], help="hidden units of each layer")
    add("--dim", type=int, default=64, help="width of the embedding")
    add("--words", type=int, default=2000, help="words of the vocabulary (iss)")
    add("--dropout", type=float, default=0.0)
    add("--strength", type=float, default=25.0, help="decrease of a unit's norm in a step, in learning rates (iss)")
    add("--between", type=float, nargs=2, default=[0.1, 0.8], help="shares of the steps in which norms decrease (iss)")
    add("--maps", nargs=2, choices=("blocks", "shuffled", "grouped", "low"), default=["blocks", "shuffled"])
    add("--groups", type=int, default=8, help="groups of structured maps (antman)")
    add("--rank", type=int, default=16, help="rank of structured maps (antman)")
    add("--weight", type=float, default=1.0, help="factor of the distances from the teacher (antman)")
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=16)
    add("--length", type=int, default=32)
    add("--lr", type=float, default=5e-3)
    add("--eval-every", type=int, default=50)
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
