"""`shardfn finetune`: fine-tunes a model of transformers on JSON lines, by the public functions of shardfn."""

import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardfn import core
from shardfn.checkpoint import Manager
from shardfn.collectives import unshard
from shardfn.data import Cursor, ExampleBatches, JSONLines, Mixture, pad
from shardfn.interop import export, file_dtypes, master_params, module_from_hf, module_to_hf, without_weights
from shardfn.interop.quantized import can_decode, read_quantization
from shardfn.kernels import GROUP
from shardfn.lora import LoRA, save_peft, with_base, without_base
from shardfn.metrics import CSV, EarlyStopping, Logger, MLflow, NonFiniteGuard, Sink, TensorBoard, Throughput, WandB
from shardfn.optim import Schedule, adamw, constant_schedule
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

from ._arguments import device_cluster, local_cluster
from ._finetune_job import FinetuneJob, settings, split_names
from ._finetune_rows import check_samples, encode_row
from ._models import parse_model
from ._states import Setup
from ._training import (
    clip_gradients,
    evaluate_result,
    make_schedule,
    move_batch,
    print_estimate,
    report_step,
    write_record,
)


class Trained(NamedTuple):
    """Model, made without weights, with the functions and leaves for a step.

    Attributes:
        module: module of the model.
        loss: `loss(params, batch)`.
        params: first parameters, deferred.
        specs: specs of the parameters.
        lora: adapters, or None where all weights are trained.
    """

    module: Any
    loss: Callable[..., Any]
    params: core.PyTree
    specs: core.PyTree
    lora: LoRA | None


def load_model(job: FinetuneJob, mesh: core.Mesh) -> Trained:
    """Makes the model of a job. The weights are read when the step is initialised.

    Raises:
        ValueError: the files do not fit the model, or adapters cannot be made. The message lists all.
    """
    module = _empty_module(job)
    params, (_, apply) = module_from_hf(module, job.model), from_module(module)

    def batch_loss(params: core.PyTree, batch: core.PyTree) -> WeightedMean:
        inputs = {"input_ids": batch["tokens"], "labels": batch["labels"], "attention_mask": batch["attention_mask"]}
        out = apply(params, **inputs, use_cache=False, num_items_in_batch=1)  # of a sum, divided by 1
        return WeightedMean(out.loss, batch["weight"].sum())

    cut = mesh.axis_size("tp") > 1
    specs: Any = core.P()
    if cut:
        rows = -(-job.batch // mesh.axis_size("dp") // job.accumulate)
        specs = propose_specs(batch_loss, dict(module.named_parameters()), mesh, pad(job.length)([[0]] * rows))
    lora = None
    if job.lora:
        targets, transposed = _lora_targets(module, job.lora_target)
        quantization: Any = job.quantization or None
        lora = LoRA.of(
            params,
            targets,
            rank=job.lora,
            alpha=job.lora_alpha or None,
            fan_in_fan_out=transposed,
            rank_pattern={name: int(n) for name, n in (x.split("=") for x in split_names(job.lora_rank_pattern))},
            dropout=job.lora_dropout,
            quantization=quantization,
        )
        if quantization:
            specs = _quantized_specs(specs, lora, mesh.axis_size("tp")) if cut else lora.base_specs
        specs = {"base": specs, "lora": core.P()}  # `partition` finds out how adapters next to cut leaves are used
    whole = batch_loss if lora is None else lora.adapt(batch_loss, _row_numbers)
    whole = partition(whole) if cut else whole
    whole = mixed_precision(whole, core.Policy.bf16()) if job.precision == "bf16" else whole
    whole = accumulate(whole, job.accumulate) if job.accumulate > 1 else whole
    first = params if lora is None else {"base": params, "lora": lora.init(core.key(job.seed))}
    return Trained(module, whole, first, specs, lora)


def _row_numbers(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns the global numbers of rows. Evaluations drop nothing, so their rows count from 0."""
    tokens = batch["tokens"]
    return batch["index"] if "index" in batch else torch.arange(len(tokens), device=tokens.device)


def load_part(name: str, source: Any, load: Callable[[Any], Any]) -> Any:
    """Returns what a function of transformers loads.

    Args:
        name: words for the part.
        source: argument of the function.
        load: function of transformers, which may raise anything for unknown files.

    Raises:
        ValueError: the function raised. The message is included.
    """
    try:
        return load(source)
    except Exception as error:
        raise ValueError(f"MODEL: transformers cannot load its {name}: {type(error).__name__}: {error}") from error


def _empty_module(job: FinetuneJob) -> Any:
    import transformers

    config = load_part("config.json", job.model, transformers.AutoConfig.from_pretrained)
    if can_decode(read_quantization(job.model)):  # read as floats, into a module of plain layers
        del config.quantization_config
    with without_weights():
        module: Any = load_part("model", config, transformers.AutoModelForCausalLM.from_config)
    if pathlib.Path(job.model, "generation_config.json").is_file():
        module.generation_config = transformers.GenerationConfig.from_pretrained(job.model)
    module.train(job.remat)  # else dropout is off
    if job.remat:
        # The first name is for transformers 5.24 and later. The second name is gone in 6.
        enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
        enable()
    return module


def _lora_targets(module: Any, names: str = "") -> tuple[list[str], bool]:
    """Returns patterns of linear layers except the head, and whether the weights are `[in, out]`.

    Args:
        module: model.
        names: parts of paths, with commas between them. Empty for all layers.
    """
    head = module.get_output_embeddings()
    kinds = {path: type(sub).__name__ for path, sub in module.named_modules() if sub is not head}
    paths = [path for path, kind in kinds.items() if kind in ("Linear", "Conv1D")]
    wanted = split_names(names)
    if unknown := [name for name in wanted if not any(name in path for path in paths)]:
        known = sorted({path.rpartition(".")[2] for path in paths})
        raise ValueError(f"--lora-target must be parts of {', '.join(known)}, got {', '.join(unknown)}.")
    paths = [path for path in paths if not wanted or any(name in path for name in wanted)]
    own = {kinds[path] for path in paths}
    if len(own) != 1:
        raise ValueError(
            f"--lora must find a layer of the kind Linear or Conv1D, got a {type(module).__name__} with layers of the"
            f" kinds {sorted(own)}. Write the run with sf.lora.LoRA.of (docs/lora.md)."
        )
    return [f"^{re.escape(path)}\\.weight$" for path in paths], own == {"Conv1D"}


def _quantized_specs(specs: Mapping[str, core.P], lora: LoRA, num: int) -> dict[str, core.P | core.Sharding]:
    """Returns the specs of a base whose weights with an adapter are quantized.

    A cut of the last dim between elements with a shared scale becomes a cut of dim 0.

    Args:
        specs: specs by name.
        lora: adapters with the quantization.
        num: ranks along `tp`.
    """

    def quantized_spec(name: str, spec: core.P) -> core.P | core.Sharding:
        if name not in lora.sites:
            return spec
        *first, last = lora.sites[name].shape
        apart = "tp" in spec.dim_axes(len(first)) and last % (num * GROUP)
        return core.Sharding(core.P("tp") if apart else spec, quantization=lora.quantization)

    return {name: quantized_spec(name, spec) for name, spec in specs.items()}


def _make_setup(job: FinetuneJob) -> Setup:
    """Returns the run that `shardfn plan` estimates, from `config.json`."""
    config = parse_model(job.model)
    return Setup(
        job.model,
        config,
        job.shape,
        device_cluster(job.cluster, job.shape) if job.cluster else local_cluster(job.shape),
        core.Zero(stage=job.zero),
        f"{job.precision}-adam",
        batch=-(-job.batch // job.shape["dp"] // job.accumulate) * job.accumulate,
        seq=min(job.length, config.max_len),
        accumulate=job.accumulate,
        remat=job.remat,
    )


def finetune(job: FinetuneJob) -> int:
    """Prints the estimate, and runs a job, or resumes the job from the last checkpoint.

    Returns:
        The exit status.

    Raises:
        ValueError: the model, the rows or the checkpoints do not fit the job.
        FloatingPointError: the loss was not finite for too many steps.
    """
    remark = "\nWith --lora only adapters have gradients and optimizer states: it needs less.\n" if job.lora else ""
    print_estimate(lambda: _make_setup(job), remark)
    try:
        _train_model(job, core.make_mesh(job.shape))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _train_model(job: FinetuneJob, mesh: core.Mesh) -> None:
    tokenizer = _load_tokenizer(job)
    made = load_model(job, mesh)
    training, validation = _make_batches(job, tokenizer, made.module)
    schedule = _make_schedule(job)
    step = sharded_step(
        made.loss,
        clip_gradients(adamw(schedule, weight_decay=job.weight_decay), job.clip),
        mesh=mesh,
        specs=made.specs,
        batch=core.P("dp"),
        zero=core.Zero(stage=job.zero),
        trainable=True if made.lora is None else made.lora.trainable,
        skip_nonfinite=True,
        key=core.key(job.seed) if job.lora_dropout else None,
    )
    state = step.init(made.params)
    cursor, speed, guard = Cursor(training, job.steps, mesh), Throughput(), NonFiniteGuard(job.max_nonfinite)
    by = "validation_loss" if job.validation else None
    checkpoints = Manager(pathlib.Path(job.out, "checkpoints"), mesh=mesh, save_every=job.every, best=by)
    stopping, rows = EarlyStopping(max(job.patience, 1)), step.rows(job.batch)
    if checkpoints.steps():
        state, at = _restore_state(checkpoints, state, made.lora)
        stopping = stopping.at(at.pop("stopping", stopping.state()))
        _move_cursor(job, cursor, at)
    if mesh.rank == 0:
        write_record(pathlib.Path(job.out, "run.json"), settings(job))
    with checkpoints, Logger(job.out, mesh, sinks=_make_sinks(job), start=cursor.next) as logger:
        first = cursor.next
        bar = core.progress(cursor, total=job.steps, initial=first, desc="fine-tuning", unit="step", mesh=mesh)
        for n, batch in enumerate(bar, first):
            last = n + 1 == job.steps
            if job.lora_dropout:
                batch["index"] = torch.arange(n * job.batch + rows.start, n * job.batch + rows.stop)
            state, metrics = step(state, move_batch(batch, mesh))
            logged: dict[str, Any] = {**metrics, "learning_rate": schedule(n)}
            if validation is not None and ((n + 1) % job.every == 0 or last):
                dp = {"rank": mesh.axis_index("dp"), "world": mesh.axis_size("dp")}
                held_out = (move_batch(held, mesh) for held in validation.once(**dp))
                with speed.pause():
                    logged["validation_loss"] = step.evaluate(state, held_out)["loss"]
                stopping = stopping.update(float(logged["validation_loss"]))
                last = last or (job.patience > 0 and stopping.stop)
            tokens = batch["tokens"].numel() * mesh.axis_size("dp")
            row = logger.write(n + 1, logged, speed(tokens))
            if n == first or (n + 1) % job.log_every == 0 or last or "validation_loss" in row:
                report_step(bar, row, job.steps)
            if _is_finite(job, guard, n + 1, metrics, batch):
                kept = None if by is None else logged
                user = {**cursor.state(), "stopping": stopping.state()}
                checkpoints.save(_saved_part(state, made.lora), n + 1, user=user, metrics=kept, now=last)
            if last:
                break
        best = checkpoints.best() if by else None
        if best is not None and best != int(state.step):
            state, _ = _restore_state(checkpoints, state, made.lora, step=best)
        if best is not None and mesh.rank == 0:
            print(f"The result is that of step {best}, with the lowest validation loss.", flush=True)
    _write_result(job, made, tokenizer, state, mesh)
    evaluate_result(str(pathlib.Path(job.out, "model")), job.out, split_names(job.eval_tasks), mesh)


def _load_tokenizer(job: FinetuneJob) -> Any:
    """Loads the tokenizer, and encodes one row of each form, before the model takes time."""
    import transformers

    tokenizer = load_part("tokenizer", job.model, transformers.AutoTokenizer.from_pretrained)
    check_samples(tokenizer, filter(None, (*job.sources, job.validation)), length=job.length, learn=job.learn)
    return tokenizer


def _make_schedule(job: FinetuneJob) -> Schedule:
    """Returns the learning rate. The default warmup is a tenth of the steps. A run of one step has the whole rate."""
    if job.steps == 1:
        return constant_schedule(job.lr)
    return make_schedule(job.schedule, job.lr, max(1, job.steps // 10) if job.warmup < 0 else job.warmup, job.steps)


_SINKS: dict[str, Callable[[FinetuneJob], Sink]] = {
    "csv": lambda job: CSV(),
    "tensorboard": lambda job: TensorBoard(),
    "wandb": lambda job: WandB(project="shardfn", config=settings(job)),
    "mlflow": lambda job: MLflow("shardfn", params=settings(job)),
}


def _make_sinks(job: FinetuneJob) -> list[Sink]:
    return [_SINKS[name](job) for name in split_names(job.loggers)]


def _is_finite(
    job: FinetuneJob, guard: NonFiniteGuard, step: int, metrics: Mapping[str, Any], batch: Mapping[str, torch.Tensor]
) -> bool:
    """Returns whether a step was finite.

    Raises:
        FloatingPointError: too many in a row were not. The message names the steps and what is left.
    """
    try:
        return guard(step, metrics, last=step == job.steps)
    except FloatingPointError as error:
        why = ""
        if not batch["weight"].any():
            why = f" The rows of this step have no token to learn within --length {job.length}: pass a larger one."
        elif guard.count == step:
            why = " No step was finite: look at the weights of MODEL, too."
        raise FloatingPointError(
            f"{error}{why} No model was written to {job.out}, and its checkpoints are from finite steps only. Start"
            " again with another --out."
        ) from None


def _move_cursor(job: FinetuneJob, cursor: Cursor, at: Mapping[str, Any]) -> None:
    """Moves the cursor to the position of a checkpoint.

    Raises:
        ValueError: the data has changed.
    """
    try:
        cursor.at(at)
    except ValueError as error:
        raise ValueError(
            f"--out {job.out} has a run on other data: pass its TRAIN to continue, or another --out. {error}"
        ) from None


def _make_batches(job: FinetuneJob, tokenizer: Any, module: Any) -> tuple[ExampleBatches, ExampleBatches | None]:
    collate = pad(job.length, token=tokenizer.pad_token_id or 0)
    vocab_size = module.get_input_embeddings().num_embeddings

    def encode(row: Any) -> dict[str, list[int]]:
        return encode_row(tokenizer, row, length=job.length, learn=job.learn, vocab_size=vocab_size)

    training = _make_training(job, {path: JSONLines(path, encode) for path in job.sources}, collate)
    if not job.validation:
        return training, None
    return training, ExampleBatches(JSONLines(job.validation, encode), job.batch, collate, seed=None)


def _make_training(job: FinetuneJob, sources: dict[str, JSONLines], collate: Any) -> ExampleBatches:
    if len(sources) == 1:
        return ExampleBatches(next(iter(sources.values())), job.batch, collate, seed=job.seed)
    weights = {path: weight for path, weight in job.sources.items() if weight is not None}
    return Mixture(sources, weights=weights or None, seed=job.seed).batches(job.batch, collate)


def _saved_part(state: TrainState, lora: LoRA | None) -> TrainState:
    """Returns the part of a state that is saved: without a frozen model."""
    return state if lora is None else without_base(state)


def _restore_state(
    checkpoints: Manager, state: TrainState, lora: LoRA | None, step: int | None = None
) -> tuple[TrainState, Any]:
    """Returns a checkpoint's state, in the memory of the given state, and the position. Default: the newest."""
    restored = checkpoints.restore(_saved_part(state, lora), step=step)
    tree = restored.tree if lora is None else with_base(restored.tree, state.params["base"])
    return tree, restored.user


def _write_result(job: FinetuneJob, made: Trained, tokenizer: Any, state: TrainState, mesh: core.Mesh) -> None:
    """Writes the model, or the adapters, or both. Files of a model have the dtypes of MODEL's files."""
    out = pathlib.Path(job.out)
    dtype: Any = getattr(torch, job.dtype) if job.dtype else file_dtypes(made.module, job.model)
    if made.lora is None:
        export(state, made.module, out / "model", dtype=dtype, tokenizer=tokenizer)
        return
    adapters = unshard(master_params(state)["lora"])
    merged = _merge_adapters(job, made, state, adapters) if job.merge else None
    if mesh.rank == 0:
        save_peft(out / "adapter", made.lora, adapters, base_model=str(pathlib.Path(job.model).resolve()))
        tokenizer.save_pretrained(out / "adapter")
        if merged is not None:
            module_to_hf(made.module, merged, out / "model", dtype=dtype, tokenizer=tokenizer)


def _merge_adapters(job: FinetuneJob, made: Trained, state: TrainState, adapters: core.PyTree) -> dict[str, Any]:
    """Returns the parameters of MODEL with the adapters added, each deferred until the writing.

    Parameters are read from MODEL's files, since the step may have rounded them. Quantized leaves come from the step,
    as the adapters were trained with their codes.
    """
    lora = made.lora
    assert lora is not None
    coded = {path: state.params["base"][path] for path in lora.sites} if job.quantization else {}
    base = module_from_hf(made.module, job.model) | unshard(coded)

    def defer_merged(path: str) -> core.Draw:
        leaf = base[path]
        wide = torch.promote_types(leaf.dtype, torch.float32)

        def read_block(slices: tuple[slice, ...]) -> torch.Tensor:
            own = {letter: x.cpu() for letter, x in adapters[path].items()}
            return lora.merge_leaf(path, leaf.detach().cpu().to(wide), own)[slices]

        return core.Draw(read_block, leaf.shape, wide, torch.device("cpu"))

    return {path: defer_merged(path) if path in lora.sites else x for path, x in base.items()}
