"""Pieces of a run that `shardfn finetune` and `shardfn pretrain` have in common."""

import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardfn import core, optim
from shardfn.pretrained import EVAL_RUNNING, LLM, evaluate_tasks

from ._plan import plan
from ._report import plan_text
from ._states import Setup

SCHEDULES: dict[str, Callable[..., optim.Schedule]] = {
    "cosine": optim.warmup_cosine_decay_schedule,
    "linear": optim.warmup_linear_decay_schedule,
    "constant": lambda first, rate, warmup, *_: optim.warmup_constant_schedule(first, rate, warmup),
}
_SHOWN = {"loss": ".4f", "validation_loss": ".4f", "grad_norm": ".3g", "learning_rate": ".3g", "tokens_per_s": ",.0f"}


def fill_shape(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes of the mesh's axes, with all other ranks of the program in place of -1.

    Example:
        >>> fill_shape({"dp": -1, "tp": 1})
        {'dp': 1, 'tp': 1}
    """
    known = math.prod(max(size, 1) for size in sizes.values())
    return {axis: core.num_launched() // known if size == -1 else size for axis, size in sizes.items()}


def make_schedule(name: str, rate: float, warmup: int, steps: int, end: float = 0.0) -> optim.Schedule:
    """Returns the learning rate over the steps.

    Args:
        name: key of `SCHEDULES`, for the steps after the warmup.
        rate: highest learning rate.
        warmup: steps until the highest rate.
        steps: steps of the run.
        end: last rate of a decay.
    """
    if name == "constant" and not warmup:
        return optim.constant_schedule(rate)
    return SCHEDULES[name](0.0, rate, warmup, max(steps, warmup + 1), end)


def clip_gradients(rule: optim.GradientTransformation, bound: float) -> optim.GradientTransformation:
    """Returns an optimizer that first clips the global norm of the gradients. A bound of 0 is no bound."""
    return optim.chain(optim.clip_by_global_norm(bound), rule) if bound else rule


def print_estimate(make_setup: Callable[[], Setup], remark: str = "") -> None:
    """Prints the estimate of `shardfn plan` on the first rank, or the reason for its absence.

    Args:
        make_setup: function that describes the run. Its ValueError is the reason.
        remark: text after an estimate.
    """
    if not core.is_first_launched():
        return
    try:
        print(plan_text(plan(make_setup())) + remark, flush=True)
    except ValueError as error:
        print(f"No estimate before the run: {error}\n", flush=True)


def write_record(path: pathlib.Path, value: Any) -> None:
    """Writes a value as JSON. A reader finds the old file or the whole new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
    partial.replace(path)


def report_step(bar: Any, row: Mapping[str, float], steps: int) -> None:
    """Shows the figures of a step next to the bar, or as a line without a bar. Only the first rank has a row."""
    if not row:
        return
    if not bar.disable:
        bar.set_postfix({name: f"{row[name]:.4f}" for name in ("loss", "validation_loss") if name in row})
        return
    figures = [f"{name} {row[name]:{form}}" for name, form in _SHOWN.items() if name in row]
    skipped = " (not finite: skipped)" if not row.get("finite", 1) else ""
    print(f"step {int(row['step'])} of {steps}: {', '.join(figures)}{skipped}", flush=True)


def move_batch(batch: Mapping[str, torch.Tensor], mesh: core.Mesh) -> dict[str, torch.Tensor]:
    """Returns a batch on the device of the mesh."""
    return {name: x.to(mesh.device, non_blocking=True) for name, x in batch.items()}


def evaluate_result(model: str, out: str, tasks: Iterable[str], mesh: core.Mesh, **options: Any) -> None:
    """Computes tasks of lm-evaluation-harness on the first rank, and writes `tasks.json`. Collective.

    Args:
        model: path of the trained model.
        out: directory of the run.
        tasks: names of the tasks. Nothing happens without a name.
        mesh: mesh of the run.
        **options: arguments of `evaluate_tasks`.
    """
    if not (names := list(tasks)):
        return
    if mesh.rank == 0:
        found = evaluate_tasks(LLM(model, running=EVAL_RUNNING), names, **options)["results"]
        path = pathlib.Path(out, "tasks.json")
        write_record(path, found)
        print(f"{path}: {', '.join(found)}", flush=True)
    if mesh.size > 1:
        dist.barrier()
