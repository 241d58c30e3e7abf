"""Sources of data: token ids on disk, and files of JSON lines.

Token ids on disk: an array without a header that is memory-mapped, and a small JSON file with a description.

A file of JSON lines as a map-style dataset that keeps only the places of lines in memory.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import sysconfig
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt

from ._permute import digest_bytes, sampled_rows
from ._tokenizers import Tokenizer, checked, read_text

_DTYPES = ("uint8", "uint16", "uint32")


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """Token ids in a file `x.bin`, described by `x.bin.json`. Write a file with `encode_files`, and read with `open`.

    The file is mapped again for each read, so that the pages do not count as this process's memory for long, and a
    `TokenFile` can be copied, hashed and sent to another process.

    Attributes:
        path: the `.bin` file.
        dtype: "uint8", "uint16" or "uint32", the smallest that holds the vocabulary.
        vocab_size: upper bound of ids, exclusive.
        num_tokens: the number of ids.
    """

    path: pathlib.Path
    dtype: str
    vocab_size: int
    num_tokens: int

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "TokenFile":
        """Reads the description of `path`, and checks the size of the file. No id is read.

        Raises:
            FileNotFoundError: the file or the description is missing.
            ValueError: the description is malformed, or the file has another size than described.
        """
        path = pathlib.Path(path)
        for needed in (path, _sidecar_path(path)):
            if not needed.is_file():
                raise FileNotFoundError(
                    f"{str(needed)!r} does not exist. Write it with encode_files(paths, {str(path)!r}, ...)."
                )
        sidecar = _read_sidecar(path)
        file = cls(path, sidecar["dtype"], sidecar["vocab_size"], sidecar["num_tokens"])
        expected, found = file.num_tokens * np.dtype(file.dtype).itemsize, path.stat().st_size
        if expected != found:
            raise ValueError(
                f"{str(path)!r} has {found} bytes, but its description has {file.num_tokens} ids of {file.dtype} ="
                f" {expected} bytes. Write it again with encode_files."
            )
        return file

    @property
    def tokens(self) -> UInt[np.ndarray, " n"]:
        """Returns all ids as a read-only memory map."""
        if self.num_tokens == 0:  # an empty file cannot be mapped
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, mode="r", shape=(self.num_tokens,))

    def read(self, starts: Int64[np.ndarray, " n"], count: int) -> Int64[np.ndarray, "n count"]:
        """Returns the `count` ids from each start on.

        Raises:
            ValueError: an id is not below `vocab_size`, or a range leaves the file.
        """
        if starts.size and not 0 <= int(starts.min()) <= int(starts.max()) <= self.num_tokens - count:
            raise ValueError(
                f"{count} ids from each start must lie in the {self.num_tokens} ids of {str(self.path)!r}, got starts"
                f" from {starts.min()} to {starts.max()}. Read the file that the starts were made for."
            )
        tokens = self.tokens
        out = np.empty((len(starts), count), np.int64)
        for row, start in zip(out, starts, strict=True):
            row[:] = tokens[start : start + count]
        bad = np.argwhere(out >= self.vocab_size)
        if len(bad):
            row, col = bad[0]
            where = f"{str(self.path)!r}: id {out[row, col]} at position {starts[row] + col}"
            raise ValueError(
                f"{where} is not below vocab_size={self.vocab_size}. Write the file again with encode_files."
            )
        return out


def encode_files(
    paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str], tokenizer: Tokenizer
) -> TokenFile:
    """Writes the ids of files, in order, to `out`, and a description to `out` + ".json".

    Files are streamed, a million characters at a time. Both files appear by rename: a reader sees an old pair, a new
    one, or (between the two renames) a pair that `TokenFile.open` refuses unless the sizes agree.

    Args:
        paths: text files, UTF-8. Other bytes are kept by ByteTokenizer.
        out: the `.bin` file to write. The folder is made if missing.
        tokenizer: tokenizer from text to ids.

    Returns: The file written.

    Raises:
        FileNotFoundError: paths are missing. The message lists all missing paths.
        ValueError: the tokenizer made an id that is not below `vocab_size`.

    Example:
        >>> import tempfile; from shardfn.data import ByteTokenizer
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("hello")
        >>> encode_files([folder / "a.txt"], folder / "a.bin", ByteTokenizer()).tokens.tolist()
        [104, 101, 108, 108, 111]
    """
    paths, out = checked(paths), pathlib.Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    dtype = next(d for d in _DTYPES if tokenizer.vocab_size <= np.iinfo(d).max + 1)
    digest, num_tokens, partial = hashlib.sha256(), 0, pathlib.Path(f"{out}.partial")
    with partial.open("wb") as sink:
        for path in paths:
            for text in read_text(path):
                digest.update(text.encode("utf-8", "surrogateescape"))
                ids = _checked_ids(tokenizer.encode(text), tokenizer.vocab_size, path)
                sink.write(ids.astype(dtype).tobytes())
                num_tokens += len(ids)
    file = TokenFile(out, dtype, tokenizer.vocab_size, num_tokens)
    inputs = [{"path": str(path), "bytes": path.stat().st_size} for path in paths]
    _write_sidecar(file, {"tokenizer": repr(tokenizer), "sha256": digest.hexdigest(), "inputs": inputs})
    os.replace(partial, out)
    return file


def _checked_ids(ids: Any, vocab_size: int, path: pathlib.Path) -> Int64[np.ndarray, " n"]:
    ids = np.asarray(ids, np.int64)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"{str(path)!r}: the tokenizer made ids from {ids.min()} to {ids.max()}, but its vocab_size is"
            f" {vocab_size}."
        )
    return ids


def _sidecar_path(path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(f"{path}.json")


def _write_sidecar(file: TokenFile, more: dict[str, Any]) -> None:
    sidecar = {"dtype": file.dtype, "vocab_size": file.vocab_size, "num_tokens": file.num_tokens, **more}
    partial = pathlib.Path(f"{file.path}.json.partial")
    partial.write_text(json.dumps(sidecar, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, _sidecar_path(file.path))


def _read_sidecar(path: pathlib.Path) -> dict[str, Any]:
    text = _sidecar_path(path).read_text(encoding="utf-8")
    try:
        said = json.loads(text)
        if said["dtype"] in _DTYPES and int(said["vocab_size"]) > 0 and int(said["num_tokens"]) >= 0:
            return said
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{str(_sidecar_path(path))!r} does not describe a token file: {text[:200]!r}. Write it again.")


_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
_TESTS = {"test", "tests", "idle_test"}


def default_corpus(*, tests: bool = False) -> list[pathlib.Path]:
    """Returns the `.py` files of this Python's standard library, sorted by relative path.

    Args:
        tests: whether to include the library's tests, about as large as the library.

    Returns: Paths of files; about 12 MB of text without tests.

    Raises:
        FileNotFoundError: this Python keeps no sources (a frozen or zipped installation).

    Example:
        >>> any(path.name == "heapq.py" for path in default_corpus())
        True
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    skip = _NOT_LIBRARY if tests else _NOT_LIBRARY | _TESTS
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - skip
        paths += [pathlib.Path(folder, name) for name in files if name.endswith(".py")]
    if not paths:
        raise FileNotFoundError(f"{root} holds no .py files. Name text files of your own instead.")
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


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
