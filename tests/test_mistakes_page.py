"""Covers the table of messages in docs/mistakes.md: each row names a test, whose text has the message."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs/mistakes.md").read_text()
ROWS = re.findall(r"^\| .+ \| ``(.+)`` \| `(tests/[\w/]+\.py)::(\w+)` \|$", PAGE, re.M)


def test_there_are_enough_rows() -> None:
    table = PAGE.split("## Messages\n")[1].split("\n## ")[0]
    assert len(ROWS) == table.count("\n| ") - 1 >= 12  # one line is the head


@pytest.mark.parametrize(("message", "file", "test"), ROWS, ids=[f"{row[0][:40]}" for row in ROWS])
def test_the_test_shows_the_message(message: str, file: str, test: str) -> None:
    text = (ROOT / file).read_text()
    assert test in {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    assert message in text.replace("\\", "")
