"""Fine-tunes a Hugging Face model on JSON lines with ZeRO-3 in bfloat16: the same file under `python` and `torchrun`.

    torchrun --nproc-per-node 2 examples/finetune.py MODEL train.jsonl validation.jsonl --out runs/finetune

MODEL is a directory that `from_pretrained` takes; each line of data is {"text": ...}. In --out lie metrics.jsonl and
TensorBoard events, checkpoints (the newest two and the best), from which the same command goes on, and at the end
`model`, for `from_pretrained`.
"""

import argparse

import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shardfn as sf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options = {"--out": "runs/finetune", "--steps": 100, "--every": 20, "--batch": 8, "--length": 512, "--lr": 1e-4}
for name, default in ({"model": "", "train": "", "validation": ""} | options).items():
    parser.add_argument(name, type=type(default), default=default, help="(%(default)s)" if default else None)
args = parser.parse_args()

mesh = sf.make_mesh({"dp": -1})
tokenizer = AutoTokenizer.from_pretrained(args.model)
with sf.interop.without_weights():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
_, apply = sf.from_module(model)


def encode(row):
    return tokenizer(row["text"], truncation=True, max_length=args.length)["input_ids"]


def loss(params, batch):
    tokens, labels, mask, weight = (batch[k].to(mesh.device) for k in ("tokens", "labels", "attention_mask", "weight"))
    inputs = {"input_ids": tokens, "labels": labels, "attention_mask": mask, "use_cache": False}
    return sf.WeightedMean(apply(params, **inputs, num_items_in_batch=1).loss, weight.sum())  # of a sum, divided by 1


pad, own = sf.data.pad(args.length), {"rank": mesh.rank, "world": mesh.size}
training = sf.data.ExampleBatches(sf.data.JSONLines(args.train, encode), args.batch, pad)
validation = sf.data.ExampleBatches(sf.data.JSONLines(args.validation, encode), args.batch, pad, seed=None)
schedule = sf.optim.warmup_cosine_decay_schedule(0.0, args.lr, max(1, args.steps // 10), max(2, args.steps))
optimizer = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(schedule))
step = sf.sharded_step(sf.mixed_precision(loss, sf.Policy.bf16()), optimizer, mesh=mesh, zero=sf.Zero(stage=3))
state = step.init(sf.interop.module_from_hf(model, args.model))
cursor, speed = sf.data.Cursor(training, args.steps, mesh), sf.metrics.Throughput()
checkpoints = sf.checkpoint.Manager(f"{args.out}/checkpoints", mesh=mesh, save_every=args.every, best="validation_loss")
if checkpoints.steps():
    restored = checkpoints.restore(state)
    state, cursor = restored.tree, cursor.at(restored.user)
with checkpoints, sf.metrics.Logger(args.out, mesh, tensorboard=True, start=cursor.next) as logger:
    for n, batch in enumerate(sf.progress(cursor, total=args.steps, initial=cursor.next, mesh=mesh), cursor.next):
        state, metrics = step(state, batch)
        if (n + 1) % args.every == 0:
            with speed.pause():
                metrics["validation_loss"] = step.evaluate(state, validation.once(**own))["loss"]
        logger.write(n + 1, metrics, speed(batch["tokens"].numel() * mesh.size), {"learning_rate": schedule(n)})
        checkpoints.save(state, n + 1, user=cursor.state(), metrics=metrics)
sf.export(state, model, f"{args.out}/model", dtype=sf.interop.file_dtypes(model, args.model), tokenizer=tokenizer)
if dist.is_initialized():
    dist.destroy_process_group()
