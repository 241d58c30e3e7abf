"""`shardfn pretrain`: trains a GPT on text by a TOML file, by the public functions of shardfn."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist

from shardfn import core
from shardfn.checkpoint import Manager, Preemption
from shardfn.data import (
    Batches,
    BatchRamp,
    BPETokenizer,
    ByteTokenizer,
    Cursor,
    Mixture,
    TokenFile,
    Tokenizer,
    encode_files,
    prefetch,
)
from shardfn.interop import hf_config
from shardfn.metrics import Logger, NonFiniteGuard, Throughput
from shardfn.models import gpt
from shardfn.transforms import (
    ShardedStep,
    TrainState,
    WeightedMean,
    accumulate,
    jit,
    mixed_precision,
    pipeline,
    remat,
    sharded_step,
)

from ._arguments import local_cluster
from ._pretrain_job import PretrainJob, find_differences, make_optimizer, schedule_of, settings_of
from ._states import Setup
from ._training import evaluate_result, move_batch, print_estimate, report_step, write_record

_NORMS = {"norm": torch.float32}  # leaves whose path has "norm"
_VALIDATION_SEED = 1


def pretrain(job: PretrainJob, *, plan_only: bool = False) -> int:
    """Prints the estimate, and runs a job, or resumes the job from the last checkpoint.

    Args:
        job: settings.
        plan_only: whether to end behind the estimate.

    Returns:
        The exit status: 0, or 75 where a signal has ended the run early.

    Raises:
        ValueError: the sources or the checkpoints do not fit the job.
        FloatingPointError: the loss was not finite for too many steps.
    """
    print_estimate(lambda: _make_setup(job))
    if plan_only:
        return 0
    try:
        mesh = core.make_mesh(job.shape)
        with Preemption(mesh) as preemption:
            _train(job, mesh, preemption)
        return preemption.exit_code
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _make_setup(job: PretrainJob) -> Setup:
    """Returns the run that `shardfn plan` estimates."""
    return Setup(
        "run",
        job.config(256 if job.data.tokenizer == "bytes" else job.data.vocab_size),
        job.shape,
        local_cluster(job.shape),
        core.Zero(stage=job.train.zero),
        f"{job.train.precision}-adam",
        batch=-(-job.data.batch // job.shape.get("dp", 1)),
        seq=job.data.length,
        accumulate=job.train.accumulate,
        remat=job.train.remat,
    )


def make_loss(job: PretrainJob, config: gpt.Config) -> Callable[..., Any]:
    """Returns `loss(params, batch)` of a job. The weight of a batch is its number of rows, or of tokens under "sp"."""

    def weigh(mean: Any, batch: Mapping[str, torch.Tensor]) -> WeightedMean:
        rows = len(batch["tokens"])
        return mean if isinstance(mean, WeightedMean) else WeightedMean(mean * rows, rows)

    wrap = remat if job.train.remat else (lambda inner: inner)
    options: dict[str, Any] = {"wrap": wrap, "axis": "tp", "sequence": job.train.sequence}
    if job.shape.get("pp", 1) > 1:
        first, block, end = gpt.stages(config, **options)
        loss: Any = pipeline(
            first, block, lambda p, h, batch: weigh(end(p, h, batch), batch), num_microbatches=job.train.accumulate
        )
    else:
        loss = lambda params, batch: weigh(gpt.loss(config, params, batch, **options), batch)  # noqa: E731
        loss = accumulate(loss, job.train.accumulate) if job.train.accumulate > 1 else loss
    if job.train.precision == "bf16":
        loss = mixed_precision(loss, core.Policy.bf16(exceptions=_NORMS))
    return jit(loss, backend=job.train.jit) if job.train.jit else loss


def make_step(job: PretrainJob, config: gpt.Config, mesh: core.Mesh) -> ShardedStep:
    """Returns the training step of a job."""
    deep, cut = job.shape.get("pp", 1) > 1, job.shape.get("sp", 1) > 1
    axes = core.P("dp", "sp")
    return sharded_step(
        make_loss(job, config),
        make_optimizer(job),
        mesh=mesh,
        specs=gpt.specs(config, tp="tp", pp="pp" if deep else None),
        batch={"tokens": axes, "targets": axes} if cut else core.P("dp"),
        zero=core.Zero(stage=job.train.zero, axis=("dp", "sp") if cut else "dp"),
        skip_nonfinite=True,
    )


def make_batches(job: PretrainJob, tokens: Mapping[str, TokenFile]) -> tuple[Any, Any]:
    """Returns the batches of training and of validation: pure functions of a batch's number."""
    data, halves = job.data, dict[str, tuple[Batches, Batches]]()
    for name, source in tokens.items():
        try:
            halves[name] = Batches(source, 1, data.length, data.seed).split(data.validation)
        except ValueError as error:
            raise ValueError(f"[data.sources] {name}: {error}") from error
    weights = {name: float(source["weight"]) for name, source in data.sources.items() if "weight" in source}
    ramp = BatchRamp(**data.ramp) if data.ramp else None

    def mix(part: int, seed: int, ramp: BatchRamp | None) -> Any:
        how = {"weights": weights or None, "temperature": data.temperature or None, "seed": seed}
        sources = {name: both[part] for name, both in halves.items()}
        return Mixture(sources, **how).batches(data.batch, _stack_tokens, ramp=ramp)

    return mix(0, data.seed, ramp), mix(1, _VALIDATION_SEED, None)


def _stack_tokens(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {"tokens": torch.stack([torch.as_tensor(row["tokens"]) for row in rows])}


def read_sources(job: PretrainJob, mesh: core.Mesh) -> tuple[Tokenizer, dict[str, TokenFile]]:
    """Returns the tokenizer and the token file of each source. Rank 0 writes files that are missing. Collective."""
    out, names = pathlib.Path(job.train.out), list(job.data.sources)
    if mesh.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        if job.data.tokenizer == "bpe" and not (out / "bpe.json").is_file():
            every = [path for name in names for path in job.files(name)]
            BPETokenizer.train(every, job.data.vocab_size).save(out / "bpe.json")
        tokenizer = _load_tokenizer(job)
        for name in names:
            encode_files(job.files(name), out / f"{name}.bin", tokenizer)
    if mesh.size > 1:
        dist.barrier()
    return _load_tokenizer(job), {name: TokenFile.open(out / f"{name}.bin") for name in names}


def _load_tokenizer(job: PretrainJob) -> Tokenizer:
    if job.data.tokenizer == "bytes":
        return ByteTokenizer()
    return BPETokenizer.load(pathlib.Path(job.train.out, "bpe.json"))


def _train(job: PretrainJob, mesh: core.Mesh, preemption: Preemption) -> None:
    tokenizer, tokens = read_sources(job, mesh)
    config = job.config(tokenizer.vocab_size)
    training, validation = make_batches(job, tokens)
    step, schedule = make_step(job, config, mesh), schedule_of(job)
    state = step.init(functools.partial(gpt.init, config), core.key(job.train.seed))
    cursor = Cursor(training, job.train.steps, mesh)
    every, last = job.evaluation.every, job.train.steps
    out = pathlib.Path(job.train.out)
    with Manager(
        out / "checkpoints", mesh=mesh, save_every=job.checkpoints.every, keep_last=job.checkpoints.keep
    ) as saved:
        if saved.steps():
            _check_settings(job, out)
            restored = saved.restore(state)
            state, cursor = restored.tree, cursor.at(restored.user)
        _write_settings(job, config, mesh)
        speed, guard = Throughput(), NonFiniteGuard(job.train.max_nonfinite)
        with Logger(job.train.out, mesh, start=cursor.next) as logger:
            first = cursor.next
            bar = core.progress(total=last, initial=first, desc="pre-training", unit="step", mesh=mesh)
            with closing(prefetch(cursor)) as batches, bar:
                for n, batch in enumerate(batches, first):
                    state, metrics = step(state, _place(config, batch, mesh))
                    ends = n + 1 == last or preemption.stopping
                    logged: dict[str, Any] = {**metrics, "learning_rate": schedule(n)}
                    if (n + 1) % every == 0 or ends:
                        with speed.pause():
                            logged["validation_loss"] = _validate(job, config, step, state, validation, mesh)
                    rows = batch["tokens"]
                    row = logger.write(n + 1, logged, speed(rows.shape[0] * job.data.length * mesh.axis_size("dp")))
                    bar.update()
                    if n == first or (n + 1) % job.train.log_every == 0 or ends:
                        report_step(bar, row, last)
                    if guard(n + 1, metrics, last=ends):
                        saved.save(state, n + 1, user={**cursor.state(), "next": n + 1}, now=ends)
                    if ends:
                        break
    if not preemption.stopping:
        limit, include_path = job.evaluation.limit or None, job.evaluation.include_path or None
        evaluate_result(str(out), str(out), job.evaluation.tasks, mesh, limit=limit, include_path=include_path)


def _place(config: gpt.Config, batch: Any, mesh: core.Mesh) -> Any:
    batch = gpt.cut_sequences(config, gpt.shifted(batch), mesh=mesh) if mesh.axis_size("sp") > 1 else batch
    return move_batch(batch, mesh)


def _validate(
    job: PretrainJob, config: gpt.Config, step: ShardedStep, state: TrainState, validation: Any, mesh: core.Mesh
) -> float:
    dp = {"rank": mesh.axis_index("dp"), "world": mesh.axis_size("dp")}
    held_out = (_place(config, validation(n, **dp), mesh) for n in range(job.evaluation.batches))
    return float(step.evaluate(state, held_out)["loss"])


def _check_settings(job: PretrainJob, out: pathlib.Path) -> None:
    record = out / "run.json"
    before = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    now = json.loads(json.dumps(settings_of(job)))
    core.raise_all(
        ValueError,
        f"{out} has a run with other settings. Pass the same to continue, or another [train] out:",
        find_differences(job, before, now) if before else [],
    )


def _write_settings(job: PretrainJob, config: gpt.Config, mesh: core.Mesh) -> None:
    """Writes the settings, and the shape of the model, from which `shardfn generate` makes the model again."""
    if mesh.rank != 0:
        return
    out = pathlib.Path(job.train.out)
    model = {"model": hf_config(dataclasses.replace(config, stacked=False)), "per_head": config.per_head}
    model["tokenizer"] = "bpe.json" if job.data.tokenizer == "bpe" else "bytes"
    for name, value in {"run.json": settings_of(job), "model.json": model}.items():
        write_record(out / name, value)
