"""Sinks of tracking services: Weights & Biases, and MLflow.

The id of a run is in a file, so that a run that resumes goes on with the same id.
"""

import contextlib
import dataclasses
import pathlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ._sinks import package


@dataclasses.dataclass
class RunId:
    """Id of a run, None before a run begins."""

    value: str | None


@contextlib.contextmanager
def stored_id(path: pathlib.Path, start: int) -> Iterator[RunId]:
    """Yields the id in a file, for a run that resumes. When the body ends, the new id is in the file."""
    had = path.read_text(encoding="utf-8").strip() if start and path.exists() else ""
    known = RunId(had or None)
    yield known
    if known.value is not None and known.value != had:
        path.write_text(f"{known.value}\n", encoding="utf-8")


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
        """Sends the metrics of a step to the service."""
        self._run.log({"step": step, **row})

    def close(self) -> None:
        """Ends the run of the service, after all rows are sent."""
        self._run.finish()


# Characters that a name of MLflow may not have.
_OTHER = re.compile(r"[^\w\-. :/]", re.ASCII)


class MLflow:
    """Logs to a run of MLflow that begins and ends with the logger.

    A run that resumes goes on in the same run: the id is in `mlflow_run` in the logger's folder. In names of metrics,
    characters that MLflow refuses become underscores.

    Args:
        experiment: name of the experiment, made if missing.
        tracking_uri: address of the server, or such as "sqlite:///runs.db". Default: the address that `mlflow` uses.
        run_name: name of the run.
        params: hyperparameters.
        tags: tags of the run.

    Raises:
        ModuleNotFoundError: (when a logger opens the sink) the package `mlflow` is not installed.

    Example:
        >>> sink = MLflow("gpt", tracking_uri="sqlite:///runs.db", params={"learning_rate": 3e-4})
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._experiment, self._uri, self._name = experiment, tracking_uri, run_name
        self._params, self._tags = dict(params or {}), dict(tags or {})
        self._client: Any = None
        self._metric: Any = None
        self._run = ""

    def open(self, folder: pathlib.Path, start: int) -> None:
        """Begins a run, or goes on with the run that the folder names."""
        mlflow, entities = package("mlflow", "MLflow()", "mlflow", "mlflow.entities")
        self._client, self._metric = mlflow.MlflowClient(self._uri), entities.Metric
        with stored_id(folder / "mlflow_run", start) as known:
            if known.value is None:
                known.value = self._begin_run()
            else:
                self._client.update_run(known.value, status="RUNNING")
            self._run = known.value

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Sends the metrics of a step to the service."""
        now = int(time.time() * 1000)
        metrics = [self._metric(_OTHER.sub("_", name), x, now, step) for name, x in row.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Ends the run of the service, after all rows are sent."""
        self._client.set_terminated(self._run)

    def _begin_run(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        number = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        run = self._client.create_run(number, run_name=self._name, tags=self._tags).info.run_id
        for name, value in self._params.items():
            self._client.log_param(run, name, value)
        return run
