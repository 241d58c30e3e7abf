"""Covers shardfn/cli/_finetune_rows.py: rows are checked before a run, with the file and the line."""

import json
import pathlib
from typing import Any

import pytest

from shardfn.cli._finetune_rows import row_problems, scan_rows

ASK, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"message": "a"},
            "expected 'text', or 'prompt' and 'completion', or 'messages', got ['message']. Did you mean",
        ),
        ({"prompt": "a"}, "got ['prompt']"),
        ("a", "in a JSON object, got a str"),
        ({"text": 3}, "'text' must be a text, got an int"),
        ({"text": " "}, "'text' must not be empty"),
        ({"prompt": "a", "completion": ""}, "'completion' must not be empty"),
        ({"prompt": 1, "completion": "a"}, "'prompt' must be a text, or a list of messages, got an int"),
        ({"prompt": [ASK], "completion": "b"}, "'completion' must be a list of messages, got a str"),
        ({"prompt": [ASK], "completion": [ASK]}, "expected a message with role 'assistant' in 'completion'"),
        ({"messages": []}, "'messages' must be a list of messages, got an empty list"),
        ({"messages": [ASK]}, "expected a message with role 'assistant', from which the model learns"),
        (
            {"messages": [{"from": "gpt", "value": "a"}, ANSWER]},
            "messages[0] must have 'role' and 'content', got ['from'",
        ),
        (
            {"messages": [{"role": "user", "content": 3}, ANSWER]},
            "the content of messages[0] must be a text, got an int",
        ),
        ({"messages": [ASK, ANSWER], "tools": "add"}, "'tools' must be a list, got a str"),
    ],
)
def test_a_wrong_row_is_named(row: Any, problem: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n' + json.dumps(row) + "\n")
    [found] = row_problems("TRAIN", str(path), "answers")
    assert found.startswith(f"TRAIN {path}:3: ") and problem in found


def test_good_rows_have_no_problem(tmp_path: pathlib.Path) -> None:
    rows = [
        {"text": "a", "id": 3},
        {"prompt": "", "completion": "a"},
        {"prompt": [ASK], "completion": [ANSWER]},
        {"messages": [ASK, CALL, {"role": "tool", "content": "3"}, ANSWER], "tools": [{}]},
        {"messages": [ASK, ANSWER], "tools": None},
        {"messages": [ASK, ANSWER]},
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "".join(json.dumps(row) + "\r\n" for row in rows).encode())
    found = scan_rows(str(path), "answers")
    assert found.problems == () and found.chats
    assert [place for place, _ in found.samples] == [f"{path}:{n}" for n in range(1, 6)]  # the last has a form that was
    assert not [*row_problems("TRAIN", str(path), "everything")]


def test_lines_that_are_no_json_and_long_lists(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + '{"text": \n' * 8)
    found = [*row_problems("TRAIN", str(path), "answers")]
    assert found[0] == f"TRAIN {path}:2: expected one JSON object a line, got Expecting value at column 9"
    assert len(found) == 6 and found[-1] == "and 3 more"
    path.write_bytes('{"text": "a"}\n'.encode("utf-16"))
    assert [*row_problems("TRAIN", str(path), "answers")]
    path.write_text("\n")  # the file is read again, as it has changed
    assert [*row_problems("TRAIN", str(path), "answers")] == [
        f"TRAIN {path} has no lines; write one JSON object a line"
    ]
