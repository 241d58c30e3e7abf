"""Supervised fine-tuning on conversations: a GPT of train_gpt.py, SmolLM2, or another model of transformers.

    python examples/rlhf/chat_sft.py models/smollm2 train.jsonl held_out.jsonl --lora 8 --out run
    torchrun --nproc-per-node 2 examples/rlhf/chat_sft.py runs/gpt train.jsonl held_out.jsonl --out run

chat.py lists the models and the columns of rows. Only answers of the assistant, completions and texts are learnt. Rows
of more than --length tokens are cut; "cut" is their part. The
model is saved in run/model, from which chat_dpo.py can go on; with --lora the adapters are added to its weights. The
same command goes on after an interruption.
"""

import argparse
import functools

import chat
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import rl
from shardfn.models import gpt

ADAPTED = r"\.w[qkvo]$", r"\.w_"  # the weights that have adapters


def main():
    args = options(__doc__)
    with sf.make_mesh({"dp": -1}) as mesh:
        train(args, mesh)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(args, mesh):
    """The model in {args.out}/model learns the rows of args.train."""
    model = chat.load(args.model, mesh)
    trained = Trained(model, args.lora, args.seed)
    pad = functools.partial(padded, sf.data.pad(args.length))
    read = functools.partial(chat.Encoded, encode=functools.partial(chat.example, model, length=args.length))
    loss = trained.adapt(functools.partial(loss_of, model.config))
    fit(args, mesh, trained, loss, read, pad)


def loss_of(config, params, batch):
    tokens, labels = batch["tokens"], batch["labels"]
    batch_of_loss = {"tokens": tokens[:, :-1], "targets": labels[:, 1:]}
    return gpt.loss(config, params, batch_of_loss), {"cut": rl.row_mean(batch["cut"])}


def padded(pad, examples):
    rows = [{name: x[name] for name in ("tokens", "labels")} for x in examples]
    return {**pad(rows), "cut": torch.tensor([float(x["cut"]) for x in examples])}


class Trained:
    """The parameters of a run: a whole model, or adapters beside a frozen one."""

    def __init__(self, model, rank, seed, adapted=ADAPTED):
        self.model, self.lora = model, None
        self.params, self.specs, self.trainable = model.params, gpt.specs(model.config), True
        if rank:
            self.lora = sf.lora.LoRA.of(model.params, adapted, rank=rank, specs=self.specs)
            self.params = {"base": model.params, "lora": self.lora.init(sf.key(seed))}
            self.specs, self.trainable = self.lora.specs, self.lora.trainable

    def adapt(self, loss):
        return self.lora.adapt(loss) if self.lora else loss

    def kept(self, state):
        """The part of a state that is saved."""
        return sf.lora.without_base(state) if self.lora else state

    def whole(self, state, kept):
        return sf.lora.with_base(kept, state.params["base"]) if self.lora else kept

    def result(self, state):
        params = sf.unshard(state.params)
        return self.lora.merge(params["base"], params["lora"]) if self.lora else params


def fit(args, mesh, trained, loss, read, collate):
    """Trains, evaluates on the held-out rows every --every steps and at the end, and saves the model.

    `read(path)` are the examples of a file.
    """
    schedule = sf.optim.warmup_cosine_decay_schedule(0.0, args.lr, max(1, args.steps // 10), max(2, args.steps))
    rule = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(schedule))
    how = {"specs": trained.specs, "trainable": trained.trainable, "zero": sf.Zero(stage=args.zero), "has_aux": True}
    step = sf.sharded_step(loss, rule, mesh=mesh, **how)
    state = step.init(trained.params)
    training, held_out = (read(path) for path in (args.train, args.held_out))
    batches = sf.data.ExampleBatches(training, args.batch, collate, seed=args.seed)
    held_out = sf.data.ExampleBatches(held_out, args.batch, collate, seed=None)
    cursor = sf.data.Cursor(batches, args.steps, mesh)
    checkpoints = sf.checkpoint.Manager(f"{args.out}/checkpoints", mesh=mesh, save_every=args.every)
    if checkpoints.steps():
        restored = checkpoints.restore(trained.kept(state))
        state, cursor = trained.whole(state, restored.tree), cursor.at(restored.user)
    with checkpoints, sf.metrics.Logger(args.out, mesh, start=cursor.next) as logger:
        for n, batch in enumerate(cursor, cursor.next):
            if n == 0:
                logger.write(0, evaluated(mesh, step, state, held_out, 0))
            state, metrics = step(state, batch)
            if (n + 1) % args.every == 0 or n + 1 == args.steps:
                metrics = {**metrics, **evaluated(mesh, step, state, held_out, n + 1)}
            logger.write(n + 1, metrics)
            checkpoints.save(trained.kept(state), n + 1, user=cursor.state(), now=n + 1 == args.steps)
    trained.model.save(f"{args.out}/model", trained.result(state))


def evaluated(mesh, step, state, batches, n):
    """The means over the held-out rows; also on the screen."""
    metrics = step.evaluate(state, batches.once(rank=mesh.rank, world=mesh.size))
    found = {f"held_out/{name}": float(x) for name, x in metrics.items()}
    if mesh.rank == 0:
        print(f"step {n}: " + ", ".join(f"{name} {x:.4f}" for name, x in found.items()), flush=True)
    return found


def options(text):
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "train", "held_out"):
        parser.add_argument(name)
    parser.add_argument("--out", default="runs/chat", help="%(default)s")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 trains all weights")
    parser.add_argument("--steps", type=int, default=100, help="%(default)s")
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step, of all ranks (%(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row; longer ones are cut (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-4, help="%(default)s")
    parser.add_argument("--beta", type=float, default=0.1, help="of chat_dpo.py and chat_kto.py (%(default)s)")
    parser.add_argument(
        "--weights", type=float, nargs=2, default=(1.0, 1.0), help="of wanted and other answers, of chat_kto.py (1 1)"
    )
    parser.add_argument("--zero", type=int, default=3, help="stage (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main()
