"""Trains a small T5 to write the words of a line of text in alphabetical order, and writes lines that it has not seen.

    python examples/seq2seq.py
    python examples/seq2seq.py --experts 4
    torchrun --nproc-per-node 2 examples/seq2seq.py --tp 2

By default (without --data) lines are from the documentation in Python's standard library. Lines have different numbers
of words, so sources and targets are padded. Accuracy is the share of unseen lines that are written without a mistake.
Files in --out: report.json.
"""

import argparse
import collections
import functools
import json
import pathlib
import pydoc_data.topics
import re

import torch
import torch.distributed as dist

import shardfn as sf
from shardfn.models import seq2seq
from shardfn.models.moe import Experts

START, END = 0, 1


def main():
    args = arguments()
    torch.set_num_threads(1)
    mesh = sf.make_mesh({"dp": -1, "tp": args.tp})
    words, training, held_out = read_lines(args)
    experts = Experts(args.experts, top_k=1, every=2, axes="dp") if args.experts else None
    config = seq2seq.Config.t5_like(
        vocab_size=len(words),
        num_layers=args.layers,
        d_model=args.dim,
        num_heads=4,
        d_head=args.dim // 4,
        d_ff=2 * args.dim,
        mlp="gelu",
        buckets=16,
        max_distance=32,
        experts=experts,
    )
    schedule = sf.optim.warmup_cosine_decay_schedule(0.0, args.lr, args.steps // 10 + 1, args.steps + 1, args.lr / 10)
    step = sf.sharded_step(
        functools.partial(seq2seq.loss, config, axis="tp"),
        sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adam(schedule)),
        mesh=mesh,
        specs=seq2seq.specs(config, tp="tp"),
        batch=sf.P("dp"),
        zero=sf.Zero(stage=3),
    )
    state = step.init(functools.partial(seq2seq.init, config), sf.key(args.seed))
    order, rows, curve = torch.Generator().manual_seed(args.seed), step.rows(args.batch), []
    for n in range(args.steps):
        at = torch.randint(len(training), (args.batch,), generator=order).tolist()
        batch = make_batch([training[i] for i in at], args.length)
        state, metrics = step(state, {name: x[rows] for name, x in batch.items()})
        if (n + 1) % args.eval_every == 0 or n + 1 == args.steps:
            curve.append((n + 1, float(metrics["loss"])))
            if mesh.rank == 0:
                print(f"step {n + 1}: loss {curve[-1][1]:.4f}", flush=True)
    report(config, sf.unshard(state.params), words, held_out, curve, args, mesh)
    if dist.is_initialized():
        dist.destroy_process_group()


def report(config, params, words, held_out, curve, args, mesh):
    """Writes lines, and the share that has no mistake."""
    batch = make_batch(held_out, args.length)
    how = {"num_tokens": args.length + 1, "key": sf.key(0), "temperature": 0.0, "mask": batch["source_mask"]}
    drawn = seq2seq.generate(config, params, batch["source"], **how).tolist()
    found = [line[: line.index(END)] if END in line else line for line in drawn]
    right = sum(line == sorted(source) for line, source in zip(found, held_out, strict=True))
    if mesh.rank == 0:
        for source, line in list(zip(held_out, found, strict=True))[:3]:
            print(f"{' '.join(words[i] for i in source)}  ->  {' '.join(words[i] for i in line)}")
        print(f"accuracy on {len(held_out)} unseen lines: {right / len(held_out):.3f}")
        settings = {name: str(x) for name, x in vars(args).items()}
        result = {"args": settings, "curve": curve, "accuracy": right / len(held_out)}
        (args.out / "report.json").write_text(json.dumps(result))


def make_batch(lines, length):
    """Sources of a fixed length with their padding, and targets: words in alphabetical order, and the end."""
    source, targets = torch.full((len(lines), length), START), torch.full((len(lines), length + 1), -100)
    for row, line in enumerate(lines):
        source[row, : len(line)] = torch.tensor(line)
        targets[row, : len(line) + 1] = torch.tensor([*sorted(line), END])
    lengths = torch.tensor([len(line) for line in lines])[:, None]
    return {"source": source, "source_mask": torch.arange(length) < lengths, "targets": targets, "mask": targets >= 0}


def read_lines(args):
    """The words by number, and lines of training and validation as numbers."""
    texts = [path.read_text(encoding="utf-8") for path in args.data or ()]
    text = "\n".join(texts or (pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)))
    split = [re.findall(r"[a-z]+", line.lower()) for line in text.splitlines()]
    counts = collections.Counter(word for line in split for word in line)
    words = ["<start>", "</s>", *sorted(word for word, _ in counts.most_common(args.words))]
    number = {word: i for i, word in enumerate(words)}
    # Only words of the vocabulary, so that each line can be written.
    lines = [tuple(number[word] for word in line if word in number)[: args.length] for line in split]
    known = [list(line) for line in dict.fromkeys(lines) if len(line) > 1]
    held = known[:: max(len(known) // 64, 2)][:64]
    seen = {tuple(line) for line in held}
    return words, [line for line in known if tuple(line) not in seen], held


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=pathlib.Path, nargs="+", help="files of text")
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/seq2seq"))
    add("--tp", type=int, default=1, help="ranks of tensor parallelism")
    add("--experts", type=int, default=0, help="experts in every second layer of both halves")
    add("--layers", type=int, default=2)
    add("--dim", type=int, default=64)
    add("--words", type=int, default=40, help="words of the vocabulary")
    add("--length", type=int, default=6, help="most words of a line")
    add("--steps", type=int, default=600)
    add("--batch", type=int, default=64)
    add("--lr", type=float, default=4e-3)
    add("--eval-every", type=int, default=100)
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
