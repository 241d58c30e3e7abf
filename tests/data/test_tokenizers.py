"""Tokenizers: decoding inverts encoding, and never fails."""

import builtins
import pathlib
from typing import Any

import numpy as np
import pytest

from shardfn.data import BPETokenizer, ByteTokenizer, Tokenizer, encode_files

TEXTS = ["", "plain", "tabs\t and\r\nlines\n", "h\u00e9llo \u4e16\u754c \U0001f600", "  leading, trailing  "]


@pytest.fixture
def corpus(tmp_path: pathlib.Path) -> list[pathlib.Path]:
    (tmp_path / "a.txt").write_bytes(("def f(x):\n    return x + 1\n" * 50 + "".join(TEXTS)).encode())
    (tmp_path / "empty.txt").write_text("")
    return [tmp_path / "a.txt", tmp_path / "empty.txt"]


@pytest.mark.parametrize(
    "text", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(TEXTS)]
)
def test_bytes_round_trip(text: str) -> None:
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.int64
    assert ByteTokenizer().decode(ids.tolist()) == text


def test_bytes_that_are_no_text() -> None:
    assert ByteTokenizer().decode([0x66, 0xE4, 0xB8]) == "f\ufffd"
    assert isinstance(ByteTokenizer(), Tokenizer)


def test_bpe_round_trip(tmp_path: pathlib.Path, corpus: list[pathlib.Path]) -> None:
    pytest.importorskip("tokenizers")
    bpe = BPETokenizer.train(corpus, 300)
    assert isinstance(bpe, Tokenizer)
    assert 256 < bpe.vocab_size <= 300
    for text in TEXTS:
        assert bpe.decode(bpe.encode(text).tolist()) == text
    assert len(bpe.encode("    return x")) < len("    return x")
    bpe.save(tmp_path / "bpe.json")
    again = BPETokenizer.load(tmp_path / "bpe.json")
    file = encode_files(corpus, tmp_path / "x.bin", again)
    assert file.dtype == "uint16"
    assert bpe.decode(file.tokens.tolist()) == corpus[0].read_bytes().decode()


def test_bpe_decodes_and_encodes_broken_text(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "broken").write_bytes(b"ab\xff\xfe" * 20)
    bpe = BPETokenizer.train([tmp_path / "broken"], 260)
    assert bpe.decode(bpe.encode("a\udcffb").tolist()) == "a\ufffdb"
    assert isinstance(bpe.decode(list(range(bpe.vocab_size))), str)


def test_bpe_vocabulary_too_small(corpus: list[pathlib.Path]) -> None:
    with pytest.raises(ValueError, match=r"vocab_size must be above 256.*got 100"):
        BPETokenizer.train(corpus, 100)


def test_bpe_missing_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        BPETokenizer.train([tmp_path / "gone"], 300)
    pytest.importorskip("tokenizers")
    with pytest.raises(FileNotFoundError, match="gone"):
        BPETokenizer.load(tmp_path / "gone")


def test_bpe_without_its_library(corpus: list[pathlib.Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("tokenizers"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install tokenizers"):
        BPETokenizer.train(corpus, 300)
