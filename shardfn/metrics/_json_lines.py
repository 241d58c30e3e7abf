"""The sink of `metrics.jsonl`: a line of JSON for each row."""

import json
import pathlib
from collections.abc import Mapping

from ._lines import GrowingFile, resumed_lines


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
        """Writes a line."""
        assert self._file is not None
        self._file.append((json.dumps({"step": step, **row}) + "\n").encode())

    def close(self) -> None:
        """Closes the file."""
        assert self._file is not None
        self._file.close()
