"""Log of a run: metrics by step, in `metrics.jsonl` and in further sinks. The first rank writes."""

import operator
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from shardfn.core import Mesh, a_kind

from ._sinks import Delivery, JSONFile, Sink, TensorBoard, check_sinks
from ._values import to_floats


class Logger:
    """Writes metrics by step to `metrics.jsonl` and to other sinks, such as CSV, TensorBoard, Weights & Biases, MLflow.

    The first rank of the mesh writes. On other ranks nothing happens, and no metric is copied from the device. A line
    is on disk when `write` returns, so that a run that dies leaves all lines.

    A sink that raises while the run goes on, such as a sink on a full disk, does not stop the run. There is a single
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
        TypeError: a value of `sinks` is no sink.

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
