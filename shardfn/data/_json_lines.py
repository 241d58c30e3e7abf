"""A file of JSON lines as a map-style dataset that keeps only the places of lines in memory."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ._digest import digest_bytes, sampled_rows


class JSONLines:
    """The lines of a file, each a JSON value, read on access. Blank lines are skipped.

    The file is read once to find the lines, with 8 bytes of memory for each line, and opened again for each read. So a
    `JSONLines` can be copied to other processes.

    Args:
        path: the file, UTF-8.
        encode: function for each value, for example from text to token ids. Default: the identity.

    Raises:
        FileNotFoundError: there is no such file.

    Example:
        >>> import tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "data.jsonl")
        >>> with path.open("w") as file:
        ...     print('{"text": "one"}', '{"text": "three"}', sep=chr(10), file=file)
        >>> lines = JSONLines(path, lambda row: len(row["text"]))
        >>> len(lines), lines[0], lines[-1]
        (2, 3, 5)
    """

    def __init__(self, path: str | os.PathLike[str], encode: Callable[[Any], Any] | None = None) -> None:
        self.path, self._encode = pathlib.Path(path), encode
        starts, at = [], 0
        with self.path.open("rb") as file:
            for line in file:
                if line.strip():
                    starts.append(at)
                at += len(line)
        self._starts = np.array(starts, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        """Returns line `index`, decoded.

        Raises:
            IndexError: there are fewer lines.
            ValueError: the line is not JSON, or `encode` refuses the value. The message names the file and the line.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"the index of {str(self.path)!r} must be below {len(self)}, got {index}.")
        value = self._parse_line(index)
        if self._encode is None:
            return value
        try:
            return self._encode(value)
        except ValueError as error:
            raise ValueError(f"{self.place(index)}: {error}") from error
        except Exception as error:
            error.add_note(f"The row is {self.place(index)}.")
            raise

    def _parse_line(self, index: int) -> Any:
        try:
            return json.loads(self._read_line(index).strip())
        except json.JSONDecodeError as error:
            problem = f"{error.msg} at column {error.colno}"
            raise ValueError(f"{self.place(index)}: expected one JSON value a line, got {problem}.") from error
        except ValueError as error:  # bytes that are not UTF-8
            raise ValueError(f"{self.place(index)}: expected one JSON value a line, got {error}.") from error

    def place(self, index: int) -> str:
        """Returns the file and the number of a line as editors count, from 1 with blank lines: `data.jsonl:7`."""
        before, left = 1, int(self._starts[index])
        with self.path.open("rb") as file:
            while left > 0:
                piece = file.read(min(left, 1 << 20))
                before, left = before + piece.count(b"\n"), left - len(piece)
        return f"{self.path}:{before}"

    def digest(self) -> str:
        """Returns a digest of the lengths of all lines, and of the contents of at most 64 lines at equal distances."""
        lines = (self._read_line(i) for i in sampled_rows(len(self)))
        return digest_bytes([self._starts.tobytes(), *lines])

    def _read_line(self, index: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(int(self._starts[index]))
            return file.readline()
