"""Token files: written ids are read back, mapped and not loaded, and every broken pair of files is named."""

import json
import pathlib

import numpy as np
import pytest

from shardfn.data import ByteTokenizer, TokenFile, default_corpus, encode_files


class Wide:
    """A tokenizer of a larger vocabulary: each character is 300 times its number."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(c) * 300 for c in text], np.int64)

    def decode(self, ids: object) -> str:
        return ""


def write(folder: pathlib.Path, **files: bytes) -> list[pathlib.Path]:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def test_bytes_of_files_in_order(tmp_path: pathlib.Path) -> None:
    paths = write(tmp_path, a=b"one\r\n", empty=b"", b="h\u00e9\u4e16\U0001f600".encode(), broken=b"\xff\xfe\x80ok\xe4")
    file = encode_files(paths, tmp_path / "deep" / "x.bin", ByteTokenizer())
    assert bytes(file.tokens.tolist()) == b"".join(path.read_bytes() for path in paths)
    assert file == TokenFile.open(file.path)
    assert (file.dtype, file.vocab_size) == ("uint8", 256)
    assert sorted(p.name for p in file.path.parent.iterdir()) == ["x.bin", "x.bin.json"]  # nothing partial stays
    said = json.loads(pathlib.Path(f"{file.path}.json").read_text())
    assert [entry["bytes"] for entry in said["inputs"]] == [5, 0, 10, 6]
    assert len(said["sha256"]) == 64


def test_only_empty_files(tmp_path: pathlib.Path) -> None:
    file = encode_files(write(tmp_path, a=b"", b=b""), tmp_path / "x.bin", ByteTokenizer())
    assert TokenFile.open(file.path).tokens.tolist() == []


def test_pieces_longer_than_the_stream_buffer(tmp_path: pathlib.Path) -> None:
    content = ("\u4e16" * 2_200_000).encode() + b"\n" + b"line\n" * 300_000
    file = encode_files(write(tmp_path, a=content), tmp_path / "x.bin", ByteTokenizer())
    assert file.tokens.tobytes() == content


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (256, "uint8"),
        pytest.param(257, "uint16", marks=pytest.mark.nightly),
        pytest.param(65536, "uint16", marks=pytest.mark.nightly),
        (65537, "uint32"),
    ],
)
def test_smallest_dtype(tmp_path: pathlib.Path, vocab_size: int, dtype: str) -> None:
    file = encode_files(write(tmp_path, a=b""), tmp_path / "x.bin", Wide(vocab_size))
    assert file.dtype == dtype


def test_wide_ids_survive(tmp_path: pathlib.Path) -> None:
    file = encode_files(write(tmp_path, a=b"az"), tmp_path / "x.bin", Wide(40_000))
    assert file.tokens.tolist() == [97 * 300, 122 * 300]


def test_the_file_is_mapped(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "huge.bin"
    with path.open("wb") as file:  # a sparse file, larger than memory: loading it would fail
        file.truncate(1 << 42)
        file.seek((1 << 42) - 4)
        file.write(b"\1\2\3\4")
    pathlib.Path(f"{path}.json").write_text(json.dumps({"dtype": "uint8", "vocab_size": 256, "num_tokens": 1 << 42}))
    source = TokenFile.open(path)
    assert isinstance(source.tokens, np.memmap)
    assert not source.tokens.flags.writeable
    assert source.read(np.array([(1 << 42) - 4, 5]), 4).tolist() == [[1, 2, 3, 4], [0, 0, 0, 0]]


def test_read_outside(tmp_path: pathlib.Path) -> None:
    file = encode_files(write(tmp_path, a=b"abc"), tmp_path / "x.bin", ByteTokenizer())
    assert file.read(np.array([0]), 3).tolist() == [[97, 98, 99]]
    for start in (1, -1):
        with pytest.raises(ValueError, match="ids from each start must lie in"):
            file.read(np.array([start]), 3)


def test_missing_inputs_are_all_named(tmp_path: pathlib.Path) -> None:
    (here,) = write(tmp_path, here=b"x")
    with pytest.raises(FileNotFoundError) as error:
        encode_files([here, tmp_path / "gone", tmp_path, tmp_path / "also"], tmp_path / "x.bin", ByteTokenizer())
    assert all(word in str(error.value) for word in ("gone", "also", "is a folder"))
    assert "here" not in str(error.value)
    with pytest.raises(ValueError, match="no files"):
        encode_files([], tmp_path / "x.bin", ByteTokenizer())


def test_open_names_missing_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"x\.bin' does not exist"):
        TokenFile.open(tmp_path / "x.bin")
    (tmp_path / "x.bin").write_bytes(b"abc")
    with pytest.raises(FileNotFoundError, match=r"x\.bin\.json"):
        TokenFile.open(tmp_path / "x.bin")


def test_sizes_that_disagree(tmp_path: pathlib.Path) -> None:
    file = encode_files(write(tmp_path, a=b"abc"), tmp_path / "x.bin", ByteTokenizer())
    file.path.write_bytes(b"abcd")
    with pytest.raises(ValueError, match="has 4 bytes"):
        TokenFile.open(file.path)


@pytest.mark.parametrize(
    "said",
    [
        "",
        pytest.param("[]", marks=pytest.mark.nightly),
        pytest.param("{}", marks=pytest.mark.nightly),
        '{"dtype": "int8", "vocab_size": 256, "num_tokens": 1}',
    ],
)
def test_a_malformed_description(tmp_path: pathlib.Path, said: str) -> None:
    write(tmp_path, **{"x.bin": b"a", "x.bin.json": said.encode()})
    with pytest.raises(ValueError, match="does not describe"):
        TokenFile.open(tmp_path / "x.bin")


def test_ids_beyond_the_vocabulary_when_writing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"ids from 29100 to 29100, but its vocab_size is 1000"):
        encode_files(write(tmp_path, a=b"a"), tmp_path / "x.bin", Wide(1000))
    assert not (tmp_path / "x.bin").exists()


def test_ids_beyond_the_vocabulary_when_reading(tmp_path: pathlib.Path) -> None:
    file = encode_files(write(tmp_path, a=b"abz"), tmp_path / "x.bin", ByteTokenizer())
    low = TokenFile(file.path, "uint8", 100, 3)
    assert low.read(np.array([0]), 2).tolist() == [[97, 98]]
    with pytest.raises(ValueError, match="id 122 at position 2 is not below vocab_size=100"):
        low.read(np.array([0, 1]), 2)


def test_default_corpus() -> None:
    paths = default_corpus()
    assert paths == default_corpus()
    assert len(paths) > 300
    assert all(path.suffix == ".py" and path.is_file() for path in paths)
    assert not any({"site-packages", "test", "tests"} & set(path.parts[-3:]) for path in paths)
    assert len(default_corpus(tests=True)) >= len(paths)
