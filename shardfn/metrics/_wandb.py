"""Sink of Weights & Biases."""

import pathlib
from collections.abc import Mapping
from typing import Any

from ._run_id import stored_id
from ._sinks import package


class WandB:
    """Logs to a run of Weights & Biases that begins and ends with the logger.

    A run that resumes goes on in the same run: the id is in `wandb_run` in the logger's folder. Curves are drawn over
    the steps of training, so steps that are made again are drawn twice.

    wandb writes and sends in a separate process. Errors there, such as a full disk, do not arrive here. Rows that wandb
    loses then are only in `metrics.jsonl`.

    Args:
        **init: options as `wandb.init` takes options: `project`, `entity`, `name`, `group`, `tags`, `notes`, `config`
            for the hyperparameters, `mode="offline"` for a machine without network, `id` to choose the run. `dir` is
            the logger's folder if not passed.

    Raises:
        ModuleNotFoundError: (when a logger opens the sink) the package `wandb` is not installed.

    Example:
        >>> sink = WandB(project="gpt", config={"learning_rate": 3e-4}, mode="offline")
    """

    def __init__(self, **init: Any) -> None:
        self._init = init
        self._run: Any = None

    def open(self, folder: pathlib.Path, start: int) -> None:
        """Begins a run, or goes on with the run that the folder names."""
        (wandb,) = package("wandb", "WandB()")
        given = {"dir": str(folder)} | self._init
        with stored_id(folder / "wandb_run", start) as known:
            if known.value is not None and "id" not in given:
                given |= {"id": known.value, "resume": given.get("resume", "allow")}
            self._run = wandb.init(**given)
            known.value = self._run.id
        # wandb's count must grow from call to call. Ours falls where a run resumes.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Logs a row."""
        self._run.log({"step": step, **row})

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()
