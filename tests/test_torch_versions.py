"""Covers the versions of torch: those of the project's requirement, refusals, and private names in one room."""

import ast
import pathlib
import re
import subprocess
import sys
import warnings

import pytest

from shardfn._torch._version import NEWEST, OLDEST
from shardfn.core import check_torch

ROOT = pathlib.Path(__file__).parents[1]
# Ops that torch documents under names with an underscore.
DOCUMENTED = re.compile(r"torch\._(foreach|fused|assert_async|check)|torch\.ops\.|torch[\w.]*\.__")
PRIVATE = re.compile(r"torch(\.\w+)*\._(?!_)")


def test_they_are_those_of_the_requirement() -> None:
    found = re.search(r'"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    assert tuple(map(int, found.groups())) == (*OLDEST, NEWEST[0], NEWEST[1] + 1)


@pytest.mark.parametrize("version", ["2.10.9", pytest.param("1.13.1+cu117", marks=pytest.mark.nightly)])
def test_an_older_torch_is_refused_with_the_remedy(version: str) -> None:
    with pytest.raises(
        ImportError, match=rf"needs torch 2\.11 to 2\.14, and this is torch {re.escape(version)}.*pip inst"
    ):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.15.0", pytest.param("3.0.0a0+git1234", marks=pytest.mark.nightly)])
def test_a_newer_minor_is_warned_of(version: str) -> None:
    with pytest.warns(UserWarning, match=rf"torch 2\.11 to 2\.14, and this is torch {re.escape(version)}.*pip inst"):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.13.0a0+git1234", "2.14.1"])
def test_the_minors_between_are_taken(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch(version)


@pytest.mark.nightly
@pytest.mark.parametrize("version, said", [("2.99.0", "done"), ("2.9.1", "ImportError: shardfn needs torch 2.11")])
def test_the_check_is_made_once_at_import(version: str, said: str) -> None:
    program = f"import torch; torch.__version__ = {version!r}; import shardfn, shardfn.optim; print('done')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert said in done.stdout + done.stderr and done.stderr.count(f"this is torch {version}") == 1


def test_private_names_of_torch_are_used_in_one_room() -> None:
    found = []
    for path in sorted((ROOT / "shardfn").rglob("*.py")):
        if path.parent.name != "_torch":
            found += [f"{path.relative_to(ROOT)}: {name}" for name in _private_names(path.read_text())]
    assert not found


@pytest.mark.parametrize(
    "code, name",
    [
        ("import torch; torch._C", "torch._C"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        (
            "from torch.autograd import forward_ad; forward_ad._current_level",
            "torch.autograd.forward_ad._current_level",
        ),
        (
            "import torch.distributed as dist; x: int = dist.distributed_c10d; x._world",
            "torch.distributed.distributed_c10d._world",
        ),
        ("import torch; getattr(torch, '_C')", "torch._C"),
        ("import torch; hasattr(torch.nn, '_reduction')", "torch.nn._reduction"),
        ("import torch; getattr(torch, f'_{name}')", "torch._"),
        ("import torch; vars(torch)['_C']", "torch._C"),
        ("from torch import Tensor as T; T._make_subclass", "torch.Tensor._make_subclass"),
        ("import importlib; importlib.import_module('torch._inductor')", "torch._inductor"),
        ("mode = 'torch._dynamo'", "torch._dynamo"),
        ("f'torch._inductor.{name}'", "torch._inductor."),
    ],
)
def test_private_names_are_found_behind_aliases_and_in_strings(code: str, name: str) -> None:
    assert _private_names(code) == [name]


def test_public_and_documented_names_pass() -> None:
    code = "import torch; torch._foreach_add_; torch.__version__; torch.ops.aten._to_copy; self._C; getattr(self, '_C')"
    assert _private_names(f'"""torch._C"""\n{code}; "a text on torch._C"') == []


def _private_names(code: str) -> list[str]:
    """The private names of torch in a file; docstrings, and strings that begin otherwise, are left out."""
    nodes = list(ast.walk(ast.parse(code)))
    known, docstrings = _aliases(nodes), {id(x) for x in _docstrings(nodes)}
    found = {name for node in nodes if id(node) not in docstrings for name in _named(node, known)}
    return sorted(name for name in found if PRIVATE.match(name) and not DOCUMENTED.match(name))


def _aliases(nodes: list[ast.AST]) -> dict[str, str]:
    """Names of a file -> the modules and objects of torch that they are."""
    known: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            known |= {x.asname or "torch": x.name if x.asname else "torch" for x in node.names if _of_torch(x.name)}
        elif isinstance(node, ast.ImportFrom) and _of_torch(node.module):
            known |= {x.asname or x.name: f"{node.module}.{x.name}" for x in node.names}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and (path := _path(node.value, known)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known |= {x.id: path for x in targets if isinstance(x, ast.Name)}
    return known


def _of_torch(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "torch"


def _path(node: ast.AST | None, known: dict[str, str]) -> str:
    """The dotted path of an expression that names a part of torch; empty for others."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute):
        return _joined(_path(node.value, known), node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call) and _is_call(node.value, "vars"):
        return _joined(_path(node.value.args[0], known), _text(node.slice))
    if isinstance(node, ast.Call) and _is_call(node, "getattr", "hasattr", "setattr", "delattr"):
        return _joined(_path(node.args[0], known), _text(node.args[1]))
    return ""


def _is_call(node: ast.Call, *names: str) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in names


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else ""


def _text(node: ast.AST) -> str:
    """A string, or the beginning of one that is put together."""
    if isinstance(node, ast.JoinedStr) and node.values:
        return _text(node.values[0])
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _named(node: ast.AST, known: dict[str, str]) -> list[str]:
    """The paths that begin with torch in one node of the syntax tree, without the nodes below it."""
    if isinstance(node, ast.Import):
        return [x.name for x in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{x.name}" for x in node.names]
    return [_path(node, known) or _text(node)]


def _docstrings(nodes: list[ast.AST]) -> list[ast.expr]:
    bodies = [node.body for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return [body[0].value for body in bodies if body and isinstance(body[0], ast.Expr)]
