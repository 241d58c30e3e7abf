"""The task of `examples/finetune.py`, with accelerate and FSDP2: to count lines by, and to compare.

torchrun --nproc-per-node 2 docs/finetune_accelerate.py MODEL train.jsonl validation.jsonl --out runs/finetune
"""

import argparse
import pathlib

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    get_cosine_with_min_lr_schedule_with_warmup,
)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options = {"--out": "runs/finetune", "--steps": 100, "--every": 20, "--batch": 8, "--length": 512, "--lr": 1e-4}
for name, default in ({"model": "", "train": "", "validation": ""} | options).items():
    parser.add_argument(name, type=type(default), default=default, help="(%(default)s)" if default else None)
args = parser.parse_args()

set_seed(0)
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="SHARDED_STATE_DICT"
)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, log_with="tensorboard", project_dir=args.out)
accelerator.init_trackers("logs")
tokenizer = AutoTokenizer.from_pretrained(args.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)


def encode(row):
    return tokenizer(row["text"], truncation=True, max_length=args.length)


def loader(path, shuffle):
    data = load_dataset("json", data_files=path, split="train")
    data = data.map(encode, batched=True, remove_columns=data.column_names)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return DataLoader(data, args.batch // accelerator.num_processes, shuffle=shuffle, collate_fn=collate)


def measured(batch):
    count = (batch["labels"][:, 1:] != -100).sum()
    total = model(**batch, num_items_in_batch=1, use_cache=False).loss  # a sum, divided by 1
    return total, count


optimizer = torch.optim.AdamW(model.parameters(), args.lr)
schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, max(1, args.steps // 10), args.steps, min_lr=0.0)
model, optimizer = accelerator.prepare(model, optimizer)
training, validation = accelerator.prepare(loader(args.train, True), loader(args.validation, False))
accelerator.register_for_checkpointing(schedule)
checkpoints = pathlib.Path(args.out, "checkpoints")
done = 0
if found := sorted(checkpoints.glob("*"), key=lambda path: int(path.name)):
    accelerator.load_state(found[-1])
    done = int(found[-1].name)
while done < args.steps:
    training.set_epoch(done // len(training))
    for batch in accelerator.skip_first_batches(training, done % len(training)):
        model.train()
        total, count = measured(batch)
        everyone = accelerator.reduce(count, "sum")
        # FSDP averages gradients over ranks; the mean is over the tokens of all of them.
        accelerator.backward(total * accelerator.num_processes / everyone)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        done += 1
        loss = (accelerator.reduce(total.detach(), "sum") / everyone).item()
        metrics = {"loss": loss, "grad_norm": float(norm), "learning_rate": rate}
        if done % args.every == 0:
            model.eval()
            sums = torch.zeros(2, device=accelerator.device)
            with torch.no_grad():
                for held_out in validation:
                    sums += torch.stack([x.float() for x in measured(held_out)])
            sums = accelerator.reduce(sums, "sum")
            metrics["validation_loss"] = (sums[0] / sums[1]).item()
            accelerator.save_state(checkpoints / str(done))
        accelerator.log(metrics, step=done)
        if done == args.steps:
            break
weights = accelerator.get_state_dict(model)
model = accelerator.unwrap_model(model)
model.save_pretrained(
    f"{args.out}/model",
    is_main_process=accelerator.is_main_process,
    state_dict=weights,
    save_function=accelerator.save,
)
if accelerator.is_main_process:
    tokenizer.save_pretrained(f"{args.out}/model")
accelerator.end_training()
