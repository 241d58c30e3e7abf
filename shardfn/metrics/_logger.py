"""Log of a run: metrics by step, in `metrics.jsonl` and in further sinks. The first rank writes.

`Sink`: a place for the rows of a run, and delivery to the place. A sink that fails does not stop the run.

Sinks of files: `metrics.jsonl`, `metrics.csv` and TensorBoard's events.

Files only grow: a write adds all its bytes or leaves no trace, and earlier bytes stay.
"""

import contextlib
import csv
import dataclasses
import importlib
import io
import json
import logging
import operator
import os
import pathlib
import re
import socket
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from shardfn.core import Mesh, a_kind, raise_all

from ._values import to_floats

_LOG = logging.getLogger("shardfn.metrics")
# After a failure rows wait for 1, 2, 4, ... further writes, up to this many, so that a slow failure costs little.
_LONGEST_WAIT = 256


class Sink(Protocol):
    """Place for the rows of a run, such as a file or a tracking service. Any object with these three methods is a sink.

    `Logger` only calls a sink on the first rank. An error of `open` stops the run before the first step. An error of
    `write` or `close` does not: the row is passed again later.

    Example:
        >>> class Printer:
        ...     def open(self, folder, start):
        ...         pass
        ...     def write(self, step, row):
        ...         print(step, row)
        ...     def close(self):
        ...         pass
        >>> import tempfile
        >>> from shardfn.metrics import Logger
        >>> with Logger(tempfile.mkdtemp(), sinks=[Printer()]) as logger:
        ...     _ = logger.write(1, {"loss": 0.5})
        1 {'loss': 0.5}
    """

    def open(self, folder: pathlib.Path, start: int) -> None:
        """Opens the sink for a new or a resumed run.

        Args:
            folder: folder of the logger. The folder exists.
            start: step from which a run resumes, and 0 for a new run. Rows of later steps will come again.
        """
        ...

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Takes the metrics of a step. A step may have several rows."""
        ...

    def close(self) -> None:
        """Ends. No row comes afterwards."""
        ...


class Delivery:
    """Passes the rows of a list to a sink, in order. Rows that the sink refuses are passed again later.

    Args:
        sink: sink, open.
        done: number of rows that the sink already has.
    """

    def __init__(self, sink: Sink, done: int) -> None:
        self._sink, self._done = sink, done
        # No attempt is made before the list has this many rows.
        self._next, self._wait, self._warned = 0, 1, False

    def send(self, rows: Sequence[Mapping[str, float]], *, now: bool = False) -> None:
        """Passes all rows that the sink lacks. `now`: also shortly after a failure."""
        if len(rows) < self._next and not now:
            return
        try:
            while self._done < len(rows):
                row = dict(rows[self._done])
                self._sink.write(int(row.pop("step")), row)
                self._done += 1
            self._wait = 1
        except Exception as error:
            self._next, self._wait = len(rows) + self._wait, min(2 * self._wait, _LONGEST_WAIT)
            self._note_failure(f"could not write step {rows[self._done]['step']}", error)

    def close(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Passes the remaining rows, and closes the sink."""
        self.send(rows, now=True)
        if self._done < len(rows):
            _LOG.error("%s lacks the last %d rows", type(self._sink).__name__, len(rows) - self._done)
        try:
            self._sink.close()
        except Exception as error:
            self._note_failure("could not be closed", error)

    def _note_failure(self, event: str, error: Exception) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"Logger: {type(self._sink).__name__} {event} ({type(error).__name__}: {error}). Training continues, other"
            " sinks are not affected, and the row is given to it again later. This is its only warning.",
            stacklevel=4,
        )


def check_sinks(sinks: Sequence[Any]) -> None:
    """Raises if a value is not a sink. The message lists all such values.

    Raises:
        TypeError: a value is not a sink. The message has the remedy.
    """
    problems = []
    for i, sink in enumerate(sinks):
        lacks = [name for name in ("open", "write", "close") if not callable(getattr(sink, name, None))]
        if isinstance(sink, type):
            problems.append(f"sinks[{i}] is the class {sink.__name__}; make one: {sink.__name__}()")
        elif lacks:
            problems.append(f"sinks[{i}], {a_kind(sink)}, lacks {', '.join(lacks)}")
    raise_all(
        TypeError, "Logger(sinks=) takes objects with open(folder, start), write(step, row) and close():", problems
    )


def package(name: str, needs: str, *parts: str) -> list[ModuleType]:
    """Imports modules of a package that is not required.

    Args:
        name: name for pip.
        needs: user's call that needs the package.
        *parts: modules. Without any, the package.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    try:
        return [importlib.import_module(part) for part in parts or (name,)]
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{needs} needs the package {name}, which cannot be imported ({error}): pip install {name}, or"
            " leave the sink out. metrics.jsonl is written anyway."
        ) from error


class GrowingFile:
    """File that is written at the end, without a buffer.

    Args:
        path: path of the file, made if missing.
        size: number of bytes of the file that are kept.
    """

    def __init__(self, path: pathlib.Path, size: int = 0) -> None:
        path.touch()
        self._file = path.open("r+b", buffering=0)
        self._size = size
        self._file.truncate(size)

    def append(self, data: bytes) -> None:
        """Writes bytes at the end.

        Raises:
            OSError: the bytes were not written. The file is as before.
        """
        done = 0
        try:
            self._file.seek(self._size)
            while done < len(data):
                done += self._file.write(data[done:])
        except BaseException:
            self._file.truncate(self._size)
            raise
        self._size += done

    def close(self) -> None:
        """Closes the file. Closing again does nothing."""
        self._file.close()


def resumed_lines(path: pathlib.Path, keep: Callable[[str], bool]) -> tuple[list[str], GrowingFile]:
    """Returns the complete lines of a file that are to be kept, and the file, opened at the end.

    Usually kept lines are the first lines, and the file is cut. A cut needs no room, so a full disk loses no line.
    """
    text = path.read_bytes() if path.exists() else b""
    lines = [line.decode() for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
    kept = [line for line in lines if keep(line)]
    data = "".join(kept).encode()
    if not text.startswith(data):
        replace_text(path, kept)
    return kept, GrowingFile(path, len(data))


def replace_text(path: pathlib.Path, lines: Iterable[str]) -> None:
    """Replaces a file by these lines. After an error the file is unchanged."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_bytes("".join(lines).encode())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


class JSONFile:
    """Writes `metrics.jsonl`. A `Logger` always has this sink.

    Attributes:
        rows: rows that a resumed run found in the file.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._file: GrowingFile | None = None

    def open(self, folder: pathlib.Path, start: int) -> None:
        """Opens the file, and drops rows of later steps than `start`."""
        path, keep = folder / "metrics.jsonl", lambda line: start > 0 and json.loads(line)["step"] <= start
        lines, self._file = resumed_lines(path, keep)
        self.rows = [json.loads(line) for line in lines]

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Writes the metrics of a step as a line."""
        assert self._file is not None
        self._file.append((json.dumps({"step": step, **row}) + "\n").encode())

    def close(self) -> None:
        """Closes the file."""
        assert self._file is not None
        self._file.close()


class CSV:
    """Writes `metrics.csv` in the logger's folder: a line for each row, a column for each metric.

    A metric that appears later becomes a further column, and earlier lines have an empty cell there.

    Example:
        >>> import tempfile
        >>> from shardfn.metrics import Logger
        >>> folder = tempfile.mkdtemp()
        >>> with Logger(folder, sinks=[CSV()]) as logger:
        ...     _ = logger.write(1, {"loss": 0.5})
        ...     _ = logger.write(2, {"loss": 0.25, "validation_loss": 0.75})
        >>> print(pathlib.Path(folder, "metrics.csv").read_text(), end="")
        step,loss,validation_loss
        1,0.5,
        2,0.25,0.75
    """

    def __init__(self) -> None:
        self._columns: list[str] = []
        self._path = pathlib.Path()
        self._file: GrowingFile | None = None

    def open(self, folder: pathlib.Path, start: int) -> None:
        """Opens the file, and drops rows of later steps than `start`."""
        self._path = folder / "metrics.csv"

        def keep_line(line: str) -> bool:
            first = _parse_cells(line)[0]
            return start > 0 and (first == "step" or int(first) <= start)

        lines, self._file = resumed_lines(self._path, keep_line)
        self._columns = _parse_cells(lines[0]) if lines else []

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Writes a line. Before it, where a metric is new, all lines with a further column."""
        assert self._file is not None
        cells = {"step": step, **row}
        new = [name for name in cells if name not in self._columns]
        if new:
            self._add_columns([*self._columns, *new])
        self._file.append(_format_line([cells.get(name, "") for name in self._columns]).encode())

    def close(self) -> None:
        """Closes the file."""
        assert self._file is not None
        self._file.close()

    def _add_columns(self, columns: list[str]) -> None:
        assert self._file is not None
        rows = [_parse_cells(line) for line in self._path.read_text(encoding="utf-8").splitlines()][1:]
        replace_text(self._path, _format_lines(columns, ([*row, *[""] * (len(columns) - len(row))] for row in rows)))
        wider = GrowingFile(self._path, self._path.stat().st_size)
        self._file.close()
        self._file, self._columns = wider, columns


def _format_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    return [_format_line(columns), *map(_format_line, rows)]


def _format_line(cells: Sequence[Any]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def _parse_cells(line: str) -> list[str]:
    return next(csv.reader([line]))


_PARTS = ("tensorboard.compat.proto.event_pb2", "tensorboard.compat.proto.summary_pb2")


class TensorBoard:
    """Writes TensorBoard's events in the logger's folder. `tensorboard --logdir` shows the events.

    Events are on disk when `Logger.write` returns. No event waits in a thread, where an error would go unseen.

    Raises:
        ModuleNotFoundError: (when a logger opens the sink) the package `tensorboard` is not installed.
    """

    def __init__(self) -> None:
        self._event: Any = None
        self._summary: Any = None
        self._crc: Any = None
        self._file: GrowingFile | None = None

    def open(self, folder: pathlib.Path, start: int) -> None:
        """Opens a new file. A new run removes the events there. A resumed run makes TensorBoard hide later events."""
        event, summary, records = package(
            "tensorboard", "TensorBoard()", *_PARTS, "tensorboard.summary.writer.record_writer"
        )
        self._event, self._summary, self._crc = event.Event, summary.Summary, records.masked_crc32c
        self._session = event.SessionLog
        if not start:  # TensorBoard would join two runs in one curve
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = GrowingFile(folder / name)
        begin = {"step": start + 1} if start else {}
        records_ = [self._event(wall_time=time.time(), file_version="brain.Event:2", **begin)]
        if start:
            again = self._session(status=self._session.START)
            records_.append(self._event(wall_time=time.time(), session_log=again, **begin))
        self._append_records(records_)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Writes an event for each metric."""
        now = time.time()
        values = [self._summary(value=[self._summary.Value(tag=name, simple_value=x)]) for name, x in row.items()]
        self._append_records([self._event(wall_time=now, step=step, summary=x) for x in values])

    def close(self) -> None:
        """Closes the file."""
        assert self._file is not None
        self._file.close()

    def _append_records(self, events: list[Any]) -> None:
        """Writes records: length, checksum of the length, bytes, checksum of the bytes."""
        assert self._file is not None
        out = []
        for data in (x.SerializeToString() for x in events):
            length = struct.pack("<Q", len(data))
            sums = (struct.pack("<I", self._crc(x)) for x in (length, data))
            out += [length, next(sums), data, next(sums)]
        self._file.append(b"".join(out))


@dataclasses.dataclass
class _RunId:
    """Id of a run, None before a run begins."""

    value: str | None


@contextlib.contextmanager
def _stored_id(path: pathlib.Path, start: int) -> Iterator[_RunId]:
    """Yields the id in a file, for a run that resumes. When the body ends, the new id is in the file."""
    had = path.read_text(encoding="utf-8").strip() if start and path.exists() else ""
    known = _RunId(had or None)
    yield known
    if known.value is not None and known.value != had:
        path.write_text(f"{known.value}\n", encoding="utf-8")


class WandB:
    """Logs to a run of Weights & Biases that begins and ends with the logger.

    A run that resumes continues in the same run: the id is in `wandb_run` in the logger's folder. Curves are drawn over
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
        """Begins a run, or continues with the run that the folder names."""
        (wandb,) = package("wandb", "WandB()")
        given = {"dir": str(folder)} | self._init
        with _stored_id(folder / "wandb_run", start) as known:
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

    A run that resumes continues in the same run: the id is in `mlflow_run` in the logger's folder. In names of metrics,
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
        """Begins a run, or continues with the run that the folder names."""
        mlflow, entities = package("mlflow", "MLflow()", "mlflow", "mlflow.entities")
        self._client, self._metric = mlflow.MlflowClient(self._uri), entities.Metric
        with _stored_id(folder / "mlflow_run", start) as known:
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


class Logger:
    """Writes metrics by step to `metrics.jsonl` and to other sinks, such as CSV, TensorBoard, Weights & Biases, MLflow.

    The first rank of the mesh writes. On other ranks nothing happens, and no metric is copied from the device. A line
    is on disk when `write` returns, so that a run that dies leaves all lines.

    A sink that raises while the run continues, such as a sink on a full disk, does not stop the run. There is a single
    warning, rows that the sink lacks are passed again later, and earlier rows stay.

    Args:
        folder: folder for the files, made if missing.
        mesh: mesh. The first rank writes. None means that this process writes.
        tensorboard: short for a `TensorBoard()` among the sinks.
        sinks: further places, each a `Sink`.
        start: step from which a run resumes. Rows of later steps are dropped, since the run makes these steps again. 0
            begins a new log.

    Attributes:
        rows: rows written so far, including rows that a resumed run found in the file.

    Raises:
        ModuleNotFoundError: (on the first rank) a sink's package is not installed.
        TypeError: a value of `sinks` is not a sink.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> with Logger(folder) as logger:
        ...     _ = logger.write(1, {"loss": torch.tensor(0.5)})
        >>> print(pathlib.Path(folder, "metrics.jsonl").read_text(), end="")
        {"step": 1, "loss": 0.5}
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        mesh: Mesh | None = None,
        *,
        tensorboard: bool = False,
        sinks: Sequence[Sink] = (),
        start: int = 0,
    ) -> None:
        check_sinks(sinks)
        # On ranks that do not write the list stays empty, and no file is touched.
        self.rows: list[dict[str, float]] = []
        self._deliveries: list[Delivery] = []
        self._writes = mesh is None or mesh.rank == 0
        if not self._writes:
            return
        out, lines = pathlib.Path(folder), JSONFile()
        out.mkdir(parents=True, exist_ok=True)
        try:
            for sink in (lines, *([TensorBoard()] if tensorboard else []), *sinks):
                sink.open(out, start)
                self._deliveries.append(Delivery(sink, len(lines.rows)))
        except BaseException:
            self.close()
            raise
        self.rows = lines.rows

    def write(self, step: int, *metrics: Mapping[str, Any]) -> dict[str, float]:
        """Writes a row: the number of a step and metrics, 0-d tensors or numbers, from a single mapping or several.

        Returns:
            The row as written. On ranks other than the first an empty dict.

        Raises:
            TypeError: a metric is neither a 0-d tensor nor a number, or `step` is not a number.
            ValueError: the logger is closed.
        """
        if isinstance(step, Mapping):
            raise TypeError("Logger.write: the step's number must come first: logger.write(step, metrics).")
        for part in metrics:
            if not isinstance(part, Mapping):
                raise TypeError(
                    f"Logger.write expected mappings of metrics, got {a_kind(part)}. Write"
                    f" logger.write(step, {{'loss': loss}})."
                )
        step = operator.index(step)
        if not self._writes:
            return {}
        if not self._deliveries:
            raise ValueError(
                "Logger.write was called after the logger was closed. Write inside of its `with`, or before `close`."
            )
        self.rows.append({"step": step, **to_floats({name: x for part in metrics for name, x in part.items()})})
        for delivery in self._deliveries:
            delivery.send(self.rows)
        return self.rows[-1]

    def close(self) -> None:
        """Passes rows that are missing to sinks, and ends the sinks. Closing again does nothing."""
        while self._deliveries:
            self._deliveries.pop(0).close(self.rows)

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
