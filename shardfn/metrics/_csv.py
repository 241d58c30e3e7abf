"""The sink of `metrics.csv`: a column for each metric."""

import csv
import io
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._lines import GrowingFile, replace_text, resumed_lines


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
