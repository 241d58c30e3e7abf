"""Makes LSTM language models smaller: by removing hidden units (iss), or by structured maps and a teacher (antman).

    python examples/recurrent.py iss
    python examples/recurrent.py antman
    python examples/recurrent.py iss --hidden 650 650 --dim 650 --steps 800 --dropout 0.5
    torchrun --nproc-per-node 2 examples/recurrent.py iss

iss trains a word-level model, and shrinks groups of weights by `sparse.group_shrink`. At each `--share` of the layers'
operations it removes the units at 0, and trains the small model. The report compares perplexity, parameters and the
time of a token, also with a small model of the same shape that begins from random weights. `--kind highway --depth 3`
takes a recurrent highway network. Trained models in --out are not trained again.

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
from typing import NamedTuple

import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import sparse
from shardfn.models import recurrent
from shardfn.nn.recurrent import block_diagonal, grouped_low_rank, low_rank, shuffled


class HeldOut(NamedTuple):
    """Rows that are not trained on: of validation, which selects parameters, and of the test, which the report has."""

    validation: torch.Tensor
    test: torch.Tensor


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
    """The dense model, and for each share the model without its units at 0, and a model that begins as small."""
    groups, loss = recurrent.units(config), functools.partial(recurrent.loss, config)
    curves, rows, text = {}, [], (training, held_out, args, mesh)
    dense, curves["dense"] = train("dense", loss, config, make_optimizer(args), *text)
    rows.append(measure("dense", config, dense, held_out))
    for share, params in shrink(groups, config, dense, *text).items():
        alive = sparse.find_alive(groups, params)
        smaller, fewer = recurrent.without_units(config, alive), sparse.compact(groups, params, alive)
        tokens = held_out.test[:2, :-1]
        torch.testing.assert_close(
            recurrent.apply(smaller, fewer, tokens), recurrent.apply(config, params, tokens), rtol=1e-3, atol=1e-4
        )
        smaller = dataclasses.replace(smaller, dropout=args.dropout * args.kept_dropout)
        loss, name = functools.partial(recurrent.loss, smaller), f"hidden {smaller.hidden}"
        starts = [(name, fewer, args.tune_steps), (f"{name} from random weights", None, args.steps)]
        for what, start, steps in starts if share in args.compared else starts[:1]:
            tuned, curves[what] = train(
                what, loss, smaller, make_optimizer(args, steps), *text, start=start, steps=steps
            )
            rows.append(measure(what, smaller, tuned, held_out))
    return rows, curves


def shrink(groups, config, dense, training, held_out, args, mesh):
    """Trains with a growing strength. Returns the parameters at the first time that each share is reached."""
    strength = sf.optim.linear_schedule(0.0, args.strength, args.shrink_steps)
    rule = sf.optim.chain(
        sf.optim.clip_by_global_norm(1.0), sf.optim.adam(args.shrink_lr), sparse.group_shrink(groups, strength)
    )
    found = {
        share: sf.checkpoint.restore(where, dense, at="params").tree
        for share in args.share
        if sf.checkpoint.steps(where := args.out / f"shrunk {share}")
    }
    if min(args.share) in found:
        return found

    def is_small(params):
        alive = sparse.find_alive(groups, params)
        flops = recurrent.count_flops(recurrent.without_units(config, alive)) / recurrent.count_flops(config)
        if mesh.rank == 0:
            print(f"units {[len(x) for x in alive.values()]}, {flops:.3f} of the operations", flush=True)
        share = min((x for x in args.share if flops <= x), default=None)
        if share is not None and share not in found:
            found[share] = sf.tree_map(torch.clone, params)
            sf.checkpoint.save(args.out / f"shrunk {share}", params, 1, at="params")
        return share == min(args.share)

    loss = functools.partial(recurrent.loss, config)
    how = {"start": dense, "steps": args.shrink_steps + args.hold_steps, "until": is_small}
    train("shrinking", loss, config, rule, training, held_out, args, mesh, **how)
    if not found:
        raise SystemExit("No share was reached: give a larger --strength, or more --shrink-steps.")
    return found


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
    teacher, curves["teacher"] = train("teacher", loss, config, make_optimizer(args), training, held_out, args, mesh)
    rows.append(measure("teacher", config, teacher, held_out))
    for name, weight in (("student", args.weight), ("student without a teacher", 0.0)):
        loss = functools.partial(distilled, config, student, weight)
        params, curves[name] = train(name, loss, student, make_optimizer(args), training, held_out, args, mesh, teacher)
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


def make_optimizer(args, steps=None):
    steps = steps or args.steps
    rate = sf.optim.warmup_cosine_decay_schedule(0.0, args.lr, steps // 20 + 1, steps + 1, args.lr / 10)
    return sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adam(rate))


def train(name, loss, config, rule, training, held_out, args, mesh, teacher=None, start=None, steps=None, until=None):
    """Returns the parameters of least loss of validation, or the last ones with `until`, and the losses.

    Leaves of a teacher are frozen. Training stops where `until(params)` is true, and goes on from an earlier run.
    """
    how = {"mesh": mesh, "batch": sf.P("dp"), "zero": sf.Zero(stage=3)}
    if teacher is not None:
        how["trainable"] = {"student": True, "teacher": False}
    draws = args.dropout > 0 and teacher is None
    step = sf.sharded_step(loss, rule, **how, **({"key": sf.key(args.seed)} if draws else {}))
    own = recurrent.init(config, sf.key(args.seed)) if start is None else start
    state = step.init(own if teacher is None else {"student": own, "teacher": teacher})
    order, curve, steps = torch.Generator().manual_seed(args.seed), [], steps or args.steps
    rows, began, best, done = step.rows(args.batch), time.monotonic(), own, 0
    checkpoints = sf.checkpoint.Manager(args.out / "checkpoints" / name, mesh=mesh, save_every=args.eval_every)
    if checkpoints.steps():
        found = checkpoints.restore({"state": state, "best": best})
        state, best, done, curve = found.tree["state"], found.tree["best"], found.step, found.user
    with checkpoints:
        for n in range(steps):
            at = torch.randint(len(training) - args.length - 1, (args.batch,), generator=order)
            if n < done:
                continue
            tokens = torch.stack([training[i : i + args.length + 1] for i in at.tolist()])
            index = torch.arange(args.batch) + n * args.batch
            batch = {"tokens": tokens[rows], "index": index[rows]} if draws else {"tokens": tokens[rows]}
            state, _ = step(state, batch)
            if until is not None and (n + 1) % args.check_every == 0 and until(sf.unshard(state.params)):
                break
            if (n + 1) % args.eval_every == 0 or n + 1 == steps:
                params = sf.unshard(state.params)
                params = params if teacher is None else params["student"]
                curve.append((n + 1, loss_of(config, params, held_out.validation)))
                if mesh.rank == 0:
                    print(
                        f"{name}, step {n + 1}: loss {curve[-1][1]:.4f}, {time.monotonic() - began:.0f} s", flush=True
                    )
                if until is not None or curve[-1][1] == min(value for _, value in curve):
                    best = sf.tree_map(torch.clone, params)
                checkpoints.save({"state": state, "best": best}, n + 1, user=curve, now=n + 1 == steps)
    return best, curve


def loss_of(config, params, rows):
    with torch.no_grad():
        losses = [recurrent.loss(config, params, {"tokens": part}).item() * len(part) for part in rows.split(32)]
    return sum(losses) / len(rows)


def measure(name, config, params, held_out):
    """A row of the report. The time is of one token of one sequence: it is bound by reading the weights."""
    sizes = sum(x.numel() * x.element_size() for x in sf.tree_leaves(params["layers"]))
    tokens, times = held_out.test[:1], []
    state = recurrent.encode(config, params, tokens[:, :4]).states
    with torch.no_grad():
        for t in range(4, min(tokens.shape[1], 36)):
            start = time.perf_counter()
            recurrent.encode(config, params, tokens[:, t : t + 1], state)
            times.append(time.perf_counter() - start)
    return {
        "model": name,
        "loss": loss_of(config, params, held_out.test),
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
    """The tokens of training, rows of validation and of the test, and the number of words or characters."""
    if args.data:
        text = "\n".join(path.read_text(encoding="utf-8") for path in args.data)
    else:
        text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    pieces = re.findall(r"\w+|[^\w\s]|\n", text.lower()) if args.method == "iss" else list(text)
    limit = args.words if args.method == "iss" else 255
    known = {piece: i + 1 for i, (piece, _) in enumerate(collections.Counter(pieces).most_common(limit - 1))}
    tokens = torch.tensor([known.get(piece, 0) for piece in pieces])
    size = args.length + 1
    rows = max(len(tokens) // 10 // size, 2)
    held_out = tokens[-rows * size :].view(rows, size)[:: max(rows // 512, 1)]
    return tokens[: -rows * size], HeldOut(held_out[::2], held_out[1::2]), len(known) + 1


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
    add("--share", type=float, nargs="+", default=[0.15], help="shares of the operations, from large to small (iss)")
    add("--compared", type=float, nargs="*", help="shares with a model from random weights (iss, default: all)")
    add("--strength", type=float, default=0.04, help="decrease of a unit's norm in the last step of shrinking (iss)")
    add("--shrink-steps", type=int, default=300, help="steps in which the decrease grows from 0 (iss)")
    add("--hold-steps", type=int, default=0, help="most further steps with the whole decrease (iss)")
    add("--check-every", type=int, default=10, help="steps between two looks at the share (iss)")
    add("--shrink-lr", type=float, default=1e-3, help="learning rate of these steps (iss)")
    add("--tune-steps", type=int, default=300, help="steps of the small model (iss)")
    add("--kept-dropout", type=float, default=0.5, help="factor of the small model's dropout (iss)")
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
    args.compared = args.share if args.compared is None else args.compared
    args.out.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
