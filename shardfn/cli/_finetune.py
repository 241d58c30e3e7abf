"""`shardfn finetune`: fine-tunes a model of transformers on JSON lines, by the public functions of shardfn."""

import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardfn.checkpoint import Manager
from shardfn.collectives import unshard
from shardfn.core import Mesh, P, Policy, PyTree, Sharding, Zero, key, make_mesh, progress
from shardfn.data import IGNORED, Cursor, ExampleBatches, JSONLines, pad
from shardfn.graph import cluster
from shardfn.interop import export, module_from_hf, module_to_hf, without_weights
from shardfn.kernels import GROUP
from shardfn.lora import LoRA, save_peft, with_base, without_base
from shardfn.metrics import Logger, Throughput
from shardfn.optim import adamw, chain, clip_by_global_norm, warmup_cosine_decay_schedule
from shardfn.transforms import (
    TrainState,
    WeightedMean,
    accumulate,
    from_module,
    mixed_precision,
    partition,
    propose_specs,
    sharded_step,
)

from ._finetune_job import FinetuneJob, settings
from ._models import parse_model
from ._plan import plan
from ._report import plan_text
from ._states import Setup


class Trained(NamedTuple):
    """A model, made without weights, with the functions and leaves that a step needs.

    Attributes:
        module: the model.
        tokenizer: its tokenizer.
        loss: `loss(params, batch)`.
        params: the first parameters, deferred.
        specs: of them.
        lora: the adapters; None where all weights are trained.
    """

    module: Any
    tokenizer: Any
    loss: Callable[..., Any]
    params: PyTree
    specs: PyTree
    lora: LoRA | None


def estimate(job: FinetuneJob) -> str:
    """The estimate of `shardfn plan` for a job, or the reason why it cannot be made. Only `config.json` is read."""
    dp = job.shape["dp"]
    try:
        config = parse_model(job.model)
        micro = -(-job.batch // dp // job.accumulate)
        made = plan(
            Setup(
                job.model,
                config,
                job.shape,
                cluster(job.cluster or _here()),
                Zero(stage=job.zero),
                f"{job.precision}-adam",
                batch=micro * job.accumulate,
                seq=min(job.length, config.max_len),
                accumulate=job.accumulate,
                remat=job.remat,
            )
        )
    except ValueError as error:
        return f"No estimate before the run: {error}\n"
    more = "\nWith --lora only adapters have gradients and optimizer states: it needs less.\n" if job.lora else ""
    return plan_text(made) + more


def finetune(job: FinetuneJob) -> int:
    """Prints the estimate, and runs a job, or goes on with it from its last checkpoint.

    Returns:
        The exit status.
    """
    if os.environ.get("RANK", "0") == "0":
        print(estimate(job), flush=True)
    try:
        _run(job, make_mesh(job.shape))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _run(job: FinetuneJob, mesh: Mesh) -> None:
    _write_settings(job, mesh)
    made = _trained(job, mesh)
    schedule = warmup_cosine_decay_schedule(0.0, job.lr, max(1, job.steps // 10), job.steps)
    optimizer = chain(clip_by_global_norm(1.0), adamw(schedule, weight_decay=job.weight_decay))
    step = sharded_step(
        made.loss,
        optimizer,
        mesh=mesh,
        specs=made.specs,
        batch=P("dp"),
        zero=Zero(stage=job.zero),
        trainable=True if made.lora is None else made.lora.trainable,
    )
    state = step.init(made.params)
    training, validation = _batches(job, made.tokenizer)
    cursor, speed = Cursor(training, job.steps, mesh), Throughput()
    by = "validation_loss" if job.validation else None
    checkpoints = Manager(pathlib.Path(job.out, "checkpoints"), mesh=mesh, save_every=job.every, best=by)
    if checkpoints.steps():
        state, at = _restored(checkpoints, state, made.lora)
        cursor = cursor.at(at)
    with checkpoints, Logger(job.out, mesh, start=cursor.next) as logger:
        bar = progress(cursor, total=job.steps, initial=cursor.next, desc="fine-tuning", unit="step", mesh=mesh)
        for n, batch in enumerate(bar, cursor.next):
            state, metrics = step(state, _on(batch, mesh))
            logged: dict[str, Any] = {**metrics, "learning_rate": schedule(n)}
            if validation is not None and ((n + 1) % job.every == 0 or n + 1 == job.steps):
                dp = {"rank": mesh.axis_index("dp"), "world": mesh.axis_size("dp")}
                held_out = (_on(held, mesh) for held in validation.once(**dp))
                with speed.pause():
                    logged["validation_loss"] = step.evaluate(state, held_out)["loss"]
            tokens = batch["tokens"].numel() * mesh.axis_size("dp")
            logger.write(n + 1, logged, speed(tokens))
            by_metric = None if by is None else logged
            last = n + 1 == job.steps
            checkpoints.save(_kept(state, made.lora), n + 1, user=cursor.state(), metrics=by_metric, now=last)
        best = checkpoints.best() if by else None
        if best is not None and best != job.steps:
            state, _ = _restored(checkpoints, state, made.lora, step=best)
        if best is not None and mesh.rank == 0:
            print(f"The result is that of step {best}, with the lowest validation loss.", flush=True)
    _write_result(job, made, state, mesh)


def _trained(job: FinetuneJob, mesh: Mesh) -> Trained:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(job.model)
    with without_weights():
        module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(job.model))
    if pathlib.Path(job.model, "generation_config.json").is_file():
        module.generation_config = transformers.GenerationConfig.from_pretrained(job.model)
    module.train(job.remat)  # else dropout is off
    if job.remat:
        # The first name is that of transformers 5.24 and later; the second one is gone in 6.
        enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
        enable()
    params, (_, apply) = module_from_hf(module, job.model), from_module(module)

    def loss(params: PyTree, batch: PyTree) -> WeightedMean:
        inputs = {"input_ids": batch["tokens"], "labels": batch["labels"], "attention_mask": batch["attention_mask"]}
        out = apply(params, **inputs, use_cache=False, num_items_in_batch=1)  # of a sum, divided by 1
        return WeightedMean(out.loss, batch["weight"].sum())

    cut = mesh.axis_size("tp") > 1
    specs: Any = P()
    if cut:
        rows = -(-job.batch // mesh.axis_size("dp") // job.accumulate)
        specs = propose_specs(loss, dict(module.named_parameters()), mesh, pad(job.length)([[0]] * rows))
    lora = None
    if job.lora:
        targets, transposed = _targets(module)
        codes: Any = job.codes or None
        lora = LoRA.of(
            params, targets, rank=job.lora, alpha=job.lora_alpha or None, fan_in_fan_out=transposed, codes=codes
        )
        if codes:
            specs = _in_codes(specs, lora, mesh.axis_size("tp")) if cut else lora.base_specs
        specs = {"base": specs, "lora": P()}  # `partition` finds out how adapters beside cut leaves are used
    whole = loss if lora is None else lora.adapt(loss)
    whole = partition(whole) if cut else whole
    whole = mixed_precision(whole, Policy.bf16()) if job.precision == "bf16" else whole
    whole = accumulate(whole, job.accumulate) if job.accumulate > 1 else whole
    first = params if lora is None else {"base": params, "lora": lora.init(key(job.seed))}
    return Trained(module, tokenizer, whole, first, specs, lora)


def _targets(module: Any) -> tuple[list[str], bool]:
    """All linear layers but the head, as regular expressions; and whether their weights are `[in, out]`."""
    head = module.get_output_embeddings()
    kinds = {path: type(sub).__name__ for path, sub in module.named_modules() if sub is not head}
    paths = [path for path, kind in kinds.items() if kind in ("Linear", "Conv1D")]
    own = {kinds[path] for path in paths}
    if len(own) != 1:
        raise ValueError(
            f"--lora: the layers of a {type(module).__name__} are of the kinds {sorted(own)}, and one of Linear or"
            " Conv1D is needed; write the run with sf.lora.LoRA.of (docs/lora.md)."
        )
    return [f"^{re.escape(path)}\\.weight$" for path in paths], own == {"Conv1D"}


def _in_codes(specs: Mapping[str, P], lora: LoRA, num: int) -> dict[str, P | Sharding]:
    """The specs of a base whose weights with an adapter are in codes.

    A cut of the last dim between elements that share a scale becomes one of dim 0.

    Args:
        specs: by name.
        lora: has the codes.
        num: ranks along `tp`.
    """

    def own(name: str, spec: P) -> P | Sharding:
        if name not in lora.sites:
            return spec
        *first, last = lora.sites[name].shape
        apart = "tp" in spec.dim_axes(len(first)) and last % (num * GROUP)
        return Sharding(P("tp") if apart else spec, codes=lora.codes)

    return {name: own(name, spec) for name, spec in specs.items()}


def _batches(job: FinetuneJob, tokenizer: Any) -> tuple[ExampleBatches, ExampleBatches | None]:
    collate = pad(job.length, token=tokenizer.pad_token_id or 0)

    def encode(row: Any) -> dict[str, list[int]]:
        return encoded(tokenizer, row, job.length)

    training = ExampleBatches(JSONLines(job.train, encode), job.batch, collate, seed=job.seed)
    if not job.validation:
        return training, None
    return training, ExampleBatches(JSONLines(job.validation, encode), job.batch, collate, seed=None)


def encoded(tokenizer: Any, row: Any, length: int) -> dict[str, list[int]]:
    """The tokens of an example, and its labels: a prompt is not predicted. A text and a completion end by EOS."""
    if "messages" in row:
        ids = list(tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False))
        return {"tokens": ids[:length], "labels": ids[:length]}
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    prompt = tokenizer(row["prompt"])["input_ids"] if "prompt" in row else []
    text = row["prompt"] + row["completion"] if "prompt" in row else row["text"]
    ids = tokenizer(text)["input_ids"]
    ids = ids + end if ids[-1:] != end else ids
    labels = [IGNORED] * len(prompt) + ids[len(prompt) :]
    return {"tokens": ids[:length], "labels": labels[:length]}


def _kept(state: TrainState, lora: LoRA | None) -> TrainState:
    """The part of a state that is saved: without a frozen model."""
    return state if lora is None else without_base(state)


def _restored(
    checkpoints: Manager, state: TrainState, lora: LoRA | None, step: int | None = None
) -> tuple[TrainState, Any]:
    """A checkpoint's state, in the memory of the given one, and its cursor; by default those of the newest."""
    restored = checkpoints.restore(_kept(state, lora), step=step)
    tree = restored.tree if lora is None else with_base(restored.tree, state.params["base"])
    return tree, restored.user


def _write_settings(job: FinetuneJob, mesh: Mesh) -> None:
    if mesh.rank == 0:
        out = pathlib.Path(job.out)
        out.mkdir(parents=True, exist_ok=True)
        partial = out / "run.json.partial"
        partial.write_text(json.dumps(settings(job), indent=2) + "\n", encoding="utf-8")
        partial.rename(out / "run.json")


def _write_result(job: FinetuneJob, made: Trained, state: TrainState, mesh: Mesh) -> None:
    out = pathlib.Path(job.out)
    if made.lora is None:
        export(state, made.module, out / "model", tokenizer=made.tokenizer)
        return
    adapters = unshard(state.params["lora"])
    if mesh.rank == 0:
        save_peft(out / "adapter", made.lora, adapters, base_model=str(pathlib.Path(job.model).resolve()))
        made.tokenizer.save_pretrained(out / "adapter")
    if job.merge:
        merged = made.lora.merge(unshard(state.params["base"]), adapters)
        if mesh.rank == 0:
            module_to_hf(made.module, merged, out / "model", tokenizer=made.tokenizer)


def _on(batch: PyTree, mesh: Mesh) -> PyTree:
    return {name: x.to(mesh.device) for name, x in batch.items()}


def _here() -> str:
    """The device of the estimate: the one that is here, if it is known."""
    if not torch.cuda.is_available():
        return "cpu"
    name = torch.cuda.get_device_name().lower()
    known = {"v100": "v100-32", "h200": "h200", "h100": "h100", "b200": "b200", "4090": "rtx4090", "a6000": "a6000"}
    return next((device for part, device in known.items() if part in name), "a100-80")
