"""Covers shardfn/data/_sources.py: lines of JSON, read on access."""

import pathlib
import pickle

import pytest

from shardfn.data import JSONLines


def test_lines_of_any_content_are_found(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"a": "ä\\n"}\r\n\n  \n[1, 2]\n"last, without an end"'.encode())
    lines = JSONLines(path)
    assert [lines[i] for i in range(len(lines))] == [{"a": "ä\n"}, [1, 2], "last, without an end"]
    assert pickle.loads(pickle.dumps(lines))[1] == [1, 2]
    assert JSONLines(path, len)[1] == 2
    with pytest.raises(IndexError, match="must be below 3, got 3"):
        lines[3]


def test_a_wrong_line_is_named_as_editors_count(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": \n"\xff"\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:3: expected one JSON value a line, got .* at column 6"):
        JSONLines(path)[1]
    with pytest.raises(ValueError, match=r"a\.jsonl:4: expected one JSON value a line, got .*utf-8.* can't decode"):
        JSONLines(path)[2]
    with pytest.raises(ValueError, match=r"a\.jsonl:1: no b"):
        JSONLines(path, lambda row: _refuse())[0]
    with pytest.raises(KeyError) as caught:
        JSONLines(path, lambda row: row["b"])[0]
    assert caught.value.__notes__ == [f"The row is {path}:1."]


def _refuse() -> None:
    raise ValueError("no b")


def test_the_digest_is_of_lengths_and_of_lines(tmp_path: pathlib.Path) -> None:
    digests = set[str]()
    for text in ("[1]\n[2]\n", "[1]\n[3]\n", "[1]\n\n[2]\n", "[1]\n[2]\n[4]\n"):
        (tmp_path / "a.jsonl").write_text(text)
        digests.add(JSONLines(tmp_path / "a.jsonl").digest())
        assert JSONLines(tmp_path / "a.jsonl", len).digest() in digests  # encoding does not count
    assert len(digests) == 4
    rows = ["[0]\n"] * 1000
    (tmp_path / "a.jsonl").write_text("".join(rows))
    before = JSONLines(tmp_path / "a.jsonl").digest()
    rows[500] = "[10]\n"  # this line is not among those that are read, but its length counts
    (tmp_path / "a.jsonl").write_text("".join(rows))
    assert JSONLines(tmp_path / "a.jsonl").digest() != before
