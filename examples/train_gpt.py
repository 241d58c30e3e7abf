"""Trains a small GPT on text, on one device or many: the same file under `python` and under `torchrun`.

    python examples/train_gpt.py
    torchrun --nproc-per-node 2 examples/train_gpt.py --zero 3 --sample 400
    torchrun --nproc-per-node 4 examples/train_gpt.py --mesh dp=2,tp=2 --sequence
    torchrun --nproc-per-node 4 examples/train_gpt.py --mesh dp=2,sp=2 --attention ring
    torchrun --nproc-per-node 8 examples/train_gpt.py --mesh dp=2,tp=2,pp=2 --accumulate 4 --sample 0
    torchrun --nproc-per-node 2 examples/train_gpt.py --save-every 100 --resume
    torchrun --nproc-per-node 2 examples/train_gpt.py --data a.txt b.txt --tokenizer bpe --optimizer lamb

By default (without --data) it learns Python from the sources of the standard library. Ctrl-C ends it after the current
step with all files of a regular end (torchrun then adds a traceback of its own, about the signal). So does SIGTERM,
with the exit code 75, "try again". Files in --out: tokens.bin, metrics.jsonl, TensorBoard events, loss.png and
sample.txt; with --save-every also checkpoints, from which --resume goes on: on the same number of ranks bit for bit as
without the interruption, else to rounding; and model.json, by which `shardfn generate` runs the newest of them.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import signal
import sys
import time
from contextlib import closing

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

import shardfn as sf
from shardfn.models import gpt

OPTIMIZERS = {  # name -> (optimizer of a learning rate, learning rate)
    "adamw": (functools.partial(sf.optim.adamw, b2=0.95, weight_decay=0.1), 4e-3),
    "adam": (functools.partial(sf.optim.adam, b2=0.95), 4e-3),
    "lamb": (functools.partial(sf.optim.lamb, weight_decay=0.1), 5e-2),
    "lion": (functools.partial(sf.optim.lion, weight_decay=0.3), 1.2e-3),
    "sgd": (functools.partial(sf.optim.sgd, momentum=0.9), 0.3),
}

SECONDS_BETWEEN_LINES = 5.0

ATTENTION = {  # name -> how attention is computed, of the number of tokens
    "dense": lambda length: sf.nn.Dense(),
    "blockwise": lambda length: sf.nn.Blockwise(),
    "ulysses": functools.partial(sf.nn.Ulysses, "sp"),
    "ring": functools.partial(sf.nn.Ring, "sp"),
}

NORMS = {"norm": torch.float32}  # leaves whose path has "norm" in it
PRECISIONS = {  # name -> (policy, loss scale)
    "fp32": None,
    "bf16": (sf.Policy.bf16(exceptions=NORMS), None),
    "fp16": (sf.Policy.fp16(exceptions=NORMS), sf.optim.dynamic_loss_scale()),
}


def main() -> int:
    args = arguments()
    if "LOCAL_RANK" in os.environ and not torch.cuda.is_available():
        torch.set_num_threads(1)
    mesh = sf.make_mesh(args.mesh)
    with sf.checkpoint.Preemption(mesh, signals={signal.SIGINT: 0, signal.SIGTERM: 75}) as preemption:
        train(args, mesh, preemption)
    return preemption.exit_code


def train(args, mesh, preemption):
    rank, world = mesh.axis_index("dp"), mesh.axis_size("dp")  # ranks along tp, sp and pp get the same rows
    deep, cut = mesh.axis_size("pp") > 1, mesh.axis_size("sp") > 1

    # The data: batch n is a function of (seed, n), the same for any number of ranks.
    tokenizer, source = read_tokens(args, mesh)
    training, validation = sf.data.Batches(source, args.batch, args.length, args.seed).split(0.02)

    # The model: mathematics for one device. The weights keep the mean exact when ranks hold different numbers of rows.
    size = {"num_layers": args.layers, "d_model": args.dim, "num_heads": args.heads, "max_len": args.length}
    config = gpt.Config.llama_like(vocab_size=tokenizer.vocab_size, d_ff=None, tie_embeddings=True, **size)
    if mesh.axis_size("tp") > 1:
        config = dataclasses.replace(config, per_head=True)  # tp then cuts between heads, for any number of them
    config = dataclasses.replace(config, stacked=deep)  # a pipeline cuts the stack of layers
    config = dataclasses.replace(config, attention=ATTENTION[args.attention](args.length))
    wrap = sf.remat if args.remat else lambda inner: inner
    options = {"wrap": wrap, "axis": "tp", "sequence": args.sequence}

    def weighted(mean, batch):
        rows = len(batch["tokens"])
        return mean if cut else sf.WeightedMean(mean * rows, rows)

    if deep:
        first, block, end = gpt.stages(config, **options)
        loss = sf.pipeline(
            first, block, lambda p, h, batch: weighted(end(p, h, batch), batch), num_microbatches=args.accumulate
        )
        held = sf.pipeline(*gpt.stages(config, axis="tp"))
    else:

        def loss(params, batch):
            return weighted(gpt.loss(config, params, batch, **options), batch)

        loss = sf.accumulate(loss, args.accumulate) if args.accumulate > 1 else loss
        held = functools.partial(gpt.loss, config, axis="tp")

    def evaluate(params, batch):
        rows, mean = len(batch["tokens"]), held(params, batch)
        mean = mean if cut else sf.WeightedMean(mean * rows, torch.full_like(mean, rows))
        total, count = sf.psum(torch.stack(mean), ("dp", "sp"))
        return total / count

    # The step: this call alone places the leaves.
    optimizer, learning_rate = OPTIMIZERS[args.optimizer]
    peak, warmup = args.lr or learning_rate, max(1, min(args.warmup, args.steps // 2))
    schedule = sf.optim.warmup_cosine_decay_schedule(0.0, peak, warmup, max(args.steps, warmup + 1), peak / 10)
    jit = functools.partial(sf.jit, backend=args.jit) if args.jit else lambda inner: inner
    precision = PRECISIONS[args.precision]
    if precision is not None:
        loss = sf.mixed_precision(loss, *precision)
    rows_and_tokens = {"index": sf.P("dp")}
    rows_and_tokens |= dict.fromkeys(("tokens", "targets"), sf.P("dp", "sp"))
    step = sf.sharded_step(
        jit(loss),
        sf.optim.chain(sf.optim.clip_by_global_norm(args.clip), optimizer(schedule)),
        mesh=mesh,
        specs=gpt.specs(config, tp="tp", pp="pp" if deep else None),
        batch=rows_and_tokens if cut else sf.P("dp"),
        zero=sf.Zero(stage=args.zero, axis=("dp", "sp") if cut else "dp"),
    )
    state = step.init(functools.partial(gpt.init, config), sf.key(args.seed))

    # Checkpoints: written behind the steps. The newest one is read into the mesh and stage of this run.
    start, checkpoints = 0, None
    data = {"seed": args.seed, "batch": args.batch, "length": args.length, "tokens": source.num_tokens}
    if args.save_every or args.resume:
        keep = {"save_every": args.save_every or 1, "keep_last": args.keep}
        checkpoints = sf.checkpoint.Manager(args.out / "checkpoints", mesh=mesh, **keep)
        describe(args, config, mesh)
        if args.resume and checkpoints.steps():
            restored = checkpoints.restore(state)
            state, start = restored.tree, restored.user["next_batch"]
            if restored.user["data"] != data:  # batch n would be another one
                raise SystemExit(
                    f"--resume: the run in {args.out} has the data {restored.user['data']}, this one {data}"
                )

    log = Log(args, mesh, start=start)
    log.say(f"{gpt.num_params(config):,} parameters, {source.num_tokens:,} tokens")
    sizes = ", ".join(f"{axis} {n}" for axis, n in mesh.shape.items())
    ours = functools.partial(gpt.cut_sequences, config, mesh=mesh) if cut else lambda batch: batch
    log.say(
        f"ZeRO-{args.zero} over {world} x {mesh.device.type}" + (f" in a mesh of {sizes}" if mesh.size > world else "")
    )
    batches = sf.data.prefetch(training.iterate(start, args.steps, rank=rank, world=world))
    begin = time.monotonic()
    # Where stderr is no terminal there is no bar, and the log prints a line every few seconds.
    with closing(batches), sf.progress(total=args.steps, initial=start, unit="step", mesh=mesh) as bar:
        for n, batch in enumerate(batches, start):
            if args.minutes is not None and time.monotonic() - begin > 60 * args.minutes:
                preemption.stop()
            state, metrics = step(state, to_device(ours(batch), mesh))

            last = n + 1 == args.steps or preemption.stopping  # on all ranks after the same step
            rate = (n + 1 - start) * args.batch * args.length / (time.monotonic() - begin)
            row = {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "lr": schedule(n), "tokens_per_s": rate}
            if last or (n + 1) % args.eval_every == 0:
                held_out = (
                    to_device(ours(validation(i, rank=rank, world=world)), mesh) for i in range(args.eval_batches)
                )
                row["validation_loss"] = sum(step.apply(evaluate, state, b) for b in held_out) / args.eval_batches
            log.write(n + 1, row)
            bar.set_postfix(loss=f"{metrics['loss']:.3f}", tokens_per_s=f"{rate:,.0f}", refresh=False)
            bar.update()
            if bar.disable:
                log.progress(n + 1)
            if args.save_every:
                checkpoints.save(state, n + 1, user={"next_batch": n + 1, "data": data}, now=last)
            if last:
                break
    if checkpoints is not None:
        checkpoints.close()
    log.close()

    if args.sample:
        prompt = torch.from_numpy(tokenizer.encode(args.prompt))[None].to(mesh.device)
        write = functools.partial(gpt.generate, config, axis="tp")
        tokens = step.apply(write, state, prompt, args.sample, sf.key(args.seed + 1), args.temperature)
        log.sample(tokenizer.decode(tokens[0].tolist()))
    if dist.is_initialized():
        dist.destroy_process_group()


def read_tokens(args, mesh):
    """Rank 0 writes the token file, the others wait for it."""
    paths = args.data or sf.data.default_corpus()
    out, vocabulary = args.out / "tokens.bin", args.out / "bpe.json"
    if mesh.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        tokenizer = sf.data.ByteTokenizer()
        if args.tokenizer == "bpe":
            tokenizer = sf.data.BPETokenizer.train(paths, args.vocab_size)
            tokenizer.save(vocabulary)
        sf.data.encode_files(paths, out, tokenizer)
    if mesh.size > 1:
        dist.barrier()
    tokenizer = sf.data.BPETokenizer.load(vocabulary) if args.tokenizer == "bpe" else sf.data.ByteTokenizer()
    return tokenizer, sf.data.TokenFile.open(out)


def describe(args, config, mesh):
    """Writes the shape of the model and the name of its tokenizer, from which `shardfn generate` makes them again."""
    row = {"model": sf.interop.hf_config(config), "per_head": config.per_head}
    row["tokenizer"] = "bpe.json" if args.tokenizer == "bpe" else "bytes"
    if mesh.rank == 0:
        (args.out / "model.json").write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")


def to_device(batch, mesh):
    return {name: x.to(mesh.device, non_blocking=True) for name, x in batch.items()}


class Log(sf.metrics.Logger):
    """A logger's files, a curve and lines on the terminal; on other ranks than the first it does nothing."""

    def __init__(self, args, mesh, start=0):
        super().__init__(args.out, mesh, tensorboard=True, start=start)
        self.out, self.enabled, self.said = args.out, mesh.rank == 0, 0.0

    def progress(self, step):
        """A line every few seconds."""
        if self.enabled and (step == 1 or time.monotonic() - self.said > SECONDS_BETWEEN_LINES):
            self.said = time.monotonic()
            row = self.rows[-1]
            self.say(f"step {step}: loss {row['loss']:.3f}, {row['tokens_per_s']:,.0f} tokens/s")

    def close(self):
        super().close()
        if not self.rows:
            return
        self.draw()
        held_out = [row["validation_loss"] for row in self.rows if "validation_loss" in row]
        validation = f", validation {held_out[-1]:.3f}" if held_out else ""
        self.say(f"step {self.rows[-1]['step']}: loss {self.rows[-1]['loss']:.3f}{validation}")
        self.say(f"wrote {self.out}/metrics.jsonl, loss.png and TensorBoard events")

    def draw(self):
        axes = Figure(figsize=(7, 4), layout="constrained").subplots()
        axes.plot([row["step"] for row in self.rows], [row["loss"] for row in self.rows], lw=0.8, label="training")
        held_out = [row for row in self.rows if "validation_loss" in row]
        axes.plot([r["step"] for r in held_out], [r["validation_loss"] for r in held_out], "o-", label="validation")
        axes.set(xlabel="step", ylabel="nats per token")
        axes.grid(alpha=0.3)
        axes.legend()
        axes.figure.savefig(self.out / "loss.png", dpi=150)

    def sample(self, text):
        if self.enabled:
            (self.out / "sample.txt").write_text(text, encoding="utf-8")
            self.say(f"--- sample ---\n{text}\n--------------")

    def say(self, text):
        if self.enabled:
            print(text, flush=True)


def arguments():
    def positive(text):
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{text} is not positive")
        return value

    def axes(text):
        sizes = {}
        for part in text.split(","):
            axis, _, size = part.partition("=")
            if axis not in ("dp", "tp", "sp", "pp") or axis in sizes or not size.isdecimal() or int(size) < 1:
                raise argparse.ArgumentTypeError(
                    f"{part!r} in {text!r}: write sizes of dp, tp, sp and pp, such as dp=2,tp=2"
                )
            sizes[axis] = int(size)
        world = int(os.environ.get("WORLD_SIZE", 1))
        if math.prod(sizes.values()) != world:
            told = " x ".join(map(str, sizes.values()))
            raise argparse.ArgumentTypeError(f"{text!r} is {told} ranks, but {world} were started (--nproc-per-node)")
        return sizes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", nargs="+", type=pathlib.Path, metavar="PATH", help="text files (the Python standard library)")
    add("--tokenizer", choices=("bytes", "bpe"), default="bytes")
    add("--vocab-size", type=positive, default=2048, help="for bpe (%(default)s)")
    add("--zero", type=int, choices=(0, 1, 2, 3), default=3, help="ZeRO stage (%(default)s)")
    add("--mesh", type=axes, default={"dp": -1}, metavar="dp=N,tp=M,...", help="ranks by axis (all along dp)")
    add("--sequence", action="store_true", help="between blocks each rank of tp has its own tokens")
    add("--attention", choices=tuple(ATTENTION), default="dense", help="sp needs ulysses or ring (%(default)s)")
    add("--steps", type=positive, default=800, help="%(default)s")
    add("--minutes", type=float, help="stop after so many minutes, whatever --steps says")
    add("--batch", type=positive, default=16, help="rows of the global batch (%(default)s)")
    add("--length", type=positive, default=128, help="tokens a row (%(default)s)")
    add("--layers", type=positive, default=4, help="%(default)s")
    add("--dim", type=positive, default=160, help="%(default)s")
    add("--heads", type=positive, default=5, help="%(default)s")
    add("--optimizer", choices=tuple(OPTIMIZERS), default="adamw", help="%(default)s")
    add("--lr", type=float, help="peak learning rate (one that suits the optimizer)")
    add("--warmup", type=positive, default=40, help="steps (%(default)s)")
    add("--clip", type=float, default=1.0, help="bound of the global gradient norm (%(default)s)")
    add("--accumulate", type=positive, default=1, help="microbatches a step (%(default)s)")
    add("--precision", choices=tuple(PRECISIONS), default="fp32", help="what is kept, computed and sent (%(default)s)")
    add("--remat", action="store_true", help="recompute each block in the backward")
    add("--jit", choices=("graph", "inductor"), help="capture the step as one graph, and run or compile it")
    add("--eval-every", type=positive, default=100, help="steps (%(default)s)")
    add("--eval-batches", type=positive, default=8, help="%(default)s")
    add("--save-every", type=positive, metavar="N", help="steps between checkpoints (none)")
    add("--keep", type=positive, default=2, metavar="K", help="how many of the newest checkpoints stay (%(default)s)")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --out, if there is one")
    add("--sample", type=int, default=300, metavar="N", help="tokens to sample at the end (%(default)s)")
    add("--prompt", default="def ", help="how the sample begins (%(default)r)")
    add("--temperature", type=float, default=0.8, help="%(default)s")
    add("--seed", type=int, default=0, help="%(default)s")
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/gpt"), help="%(default)s")
    args = parser.parse_args()
    if args.mesh.get("pp", 1) > 1 and (args.sample or args.jit):
        parser.error("a pipeline (pp) neither samples nor is captured yet: add --sample 0, and leave out --jit")
    if (args.mesh.get("sp", 1) > 1) != (args.attention in ("ulysses", "ring")):
        parser.error(
            "ranks along sp have some tokens of each row: --mesh sp=N and --attention ulysses or ring together"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())
