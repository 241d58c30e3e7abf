"""Files that only grow: a write adds all its bytes or leaves no trace, and earlier bytes stay."""

import os
import pathlib
from collections.abc import Callable, Iterable


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
