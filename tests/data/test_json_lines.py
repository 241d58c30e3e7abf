"""Covers shardfn/data/_json_lines.py: lines of JSON, read on access."""

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
    with pytest.raises(IndexError, match="no line 3"):
        lines[3]


def test_a_line_that_is_no_json_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ValueError, match=r"a\.jsonl.*line 1 .*is no JSON"):
        JSONLines(tmp_path / "a.jsonl")[1]
