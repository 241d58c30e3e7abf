"""The settings of `shardfn finetune`: from the command line and a TOML file, checked before anything is loaded."""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import tomllib
from collections.abc import Iterator
from typing import Any

from shardfn import core
from shardfn.checkpoint import steps
from shardfn.data import LEARN

from ._finetune_rows import row_problems, scan_rows
from ._training import SCHEDULES, fill_shape

_AXES = ("dp", "tp")
_HELP = {
    "out": "directory for metrics, checkpoints and the result; the same command continues there",
    "validation": "JSON lines for the validation loss; the checkpoint with the lowest one is kept, and is the result",
    "steps": "optimizer steps",
    "every": "steps between checkpoints, and between validations",
    "batch": "examples a step, over all ranks",
    "length": "tokens an example; longer ones are cut",
    "accumulate": "microbatches a step",
    "lr": "learning rate, after a warmup of a tenth of the steps",
    "weight_decay": "of AdamW",
    "schedule": "cosine, linear or constant, after the warmup",
    "warmup": "steps until the whole learning rate; -1 for a tenth of the steps",
    "clip": "bound of the norm of the gradient; 0 for none",
    "patience": "validations without a lower loss after which the run ends; 0 for none",
    "loggers": "further logs, as in csv,tensorboard,wandb,mlflow",
    "eval_tasks": "tasks of lm-evaluation-harness for the result, as in arc_easy,hellaswag",
    "seed": "of the order of examples and of the adapters",
    "lora": "rank of adapters; 0 trains all weights",
    "lora_alpha": "their scale is alpha / rank; 0 takes the rank",
    "lora_target": "parts of names of layers with adapters, as in q_proj,v_proj (default: all linear layers)",
    "lora_rank_pattern": "other ranks of some layers, as in q_proj=16,v_proj=4",
    "lora_dropout": "probability with which an input of an adapter is dropped",
    "quantization": "int8 or int4 quantizes the weights that have an adapter (QLoRA)",
    "merge": "also write the model with the adapters added",
    "learn": "answers: only completions, and messages of the assistant; everything: all tokens",
    "dtype": "float32, bfloat16 or float16 for the written model (default: the dtypes of MODEL's files)",
    "log_every": "steps between lines with the loss, where stderr is not a terminal",
    "max_nonfinite": "steps in a row without a finite loss and gradient after which the run ends; they are skipped",
    "mesh": "dp=4, or dp=2,tp=2: axis sizes; -1 for the ranks that are left",
    "zero": "stage 0, 1, 2 or 3",
    "precision": "bf16 with float32 master copies, or fp32",
    "remat": "compute each block again in the backward",
    "cluster": "device of the estimate (default: the one that is here)",
}


@dataclasses.dataclass(frozen=True)
class FinetuneJob:
    """Settings of a run. See `shardfn finetune --help`."""

    model: str
    train: tuple[str, ...]
    validation: str = ""
    out: str = "runs/finetune"
    steps: int = 100
    every: int = 20
    batch: int = 8
    length: int = 512
    accumulate: int = 1
    lr: float = 1e-4
    weight_decay: float = 0.0
    schedule: str = "cosine"
    warmup: int = -1
    clip: float = 1.0
    patience: int = 0
    loggers: str = ""
    eval_tasks: str = ""
    seed: int = 0
    lora: int = 0
    lora_alpha: float = 0.0
    lora_target: str = ""
    lora_rank_pattern: str = ""
    lora_dropout: float = 0.0
    quantization: str = ""
    merge: bool = False
    learn: str = "answers"
    dtype: str = ""
    log_every: int = 10
    max_nonfinite: int = 3
    mesh: str = "dp=-1"
    zero: int = 3
    precision: str = "bf16"
    remat: bool = False
    cluster: str = ""

    @property
    def sources(self) -> dict[str, float | None]:
        """Returns the weight of each file of TRAIN, or None without a weight."""
        return dict(map(_parse_source, self.train))

    @property
    def shape(self) -> dict[str, int]:
        """Returns the sizes of the axes, with `-1` filled in."""
        return fill_shape({"dp": 1} | dict(_parse_sizes(self.mesh)))


# These settings change no number of the run, and a resumed run may change them.
_FREE = (
    *("out", "merge", "cluster", "mesh", "every", "validation", "dtype", "log_every", "max_nonfinite"),
    *("patience", "loggers", "eval_tasks"),
)
LOGGERS = ("csv", "tensorboard", "wandb", "mlflow")
_DTYPES = ("float32", "bfloat16", "float16")


def add_finetune_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `shardfn finetune`."""
    parser.add_argument(
        "model", metavar="MODEL", help="directory of a causal model of transformers, with its tokenizer"
    )
    parser.add_argument(
        "train",
        metavar="TRAIN",
        nargs="+",
        help='JSON lines: {"text"}, {"prompt", "completion"} or {"messages"}. Several files are mixed, by their sizes'
        " or by weights as in a.jsonl:2 b.jsonl:1",
    )
    parser.add_argument("--config", help="a TOML file with any of these options; the command line goes first")
    for field in dataclasses.fields(FinetuneJob)[2:]:
        name, text = f"--{field.name.replace('_', '-')}", f"{_HELP[field.name]} (default {field.default!r})"
        # Suppressed: only given options are present, and go before options of the file.
        if field.type is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            kind: Any = field.type
            parser.add_argument(name, type=kind, default=argparse.SUPPRESS, help=text, metavar=field.name.upper())


def parse_job(args: argparse.Namespace) -> FinetuneJob:
    """Returns the job that the arguments and the file of `--config` describe. No file of the model is loaded.

    Raises:
        ValueError: lists every error, each with its remedy.
        FileNotFoundError: the file of options is missing.
    """
    names = [field.name for field in dataclasses.fields(FinetuneJob)]
    given: dict[str, Any] = {name: value for name, value in vars(args).items() if name in names}
    given["train"] = tuple(args.train)
    job = FinetuneJob(**(_read_settings(args.config) | given))
    core.raise_all(ValueError, "this run cannot start:", [*_find_problems(job)])
    return job


def _read_settings(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        settings = tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"--config must be a TOML file, got {path}: {error}.") from error
    fields = {field.name: field for field in dataclasses.fields(FinetuneJob)[2:]}
    problems, out = [], {}
    for key, value in settings.items():
        name = key.replace("-", "_")
        kind: Any = fields[name].type if name in fields else None
        if kind is None:
            problems.append(f"{key!r} is not an option.{core.did_you_mean(name, list(fields))}")
        elif type(value) is not kind and not (kind is float and type(value) is int):
            problems.append(f"{key} = {value!r} is of type {type(value).__name__}; write a {kind.__name__}")
        else:
            out[name] = kind(value)
    core.raise_all(ValueError, f"--config {path}:", problems)
    return out


def _find_problems(job: FinetuneJob) -> Iterator[str]:
    if importlib.util.find_spec("transformers") is None:
        yield "transformers is not installed: pip install 'shardfn[hf]'"
    yield from _wrong_model(pathlib.Path(job.model))
    yield from _wrong_rows(job)
    for name in ("steps", "every", "batch", "length", "accumulate", "log_every", "max_nonfinite"):
        if getattr(job, name) < 1:
            yield f"--{name.replace('_', '-')} must be at least 1, got {getattr(job, name)}"
    if not 0 < job.lr < math.inf:
        yield f"--lr must be above 0, and finite, got {job.lr}"
    for name in ("weight_decay", "lora_alpha", "clip"):
        if not 0 <= getattr(job, name) < math.inf:
            yield f"--{name.replace('_', '-')} must be 0 or more, and finite, got {getattr(job, name)}"
    if job.lora < 0:
        yield f"--lora {job.lora}: the rank is 1 or more, or 0 for no adapters"
    yield from _find_option_problems(job)
    for name in ("lora_alpha", "lora_target", "lora_rank_pattern", "lora_dropout", "quantization", "merge"):
        if not job.lora and getattr(job, name):
            yield f"--{name.replace('_', '-')} has no effect without --lora RANK"
    if job.quantization and job.quantization not in core.GROUP_BYTES:
        near = core.did_you_mean(job.quantization, core.GROUP_BYTES)
        yield f"--quantization {job.quantization}: it must be int8 or int4.{near}"
    if job.dtype and job.dtype not in _DTYPES:
        yield f"--dtype {job.dtype}: it is {', '.join(_DTYPES)}.{core.did_you_mean(job.dtype, _DTYPES)}"
    if job.zero not in (0, 1, 2, 3):
        yield f"--zero {job.zero}: a stage is 0, 1, 2 or 3"
    if job.precision not in ("bf16", "fp32"):
        yield f"--precision {job.precision}: it is bf16 or fp32.{core.did_you_mean(job.precision, ('bf16', 'fp32'))}"
    yield from _wrong_mesh(job)
    yield from _find_differences(job)


def _find_option_problems(job: FinetuneJob) -> Iterator[str]:
    if job.schedule not in SCHEDULES:
        hint = core.did_you_mean(job.schedule, SCHEDULES)
        yield f"--schedule must be {', '.join(SCHEDULES)}, got {job.schedule!r}.{hint}"
    if job.warmup < -1:
        yield f"--warmup must be at least 0, or -1 for a tenth of the steps, got {job.warmup}"
    if job.patience < 0 or (job.patience and not job.validation):
        yield f"--patience must be at least 0, and above 0 it needs --validation, got {job.patience}"
    if not 0 <= job.lora_dropout < 1:
        yield f"--lora-dropout must be at least 0 and below 1, got {job.lora_dropout}"
    for name in split_names(job.loggers):
        if name not in LOGGERS:
            yield f"--loggers must be names of {', '.join(LOGGERS)}, got {name!r}.{core.did_you_mean(name, LOGGERS)}"
    for item in split_names(job.lora_rank_pattern):
        part, _, rank = item.partition("=")
        if not part or not rank.isdecimal() or int(rank) < 1:
            yield f"--lora-rank-pattern must be as in q_proj=16,v_proj=4, got {item!r}"
    if job.eval_tasks and job.lora and not job.merge:
        yield "--eval-tasks needs the whole model as a result: pass --merge, too"
    if job.eval_tasks and importlib.util.find_spec("lm_eval") is None:
        yield "--eval-tasks needs lm-eval, which is not installed: pip install 'shardfn[eval]'"


def split_names(text: str) -> list[str]:
    """Returns the names of a text with commas."""
    return [name for name in map(str.strip, text.split(",")) if name]


def _wrong_model(path: pathlib.Path) -> Iterator[str]:
    if not path.is_dir():
        if path.exists():
            yield f"MODEL {path} is a file. Pass the directory that it is in"
            return
        yield f"MODEL {path} is not a directory; fetch one first: hf download {path} --local-dir {path.name}"
        return
    for names, what in (
        (("config.json",), "a model of transformers"),
        (("model.safetensors", "model.safetensors.index.json"), "weights in safetensors: save_pretrained writes them"),
        (("tokenizer.json", "tokenizer_config.json"), "a tokenizer: tokenizer.save_pretrained(MODEL) writes it"),
    ):
        if not any((path / name).is_file() for name in names):
            yield f"MODEL {path} has no {' or '.join(names)}: it needs {what}"


def _wrong_rows(job: FinetuneJob) -> Iterator[str]:
    if job.learn not in LEARN:
        yield f"--learn {job.learn}: it is {' or '.join(LEARN)}.{core.did_you_mean(job.learn, LEARN)}"
        return
    for name, path in (*(("TRAIN", path) for path in job.sources), ("--validation", job.validation)):
        if name == "TRAIN" or path:
            yield from (
                row_problems(name, path, job.learn) if os.path.isfile(path) else (f"{name} {path} is not a file",)
            )
    weights = job.sources.values()
    if len(weights) < len(job.train):
        yield f"each file of TRAIN must be given once, got {' '.join(job.train)}"
    if None in weights and any(weight is not None for weight in weights):
        yield f"all files of TRAIN must have a weight, or none, got {' '.join(job.train)}; write for example a.jsonl:2"
    for path, weight in job.sources.items():
        if weight is not None and not 0 < weight < math.inf:
            yield f"TRAIN {path}:{weight:g}: the weight must be above 0, and finite"


def _parse_source(text: str) -> tuple[str, float | None]:
    path, colon, weight = text.rpartition(":")
    if not colon or os.path.isfile(text):
        return text, None
    try:
        return path, float(weight)
    except ValueError:
        return text, None


def _wrong_mesh(job: FinetuneJob) -> Iterator[str]:
    sizes, world, before = _parse_sizes(job.mesh), core.num_launched(), True
    for axis, size in sizes:
        if axis not in _AXES:
            before = False
            yield f"--mesh {job.mesh}: axis {axis!r} is not one of {', '.join(_AXES)}.{core.did_you_mean(axis, _AXES)}"
        elif size is None or (size < 1 and size != -1):
            before = False
            yield f"--mesh {job.mesh}: {axis} needs a size, as in {axis}=2; or -1 for the ranks that are left"
    if not before or len({axis for axis, _ in sizes}) < len(sizes):
        yield from () if not before else (f"--mesh {job.mesh}: an axis is given twice",)
        return
    needed = 1
    for size in job.shape.values():
        needed *= size
    if needed != world or min(job.shape.values()) < 1:
        start = f"torchrun --nproc-per-node {max(needed, 1)} -m shardfn finetune ..."
        yield f"--mesh {job.mesh} takes {max(needed, 1)} ranks, and there are {world}; start it by {start}"
    if 1 < job.accumulate and job.batch < job.accumulate * job.shape["dp"]:
        yield (
            f"--accumulate {job.accumulate}: {job.accumulate} microbatches on dp={job.shape['dp']} need as many rows on"
            f" each rank, and --batch has {job.batch}. Pass a --batch of {job.accumulate * job.shape['dp']} or more"
        )
    if job.remat and job.shape.get("tp", 1) > 1:
        yield f"--remat is for a mesh without tp, and this one is {job.mesh}"


def _find_differences(job: FinetuneJob) -> Iterator[str]:
    """Yields the settings in which an interrupted run in the same directory differs."""
    record = pathlib.Path(job.out, "run.json")
    if not record.is_file() or not steps(pathlib.Path(job.out, "checkpoints")):
        return
    before = json.loads(record.read_text(encoding="utf-8"))
    if "codes" in before:  # its name in runs of earlier versions
        before["quantization"] = before.pop("codes")
    if (
        "learn" not in before
        and job.learn == "answers"
        and any(scan_rows(path, "answers").chats for path in job.sources if os.path.isfile(path))
    ):
        yield (
            f"--out {job.out} has a run of an earlier version, which learnt all tokens of messages: pass --learn"
            f" everything to go"
            " on, or another --out"
        )
    for name, value in settings(job).items():
        if name in before and before[name] != value:
            yield (
                f"--out {job.out} has a run with {name}={before[name]!r}, and now it is {value!r}: pass the same to go"
                " on, or another --out"
            )


def settings(job: FinetuneJob) -> dict[str, Any]:
    """Returns the settings that a resumed run must not change, as they are in `run.json`."""
    train = job.train[0] if len(job.train) == 1 else list(job.train)
    found = dataclasses.asdict(job) | {"train": train}
    return {name: value for name, value in found.items() if name not in _FREE}


def _parse_sizes(text: str) -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for item in filter(None, (i.strip() for i in text.split(","))):
        axis, _, size = (part.strip() for part in item.partition("="))
        out.append((axis, int(size) if size.removeprefix("-").isdecimal() else None))
    return out
