"""Covers the wraps of docstrings and comments: a line ends where the next word would not fit, or something ends."""

import ast
import itertools
import pathlib
import re
from collections.abc import Iterator

import shardfn

# A line that would still be this long with the next line's first word has broken off too early; lines have 120.
LIMIT = 112
# The beginning of an item, a row of a table, or an entry of `Args:`.
ITEM = re.compile(r"[-*|>\[`]|\d+\.|\.\.\.|[\w.*`\"'() ,]{1,60}:(\s|$)")
# Text that is laid out by hand: columns, formulas, links.
LAID_OUT = re.compile(r"\S  |https?:| = |=>|->|;\s")


def _docstrings(text: str) -> Iterator[tuple[int, list[str]]]:
    lines, queue = text.splitlines(), list[ast.AST]([ast.parse(text)])
    while queue:
        node = queue.pop()
        queue += getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            yield node.body[0].lineno, lines[node.body[0].lineno - 1 : node.body[0].end_lineno]


def _comments(text: str) -> Iterator[tuple[int, list[str]]]:
    block: list[str] = []
    for n, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("#"):
            block.append(line)
        elif block:
            yield n - len(block), block
            block = []


def _broken(lines: list[str]) -> Iterator[int]:
    """The lines after which a paragraph goes on although its next word would have fitted."""
    example = False
    for i, (line, after) in enumerate(itertools.pairwise(lines)):
        example = line.strip() != "" and (example or line.strip().startswith(">>>"))
        here, there = (x.strip().lstrip('#" ') for x in (line, after))
        if example or not here or not there or after.strip().startswith(">>>") or ITEM.match(there):
            continue
        indents = [len(x) - len(x.lstrip()) for x in (line, after)]
        goes_on = indents[0] == indents[1] or (indents[1] > indents[0] and ITEM.match(here))
        if not goes_on or here[-1] == ":" or LAID_OUT.search(here) or LAID_OUT.search(there):
            continue
        if len(line) + 1 + len(there.split()[0]) <= LIMIT:
            yield i


def _found(text: str) -> list[int]:
    return [first + i for blocks in (_docstrings, _comments) for first, lines in blocks(text) for i in _broken(lines)]


def test_no_wrap_is_broken() -> None:
    root = pathlib.Path(shardfn.__file__).parent
    found = [f"{file.relative_to(root)}:{n}" for file in sorted(root.rglob("*.py")) for n in _found(file.read_text())]
    assert not found, f"lines that end before the next word would not fit: {found}"


def test_broken_wraps_are_found() -> None:
    short = "a line that ends early"
    assert _found(f'"""Title.\n\n{short}\nand goes on.\n"""\n') == [3]
    assert _found(f"x = 1\n# {short}\n# and goes on.\n") == [2]
    assert _found(f'"""Title.\n\nArgs:\n    x: {short}\n        and goes on.\n"""\n') == [4]
    for fine in (
        f'"""Title.\n\n{short}\n\nA new paragraph.\n"""\n',
        f'"""Title.\n\nArgs:\n    x: {short}\n    y: another entry\n"""\n',
        f'"""Title.\n\n- {short}\n- another item\n"""\n',
        f'"""Title.\n\n{short} {"x" * 90}\nsupercalifragilistic goes on.\n"""\n',
        '"""Title.\n\nExample:\n    >>> 1 + 1\n    2\n    >>> 2\n    2\n"""\n',
    ):
        assert _found(fine) == [], fine
