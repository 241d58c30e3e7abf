"""A file of JSON lines as a map-style dataset that keeps only the places of lines in memory."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np


class JSONLines:
    """The lines of a file, each a JSON value, read on access; blank ones are left out.

    The file is read once to find the lines, 8 bytes of memory each, and opened anew for each read: so it can be copied
    to other processes.

    Args:
        path: the file, UTF-8.
        encode: applied to each value, such as text to token ids; default the identity.

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
        """Line `index`, decoded.

        Raises:
            IndexError: there are fewer lines.
            ValueError: the line is not JSON; names its number and the file.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"{str(self.path)!r} has {len(self)} lines; there is no line {index}.")
        with self.path.open("rb") as file:
            file.seek(int(self._starts[index]))
            line = file.readline()
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{str(self.path)!r}: line {index} (from 0, blank ones apart) is no JSON: {error}."
            ) from error
        return value if self._encode is None else self._encode(value)
