"""Text to token ids and back: bytes, or byte pairs learnt from the text."""

import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

_CHUNK = 1 << 20


@runtime_checkable
class Tokenizer(Protocol):
    """Turns text into ids in {0, ..., vocab_size - 1} and back."""

    @property
    def vocab_size(self) -> int:
        """Returns the largest id plus 1."""
        ...

    def encode(self, text: str) -> Int64[np.ndarray, " n"]:
        """Returns the ids of `text`. Lone surrogates encode bytes that are not UTF-8 (PEP 383)."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`. Never fails, for any sampled ids."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8: 256 ids, nothing to train, every file encodes.

    Example:
        >>> ByteTokenizer().encode("Ab").tolist()
        [65, 98]
        >>> ByteTokenizer().decode([65, 98])
        'Ab'
    """

    vocab_size = 256

    def encode(self, text: str) -> Int64[np.ndarray, " n"]:
        """Returns the bytes of `text`."""
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`. Bytes that are not UTF-8 become U+FFFD."""
        return bytes(ids).decode("utf-8", "replace")

    def __repr__(self) -> str:
        return "ByteTokenizer()"


class BPETokenizer:
    """Byte-level byte pair encoding, by the `tokenizers` library. Build a tokenizer with `train` or `load`.

    Sennrich, Haddow, Birch: Neural Machine Translation of Rare Words with Subword Units, 2016,
    https://arxiv.org/abs/1508.07909
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @classmethod
    def train(cls, paths: Iterable[str | os.PathLike[str]], vocab_size: int) -> "BPETokenizer":
        """Learns merges from files until there are `vocab_size` ids (fewer when the text has no more pairs).

        Raises:
            ImportError: the `tokenizers` library is missing.
            ValueError: `vocab_size` is below 256, the ids that the bytes take.
            FileNotFoundError: paths are missing. The message lists all missing paths.
        """
        if vocab_size < 256:
            raise ValueError(f"vocab_size must be above 256, as each byte has an id, got {vocab_size}.")
        paths, lib = checked(paths), _import_library()
        inner = lib.Tokenizer(lib.models.BPE())
        inner.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = lib.decoders.ByteLevel()
        alphabet = sorted(lib.pre_tokenizers.ByteLevel.alphabet())
        trainer = lib.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
        inner.train_from_iterator((_clean_spaces(text) for path in paths for text in read_text(path)), trainer)
        return cls(inner)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "BPETokenizer":
        """Reads a file that `save` wrote (JSON of the `tokenizers` library).

        Raises:
            ImportError: the `tokenizers` library is missing.
            FileNotFoundError: there is no such file.
        """
        return cls(_import_library().Tokenizer.from_file(os.fspath(checked([path])[0])))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes vocabulary and merges as json, by rename, so that no reader sees half a file."""
        partial = pathlib.Path(f"{os.fspath(path)}.partial")
        partial.write_text(self._inner.to_str(), encoding="utf-8")
        os.replace(partial, path)

    @property
    def inner(self) -> Any:
        """Returns the tokenizer of the library."""
        return self._inner

    @property
    def vocab_size(self) -> int:
        """Returns the number of ids."""
        return self._inner.get_vocab_size()

    def encode(self, text: str) -> Int64[np.ndarray, " n"]:
        """Returns the ids of `text`. Bytes that are not UTF-8 become U+FFFD first."""
        return np.array(self._inner.encode(_clean_spaces(text), add_special_tokens=False).ids, np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`. Incomplete characters become U+FFFD."""
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def __repr__(self) -> str:
        return f"BPETokenizer(vocab_size={self.vocab_size})"


def read_text(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the text of a file in pieces of about a million characters that end at a line's end if possible."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        while piece := file.read(_CHUNK) + file.readline(_CHUNK):
            yield piece


def checked(paths: Iterable[str | os.PathLike[str]]) -> list[pathlib.Path]:
    """Returns the paths, after a check that each path is an existing file.

    Raises:
        FileNotFoundError: paths are missing. The message lists all missing paths.
        ValueError: `paths` is empty.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    paths = [pathlib.Path(path) for path in paths]
    missing = [f"  - {str(path)!r}{' is a folder' * path.is_dir()}" for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError("\n".join(["these are not files; name text files:", *missing]))
    if not paths:
        raise ValueError("there are no files to read. Name at least one text file.")
    return paths


def _clean_spaces(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _import_library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ImportError(
            "byte pair encoding needs the `tokenizers` library: pip install tokenizers. ByteTokenizer needs nothing."
        ) from error
    return tokenizers
