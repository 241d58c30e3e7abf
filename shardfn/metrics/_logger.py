"""Metrics of a run as lines of JSON and as TensorBoard's events; the first rank writes."""

import json
import operator
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from shardfn.core import Mesh, a_kind

from ._floats import to_floats


class Logger:
    """Writes metrics by step to `metrics.jsonl` and, where asked, to TensorBoard events in the same folder.

    The first rank of the mesh writes; on the others nothing happens, and no metric is copied from the device. A line is
    on disk when `write` returns, so that a run that dies leaves all its lines.

    Args:
        folder: where to; made if missing.
        mesh: only its first rank writes; None means that this process writes.
        tensorboard: whether events are written too, for which the package `tensorboard` must be installed.
        start: the step from which a run resumes: lines of later steps are dropped, since those steps are made again. 0
            begins anew.

    Attributes:
        rows: the lines written so far, including those that a resumed run found in the file.

    Raises:
        ModuleNotFoundError: (on the first rank) `tensorboard` is requested, and not installed.

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
        start: int = 0,
    ) -> None:
        # The lines of the file, on the rank that writes; on others it stays empty, and no file is touched.
        self.rows: list[dict[str, float]] = []
        self._writes = mesh is None or mesh.rank == 0
        self._events: Any = None
        if not self._writes:
            return
        out = pathlib.Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        path = out / "metrics.jsonl"
        if start and path.exists():
            self.rows = [row for row in _complete_rows(path) if row["step"] <= start]
        if tensorboard:
            self._events = _events(out, start)
        self._lines = path.open("w", encoding="utf-8")
        self._lines.writelines(json.dumps(row) + "\n" for row in self.rows)
        self._lines.flush()

    def write(self, step: int, *metrics: Mapping[str, Any]) -> dict[str, float]:
        """One line: the number of a step and its metrics, 0-d tensors or numbers, from one mapping or several.

        Returns:
            The line as written; on other ranks than the first an empty dict.

        Raises:
            TypeError: a metric is neither a 0-d tensor nor a number, or `step` is not a number.
        """
        if isinstance(step, Mapping):
            raise TypeError("Logger.write: the step's number comes first: logger.write(step, metrics).")
        for part in metrics:
            if not isinstance(part, Mapping):
                raise TypeError(
                    f"Logger.write takes mappings of metrics, and this is {a_kind(part)}; write"
                    " logger.write(step, {'loss': loss})."
                )
        step = operator.index(step)
        if not self._writes:
            return {}
        row = to_floats({name: x for part in metrics for name, x in part.items()})
        self.rows.append({"step": step, **row})
        self._lines.write(json.dumps(self.rows[-1]) + "\n")
        self._lines.flush()
        if self._events is not None:
            for name, x in row.items():
                self._events.add_scalar(name, x, step)
        return self.rows[-1]

    def close(self) -> None:
        """Ends the files. Closing again does nothing."""
        if self._writes:
            self._lines.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _complete_rows(path: pathlib.Path) -> list[dict[str, float]]:
    """The lines that were written to their end."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _events(out: pathlib.Path, start: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportPrivateImportUsage]
    except ImportError as error:
        raise ModuleNotFoundError(
            "Logger(tensorboard=True) needs the package tensorboard, which is not installed: pip install tensorboard,"
            " or leave it out; metrics.jsonl is written anyway."
        ) from error
    if not start:  # TensorBoard would join two runs in one curve
        for old in out.glob("events.out.tfevents.*"):
            old.unlink()
    # `purge_step` makes TensorBoard hide events of later steps, which a resumed run makes again.
    return SummaryWriter(str(out), purge_step=start + 1 if start else None)
