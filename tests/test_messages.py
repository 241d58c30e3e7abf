"""Covers remedies in the texts of the package: calls, arguments, names and options that they name exist."""

import ast
import functools
import importlib
import inspect
import pathlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardfn

ROOT = pathlib.Path(shardfn.__file__).parent
_CALL = re.compile(r"(?<![\w.'{])([A-Za-z_]\w*(?:\.\w+)*)\(([^()]*)")
_KEYWORD = re.compile(r"(?:^|[\s,{])(\w+)=(?!=)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
_ROOMS = ("optim", "rl", "memory", "checkpoint", "inference", "collectives", "metrics", "schedules")
_OF_OTHERS = {"--nproc-per-node", "--local-dir", "--pid"}  # of torchrun, hf and py-spy


def texts() -> Iterator[tuple[str, int, str]]:
    """Yields texts of several words that are not docstrings, with file and line; `{}` stands for a value."""
    for path in sorted(ROOT.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docs = {
            id(node.body[0].value)
            for node in nodes
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body
            if isinstance(node.body[0], ast.Expr)
        }
        parts = {id(x) for node in nodes if isinstance(node, ast.JoinedStr) for x in node.values}
        reprs = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "__repr__"]
        skipped = docs | parts | {id(x) for node in reprs for x in ast.walk(node)}
        for node in nodes:
            text = "".join(map(_shown, node.values)) if isinstance(node, ast.JoinedStr) else _shown(node)
            if " " in text and id(node) not in skipped:
                yield str(path.relative_to(ROOT)), getattr(node, "lineno", 0), text


def _shown(part: ast.AST) -> str:
    return str(part.value) if isinstance(part, ast.Constant) and isinstance(part.value, str) else "{}"


@functools.cache
def known() -> dict[str, list[Any]]:
    """Returns by name the public functions and classes of the rooms, and the methods of these classes."""
    found = dict[str, list[Any]]()
    rooms = [shardfn, *(importlib.import_module(m.name) for m in pkgutil.walk_packages([str(ROOT)], "shardfn.")
             if "._" not in m.name and "__main__" not in m.name)]  # fmt: skip
    for room in rooms:
        for name, x in vars(room).items():
            if callable(x) and not name.startswith("_"):
                found.setdefault(name, []).append(x)
                for method, f in inspect.getmembers(x) if inspect.isclass(x) else ():
                    if not method.startswith("_") and callable(f):
                        found.setdefault(method, []).append(f)
    return found


def takes(f: Any, keyword: str) -> bool:
    """Returns whether a function takes a keyword."""
    try:
        of = inspect.signature(f).parameters
    except (ValueError, TypeError):
        return True  # a function of C, without a signature
    return keyword in of or any(p.kind is p.VAR_KEYWORD for p in of.values())


def wrong_calls(text: str) -> Iterator[str]:
    """Yields the keywords of calls in a text that no function of that name takes."""
    for match in _CALL.finditer(text):
        name, inside = match[1].rpartition(".")[2], match[2]
        if match[1].startswith(("torch.", "transformers.", "nn.")):
            continue
        functions = known().get(name, [])
        for keyword in _KEYWORD.findall(inside):
            if functions and not any(takes(f, keyword) for f in functions):
                yield f"{match[0]}: no {name} takes {keyword}="


def wrong_names(text: str) -> Iterator[str]:
    """Yields the names of rooms in a text, and of torch, that do not exist."""
    rooms = "|".join(("sf", "torch", *_ROOMS))
    for path in re.findall(rf"(?<![\w./'\"-])((?:{rooms})(?:\.[A-Za-z_]\w*)+)(?!\w)", text):
        first, *names = path.split(".")
        if names[-1] in ("jsonl", "csv"):  # a file
            continue
        room = {"sf": shardfn, "torch": torch}.get(first) or importlib.import_module(f"shardfn.{first}")
        for name in names:
            if inspect.isclass(room) or not (inspect.ismodule(room) or hasattr(room, name)):
                break
            if not hasattr(room, name):
                yield f"{path}: {room.__name__} has no {name}"
                break
            room = getattr(room, name)


@functools.cache
def options() -> frozenset[str]:
    """Returns the options of the command line and the examples: written in parsers, or made of the fields of its jobs."""  # noqa: E501
    examples = pathlib.Path(__file__).parents[1] / "examples"
    files = [*(ROOT / "cli").glob("*.py"), *examples.rglob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    written = [_shown(x) for node in nodes if isinstance(node, ast.Call) for x in node.args]
    fields = [x.target for node in nodes if isinstance(node, ast.ClassDef) for x in node.body
              if isinstance(x, ast.AnnAssign)]  # fmt: skip
    made = ["--" + x.id.replace("_", "-") for x in fields if isinstance(x, ast.Name)]
    return frozenset(x for x in written if _OPTION.fullmatch(x)) | {*made} | _OF_OTHERS


def wrong_options(text: str) -> Iterator[str]:
    """Yields the options of the command line in a text that no parser has."""
    yield from (f"there is no option {x}" for x in _OPTION.findall(text) if x not in options())


def faults(text: str) -> list[str]:
    """Returns all calls, names and options in a text that do not exist."""
    return [*wrong_calls(text), *wrong_names(text), *wrong_options(text)]


def test_calls_and_names_and_options_in_texts_exist() -> None:
    wrong = [f"{file}:{line}: {fault}" for file, line, text in texts() for fault in faults(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("turn it off (from_module(train=False), or no key)", "no from_module takes train="),
        ("write sf.optim.adam_w(1e-3)", "shardfn.optim has no adam_w"),
        ("use Engine(decoder, params, max_num_seqs=4)", "no Engine takes max_num_seqs="),
        ("pass --tensor-parallel 2", "there is no option --tensor-parallel"),
        ("make it by torch.nn.RMSNorms", "torch.nn has no RMSNorms"),
    ],
)
def test_a_remedy_that_does_not_exist_is_found(text: str, fault: str) -> None:
    assert [x for x in faults(text) if fault in x]
