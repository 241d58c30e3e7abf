"""The settings of `shardfn pretrain`: tables of a TOML file, checked as a whole before anything is loaded."""

import argparse
import dataclasses
import glob
import inspect
import math
import os
import pathlib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardfn import core, optim
from shardfn.checkpoint import steps
from shardfn.data import BatchRamp, default_corpus
from shardfn.models import gpt, moe
from shardfn.nn import AttentionBackend, Blockwise, Dense, Ring, Ulysses

from ._training import SCHEDULES, clip_gradients, fill_shape, make_schedule

STYLES: dict[str, Callable[..., gpt.Config]] = {
    "gpt": gpt.Config,
    "llama": gpt.Config.llama_like,
    "bloom": gpt.Config.bloom_like,
}
ATTENTION: dict[str, Callable[[int], AttentionBackend]] = {
    "dense": lambda length: Dense(),
    "blockwise": lambda length: Blockwise(),
    "ulysses": lambda length: Ulysses("sp", length),
    "ring": lambda length: Ring("sp", length),
}
OPTIMIZERS: dict[str, Callable[..., optim.GradientTransformation]] = {
    name: getattr(optim, name) for name in ("adam", "adamw", "adafactor", "lamb", "lion", "muon", "sgd")
}
_AXES = ("dp", "tp", "sp", "pp")
# Fields of `gpt.Config` that other tables decide, or that are functions.
_NOT_MODEL = ("vocab_size", "max_len", "attention", "layout", "experts", "stacked", "per_head", "causal", "dropout")
_NOT_EXPERTS = ("route", "balance_loss", "exchange", "bias_rate", "axes")


@dataclasses.dataclass(frozen=True)
class DataTable:
    """Corpus of a run.

    Attributes:
        sources: files of each source: {"files": paths or patterns, "weight": part of the rows}. "stdlib" in place of
            paths is Python's standard library.
        tokenizer: "bytes" or "bpe", which is trained on the sources.
        vocab_size: size of a bpe vocabulary.
        length: tokens of a row.
        batch: rows of a step, over all ranks.
        temperature: see `data.Mixture`, in place of weights. 0 for none.
        validation: part of each source that is held out.
        seed: seed of the order of rows.
        ramp: fields of `data.BatchRamp`, or empty.
    """

    sources: Mapping[str, Mapping[str, Any]] = dataclasses.field(
        default_factory=lambda: {"stdlib": {"files": "stdlib"}}
    )
    tokenizer: str = "bytes"
    vocab_size: int = 2048
    length: int = 128
    batch: int = 16
    temperature: float = 0.0
    validation: float = 0.02
    seed: int = 0
    ramp: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ScheduleTable:
    """Learning rate over the steps.

    Attributes:
        name: "cosine", "linear" or "constant" behind the warmup.
        warmup: steps until the whole rate.
        end: last rate, as a part of the whole rate.
    """

    name: str = "cosine"
    warmup: int = 40
    end: float = 0.1


@dataclasses.dataclass(frozen=True)
class TrainTable:
    """Steps of a run.

    Attributes:
        out: directory for all files of the run.
        steps: optimizer steps.
        clip: bound of the norm of the gradient. 0 for none.
        accumulate: microbatches of a step, and of a pipeline.
        zero: stage.
        precision: "fp32", or "bf16" with float32 master copies.
        remat: whether each block is computed again in the backward.
        jit: "graph" or "inductor" captures the step. Empty for none.
        sequence: whether ranks of "tp" have their own tokens between blocks.
        seed: seed of the parameters.
        log_every: steps between lines with the loss.
        max_nonfinite: steps in a row without a finite loss after which the run ends.
    """

    out: str = "runs/pretrain"
    steps: int = 800
    clip: float = 1.0
    accumulate: int = 1
    zero: int = 3
    precision: str = "fp32"
    remat: bool = False
    jit: str = ""
    sequence: bool = False
    seed: int = 0
    log_every: int = 10
    max_nonfinite: int = 3


@dataclasses.dataclass(frozen=True)
class CheckpointsTable:
    """Checkpoints of a run.

    Attributes:
        every: steps between checkpoints.
        keep: number of the newest checkpoints that stay.
    """

    every: int = 100
    keep: int = 2


@dataclasses.dataclass(frozen=True)
class EvaluationTable:
    """Evaluations of a run.

    Attributes:
        every: steps between validations.
        batches: batches of a validation.
        tasks: tasks of lm-evaluation-harness, computed after the last step.
        include_path: directory with further tasks, in YAML.
        limit: most documents of a task. 0 for all.
    """

    every: int = 100
    batches: int = 8
    tasks: tuple[str, ...] = ()
    include_path: str = ""
    limit: int = 0


@dataclasses.dataclass(frozen=True)
class PretrainJob:
    """Settings of a run. See `docs/pretrain.md`.

    Attributes:
        model: "style", "attention", and plain fields of `gpt.Config`.
        experts: fields of `moe.Experts`, or empty.
        data: corpus.
        optimizer: "name", "learning_rate", and arguments of the optimizer.
        schedule: learning rate over the steps.
        train: steps.
        mesh: sizes of the axes "dp", "tp", "sp" and "pp". -1 is all other ranks.
        checkpoints: checkpoints.
        evaluation: evaluations.
    """

    model: Mapping[str, Any]
    experts: Mapping[str, Any]
    data: DataTable
    optimizer: Mapping[str, Any]
    schedule: ScheduleTable
    train: TrainTable
    mesh: Mapping[str, int]
    checkpoints: CheckpointsTable
    evaluation: EvaluationTable

    @property
    def shape(self) -> dict[str, int]:
        """Returns the sizes of the axes, with `-1` filled in."""
        return fill_shape(self.mesh)

    def config(self, vocab_size: int) -> gpt.Config:
        """Returns the model's config."""
        given = dict(self.model)
        style, attention = given.pop("style"), given.pop("attention")
        given |= {"vocab_size": vocab_size, "max_len": self.data.length, "stacked": self.shape.get("pp", 1) > 1}
        given["per_head"] = self.shape.get("tp", 1) > 1  # tp then cuts between heads, for any number of heads
        experts = moe.Experts(**_tuples(self.experts)) if self.experts else None
        return STYLES[style](**given, attention=ATTENTION[attention](self.data.length), experts=experts)

    def files(self, name: str) -> list[str]:
        """Returns the paths of a source, in order."""
        given = self.data.sources[name]["files"]
        if given == "stdlib":
            return [str(path) for path in default_corpus()]
        patterns = [given] if isinstance(given, str) else list(given)
        return [path for pattern in patterns for path in (sorted(glob.glob(pattern, recursive=True)) or [pattern])]


_TABLES: dict[str, type] = {
    "data": DataTable,
    "schedule": ScheduleTable,
    "train": TrainTable,
    "checkpoints": CheckpointsTable,
    "evaluation": EvaluationTable,
}
_NAMES = ("model", "experts", "optimizer", "mesh", *_TABLES)
_MODEL = {"style": "llama", "attention": "dense", "num_layers": 4, "d_model": 160, "num_heads": 5, "d_ff": None}


def add_pretrain_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `shardfn pretrain`."""
    add = parser.add_argument
    add("config", metavar="RUN.TOML", help="tables model, experts, data, optimizer, schedule, train, mesh, ...")
    add(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="replaces a value of the file, for example --set train.steps=10; may be given several times",
    )
    add("--plan", action="store_true", help="print the estimate of memory and time, and end")


def parse_pretrain(args: argparse.Namespace) -> PretrainJob:
    """Returns the job of a TOML file, with the changes of `--set`.

    Raises:
        ValueError: lists every error of the file, each with its remedy.
        FileNotFoundError: the file is missing.
    """
    path = pathlib.Path(args.config)
    tables = _read_toml(path.read_text(encoding="utf-8"), str(path))
    problems = list[str]()
    for text in args.set:
        name, _, value = text.partition("=")
        table, _, key = name.strip().partition(".")
        try:
            tables.setdefault(table, {})[key] = _read_toml(f"x = {value}", text)["x"]
        except (ValueError, TypeError, KeyError):
            problems.append(f"--set must be TABLE.KEY=VALUE with a value of TOML, got {text}. Quote texts: '\"text\"'.")
    job, found = read_tables(tables)
    problems += found
    core.raise_all(ValueError, f"{path}:", problems or [*_find_problems(job)])
    return job


def _read_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is not valid TOML: {error}.") from error


def read_tables(tables: Mapping[str, Any]) -> tuple[PretrainJob, list[str]]:
    """Returns the job of tables, and what is wrong with their names and types."""
    problems = [
        f"table [{name}] is not known.{core.did_you_mean(name, _NAMES)}" for name in tables if name not in _NAMES
    ]
    problems += [
        f"{name} must be a table, got {value!r}. Write [{name}]."
        for name, value in tables.items()
        if name in _NAMES and not isinstance(value, dict)
    ]
    given = {name: value for name, value in tables.items() if name in _NAMES and isinstance(value, dict)}
    made = {name: kind(**_read_fields(name, kind, given.get(name, {}), problems)) for name, kind in _TABLES.items()}
    model = _MODEL | _read_plain("model", given.get("model", {}), _plain_fields(gpt.Config, _NOT_MODEL), problems)
    experts = _read_plain("experts", given.get("experts", {}), _plain_fields(moe.Experts, _NOT_EXPERTS), problems)
    rule = {"name": "adamw", "learning_rate": 1e-3} | given.get("optimizer", {})
    mesh = {"dp": -1} | _read_plain("mesh", given.get("mesh", {}), dict.fromkeys(_AXES, 1), problems)
    return PretrainJob(model=model, experts=experts, optimizer=rule, mesh=mesh, **made), problems


def _plain_fields(kind: type, left_out: tuple[str, ...]) -> dict[str, Any]:
    """Returns the defaults of the fields that a TOML file can hold."""
    fields = {field.name: field.default for field in dataclasses.fields(kind) if field.name not in left_out}
    return {"style": "", "attention": ""} | fields if kind is gpt.Config else fields


def _read_plain(table: str, given: Mapping[str, Any], known: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    for key in given:
        if key not in known:
            problems.append(f"[{table}] {key} is not known.{core.did_you_mean(key, list(known))}")
    return {key: value for key, value in given.items() if key in known}


def _read_fields(table: str, kind: type, given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Returns the values of a table by the types of a dataclass's defaults."""
    defaults = dataclasses.asdict(kind())
    out = _read_plain(table, given, defaults, problems)
    for key, value in list(out.items()):
        want = type(defaults[key])
        value = float(value) if want is float and type(value) is int else value
        value = tuple(value) if want is tuple and isinstance(value, list) else value
        if type(value) is not want:
            problems.append(f"[{table}] {key} must be of type {want.__name__}, got {value!r}")
            del out[key]
        else:
            out[key] = value
    return out


def _tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


def schedule_of(job: PretrainJob) -> optim.Schedule:
    """Returns the learning rate over the steps."""
    rate, schedule = float(job.optimizer["learning_rate"]), job.schedule
    return make_schedule(schedule.name, rate, schedule.warmup, job.train.steps, schedule.end * rate)


def make_optimizer(job: PretrainJob) -> optim.GradientTransformation:
    """Returns the optimizer with the schedule and the clip."""
    more = {key: value for key, value in job.optimizer.items() if key not in ("name", "learning_rate")}
    return clip_gradients(OPTIMIZERS[job.optimizer["name"]](schedule_of(job), **more), job.train.clip)


def settings_of(job: PretrainJob) -> dict[str, Any]:
    """Returns the settings that a resumed run must not change, as they are in `run.json`."""
    given = {name: value for name, value in dataclasses.asdict(job).items() if name not in _FREE}
    return given | {"train": {key: value for key, value in given["train"].items() if key not in _FREE_TRAIN}}


_FREE = ("mesh", "checkpoints", "evaluation")
_FREE_TRAIN = ("out", "zero", "accumulate", "remat", "jit", "sequence", "log_every", "max_nonfinite")


def _find_problems(job: PretrainJob) -> Iterator[str]:
    for table, name, least in (
        *(("data", name, 1) for name in ("length", "batch", "vocab_size")),
        *(("train", name, 1) for name in ("steps", "accumulate", "log_every", "max_nonfinite")),
        *(("checkpoints", name, 1) for name in ("every", "keep")),
        *(("evaluation", name, 1) for name in ("every", "batches")),
        ("evaluation", "limit", 0),
        ("schedule", "warmup", 0),
    ):
        if (value := getattr(getattr(job, table), name)) < least:
            yield f"[{table}] {name} must be at least {least}, got {value}"
    for table, name, choices in (
        ("data", "tokenizer", ("bytes", "bpe")),
        ("schedule", "name", tuple(SCHEDULES)),
        ("train", "precision", ("fp32", "bf16")),
        ("train", "jit", ("", "graph", "inductor")),
    ):
        if (value := getattr(getattr(job, table), name)) not in choices:
            yield f"[{table}] {name} must be one of {choices}, got {value!r}.{core.did_you_mean(value, choices)}"
    if job.train.zero not in (0, 1, 2, 3):
        yield f"[train] zero must be a stage, 0, 1, 2 or 3, got {job.train.zero}"
    if not 0 < job.data.validation < 1:
        yield f"[data] validation must be above 0 and below 1, got {job.data.validation}"
    yield from _find_source_problems(job.data, job)
    yield from _find_model_problems(job)
    yield from _find_optimizer_problems(job.optimizer)
    yield from _find_mesh_problems(job)


def _find_source_problems(data: DataTable, job: PretrainJob) -> Iterator[str]:
    if not data.sources:
        yield '[data.sources] must have at least one source, for example web = {files = "web/*.txt"}'
    for name, source in data.sources.items():
        if not isinstance(source, dict) or "files" not in source:
            yield f'[data.sources] {name} must be a table such as {{files = "web/*.txt", weight = 2}}, got {source!r}'
            continue
        for key in source:
            if key not in ("files", "weight"):
                yield f"[data.sources] {name}.{key} is not known.{core.did_you_mean(key, ('files', 'weight'))}"
        for path in job.files(name):
            if not os.path.isfile(path):
                yield f"[data.sources] {name}: {path} is not a file, and matches no file"
    weights = [source.get("weight") for source in data.sources.values() if isinstance(source, dict)]
    if None in weights and any(weight is not None for weight in weights):
        yield "[data.sources]: all sources must have a weight, or none"
    if data.ramp:
        known = [field.name for field in dataclasses.fields(BatchRamp)]
        if wrong := sorted({*data.ramp} ^ {*known}):
            yield f"[data.ramp] must have {', '.join(known)}; look at {', '.join(wrong)}"


def _find_model_problems(job: PretrainJob) -> Iterator[str]:
    for name, choices in (("style", STYLES), ("attention", ATTENTION)):
        if (value := job.model[name]) not in choices:
            hint = core.did_you_mean(str(value), choices)
            yield f"[model] {name} must be one of {', '.join(choices)}, got {value!r}.{hint}"
            return
    if job.experts and "num" not in job.experts:
        yield "[experts] must have num, the number of experts"
        return
    if job.experts and job.shape.get("pp", 1) > 1:
        yield "[experts] and [mesh] pp exclude each other in this command. Write the run with sf.pipeline."
    try:
        job.config(job.data.vocab_size)
    except (ValueError, TypeError) as error:
        yield f"[model] {error}"


def _find_optimizer_problems(rule: Mapping[str, Any]) -> Iterator[str]:
    name, rate = rule["name"], rule["learning_rate"]
    if name not in OPTIMIZERS:
        hint = core.did_you_mean(str(name), OPTIMIZERS)
        yield f"[optimizer] name must be one of {', '.join(OPTIMIZERS)}, got {name!r}.{hint}"
        return
    if not isinstance(rate, float | int) or not 0 < rate < math.inf:
        yield f"[optimizer] learning_rate must be above 0 and finite, got {rate!r}"
    known = [*inspect.signature(OPTIMIZERS[name]).parameters]
    for key in rule:
        if key not in ("name", *known):
            yield f"[optimizer] {name} has no argument {key!r}.{core.did_you_mean(key, known)}"


def _find_mesh_problems(job: PretrainJob) -> Iterator[str]:
    sizes = [size for size in job.mesh.values() if size != -1]
    if any(type(size) is not int or size < 1 for size in sizes) or len(job.mesh) - len(sizes) > 1:
        yield f"[mesh] sizes must be at least 1, and one of them may be -1, got {dict(job.mesh)}"
        return
    if math.prod(job.shape.values()) != core.num_launched():
        yield (
            f"[mesh] {dict(job.mesh)} must have as many ranks as the program, {core.num_launched()}. Start it by"
            " torchrun --nproc-per-node N -m shardfn pretrain ..."
        )
    cut = job.shape.get("sp", 1) > 1
    if cut != (job.model["attention"] in ("ulysses", "ring")):
        yield '[mesh] sp and [model] attention = "ulysses" or "ring" need each other'
    if job.shape.get("pp", 1) > 1 and job.train.jit:
        yield f"[train] jit = {job.train.jit!r} and [mesh] pp exclude each other in this command. Remove one of them."


def find_differences(job: PretrainJob, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the settings in which an interrupted run in the same directory differs, as lines."""
    if not steps(pathlib.Path(job.train.out, "checkpoints")):
        return []
    found = list[str]()
    for table, values in now.items():
        old = before.get(table, {})
        found += [
            f"[{table}] {key} was {old.get(key)!r}, and now it is {values.get(key)!r}"
            for key in dict.fromkeys([*old, *values])
            if old.get(key) != values.get(key) and (table, key) != ("train", "steps")
        ]
    return found
