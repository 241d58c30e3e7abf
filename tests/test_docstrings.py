"""Covers every docstring of the package: its examples run and print the results shown."""

import ast
import doctest
import importlib
import pathlib
import pkgutil
from collections.abc import Iterator

import pytest

import shardfn

# Read from the source: with the type checker's wrappers around them, functions no longer look like their module's own,
# and doctest's finder passes them over.


def _examples() -> Iterator[doctest.DocTest]:
    for info in pkgutil.walk_packages(shardfn.__path__, "shardfn."):
        origin = getattr(info.module_finder.find_spec(info.name, None), "origin", None)
        if origin and origin.endswith(".py"):
            yield from _examples_of(info.name, pathlib.Path(origin))


def _examples_of(module: str, file: pathlib.Path) -> Iterator[doctest.DocTest]:
    for node, name in _named(ast.parse(file.read_text()), module):
        text = ast.get_docstring(node, clean=False)
        if text:
            line = node.body[0].lineno - 1
            test = doctest.DocTestParser().get_doctest(text, {}, name, str(file), line)
            if test.examples:
                yield test


def _named(node: ast.AST, name: str) -> Iterator[tuple[ast.Module | ast.ClassDef | ast.FunctionDef, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        yield node, name
        for child in node.body:
            yield from _named(child, f"{name}.{getattr(child, 'name', '')}")


def _module_of(test: doctest.DocTest) -> str:
    root = pathlib.Path(shardfn.__file__).parent
    assert test.filename is not None
    parts = pathlib.Path(test.filename).relative_to(root).with_suffix("").parts
    return ".".join(("shardfn", *(p for p in parts if p != "__init__")))


@pytest.mark.day(191)
@pytest.mark.parametrize(
    "test",
    [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(list(_examples()))],
    ids=lambda test: test.name,
)
def test_example(test: doctest.DocTest) -> None:
    test.globs = dict(vars(importlib.import_module(_module_of(test))))
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    result = runner.run(test, out=said.append)
    assert result.failed == 0, "".join(said)
