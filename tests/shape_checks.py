"""Checks arguments and results of functions by their annotations: shapes as jaxtyping does, the rest by beartype.

jaxtyping's own import hook binds the arguments of each call anew, checks them twice, and makes its checks anew wherever
a function inside a function is defined: two thirds of the ranks' computing time in a test. Here the checks of a
function are made once, when it is called first, for all functions of the same code, and sizes have names only in calls
whose annotations have shapes.
"""

import ast
import contextlib
import dataclasses
import enum
import functools
import importlib.machinery
import importlib.util
import inspect
import marshal
import os
import pathlib
import struct
import sys
import types
import typing
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from typing import Any, Union

import jaxtyping
from beartype import BeartypeConf, beartype

# The tower accepts an int as a float, as Python's type checkers do.
_CONF = BeartypeConf(is_pep484_tower=True, violation_type=jaxtyping.TypeCheckError)
_VERSION = f"checks{zlib.crc32(pathlib.Path(__file__).read_bytes()):x}"
# Code that names a line of the user's skips frames with this file name, as it skips those that beartype makes.
_FILE = "<@beartype of shape_checks>"
_ACTIVE = [True]
_CHECKS: dict[int, "Checks"] = {}  # by the id of the code, which they keep


def install(modules: Sequence[str]) -> None:
    """Adds checks to all later imports of these modules and of those within them."""
    sys.meta_path.insert(0, _Finder(tuple(modules)))


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Turns all checks off inside: a user's mistake meets the package's own errors."""
    before, _ACTIVE[0] = _ACTIVE[0], False
    try:
        yield
    finally:
        _ACTIVE[0] = before


def checked(of: Any) -> Any:
    """A function, or the `__init__` of a dataclass, that checks its calls; others are returned unchanged."""
    if isinstance(of, type):
        if dataclasses.is_dataclass(of) and "__init__" in vars(of):
            of.__init__ = checked(vars(of)["__init__"])
        return of
    if not isinstance(of, types.FunctionType) or of.__globals__ is globals():
        return of
    checks = _CHECKS.get(id(of.__code__))
    if checks is None:
        checks = _CHECKS[id(of.__code__)] = Checks(of)
    return _plain(of, checks) if not checks.shapes else _with_shapes(of, checks)


class Checks:
    """The checks at calls of all functions with one code object.

    Attributes:
        shapes: whether a shape is annotated.
        arguments: is called with a call's arguments.
        returned: is called with the call's result.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self._code, self._module, self._qualname = function.__code__, function.__module__, function.__qualname__
        self._hints = {name: _resolved(hint, function) for name, hint in function.__annotations__.items()}
        self.shapes = any(map(_has_shape, self._hints.values()))
        signature = inspect.signature(function)
        # Nothing here may hold the values that a function inside a function holds, which must end with it.
        self._signature = _without_values(signature) if "<locals>" in self._qualname else signature
        self.arguments: Callable[..., Any] = self._first_arguments
        self.returned: Callable[[Any], Any] = self._first_returned

    def _first_arguments(self, *args: Any, **kwargs: Any) -> Any:
        hints = {name: hint for name, hint in self._hints.items() if name != "return"}
        parameters = self._signature.parameters
        for name in hints.keys() & {n for n, p in parameters.items() if p.default is _Omitted.VALUE}:
            hints[name] = Union[hints[name], _Omitted]  # noqa: UP007 `|` takes no jaxtyping
        self.arguments = self._make(self._signature, hints)
        return self.arguments(*args, **kwargs)

    def _first_returned(self, value: Any) -> Any:
        returns = inspect.Parameter("value", inspect.Parameter.POSITIONAL_ONLY)
        hints = {name: hint for name, hint in self._hints.items() if name == "return"}
        self.returned = self._make(inspect.Signature([returns]), hints)
        return self.returned(value)

    def _make(self, signature: inspect.Signature, hints: dict[str, Any]) -> Callable[..., Any]:
        """A function of this signature that checks, and returns its first argument."""
        defaults = {f"_{name}_": p.default for name, p in signature.parameters.items() if p.default is not p.empty}
        parameters = [
            p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else _Name(f"_{name}_"))
            for name, p in signature.parameters.items()
        ]
        first = next(iter(signature.parameters), "None")
        name = self._code.co_name if self._code.co_name.isidentifier() else "function"
        scope = {**defaults, "__name__": self._module}
        exec(f"def {name}{inspect.Signature(parameters)}: return {first}", scope)
        check: Any = scope[name]
        check.__qualname__, check.__annotations__ = self._qualname, hints
        return beartype(conf=_CONF)(check)


class _Omitted(enum.Enum):
    """The placeholder of a default."""

    VALUE = 0


def _without_values(signature: inspect.Signature) -> inspect.Signature:
    """The signature, with no default but numbers and words, which hold nothing."""
    kept = (type(None), bool, int, float, str)
    parameters = [
        p if p.default is p.empty or isinstance(p.default, kept) else p.replace(default=_Omitted.VALUE)
        for p in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters)


class _Name(str):
    """A default in the text of a signature."""

    __repr__ = str.__str__


def _plain(function: types.FunctionType, checks: Checks) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _ACTIVE[0]:
            return function(*args, **kwargs)
        checks.arguments(*args, **kwargs)
        return checks.returned(function(*args, **kwargs))

    return call


def _with_shapes(function: types.FunctionType, checks: Checks) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _ACTIVE[0]:
            return function(*args, **kwargs)
        with jaxtyping.jaxtyped("context"):
            checks.arguments(*args, **kwargs)
            return checks.returned(function(*args, **kwargs))

    return call


def _without_file(make: Any) -> None:
    """Names the file of the code of a function's inner `call` as that of generated code."""
    constants = [c.replace(co_filename=_FILE) if isinstance(c, types.CodeType) else c for c in make.__code__.co_consts]
    make.__code__ = make.__code__.replace(co_consts=tuple(constants))


_without_file(_plain)
_without_file(_with_shapes)


def _resolved(hint: Any, function: types.FunctionType) -> Any:
    """The hint, with names in quotes resolved; Any where that is not yet possible."""
    if not isinstance(hint, str) and "ForwardRef" not in repr(hint):
        return hint
    holder = types.SimpleNamespace(__annotations__={"hint": hint})
    try:
        return typing.get_type_hints(holder, function.__globals__, include_extras=True)["hint"]
    except Exception:
        return Any


def _has_shape(hint: Any) -> bool:
    inner = [*typing.get_args(hint)] if not isinstance(hint, list) else hint
    return (isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)) or any(map(_has_shape, inner))


class _Decorate(ast.NodeTransformer):
    """Puts `checked` innermost on each function that has annotations, outermost on each class."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if any(getattr(d, "id", None) == "no_type_check" for d in node.decorator_list):
            return node
        a = node.args
        parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(p for p in (a.vararg, a.kwarg) if p)]
        if node.returns is not None or any(p.annotation for p in parameters):
            node.decorator_list.append(_decorator(node))
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list.insert(0, _decorator(node))
        return self.generic_visit(node)


def _decorator(at: ast.stmt) -> ast.expr:
    decorator = ast.parse('__import__("shape_checks").checked', mode="eval").body
    for node in ast.walk(decorator):
        ast.copy_location(node, at)
    return decorator


class _Loader(importlib.machinery.SourceFileLoader):
    """Keeps compiled files beside Python's own, under a name that changes with this file."""

    def get_code(self, fullname: str) -> types.CodeType:
        status = os.stat(self.path)
        head = struct.pack("<qq", status.st_mtime_ns, status.st_size)
        kept = pathlib.Path(importlib.util.cache_from_source(self.path, optimization=_VERSION))
        with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
            data = kept.read_bytes()
            if data[: len(head)] == head:
                return marshal.loads(data[len(head) :])
        tree = _Decorate().visit(ast.parse(self.get_data(self.path), self.path))
        code = compile(tree, self.path, "exec", dont_inherit=True)
        if not sys.dont_write_bytecode:
            with contextlib.suppress(OSError):
                kept.parent.mkdir(exist_ok=True)
                temporary = kept.with_name(f"{kept.name}.{os.getpid()}")
                temporary.write_bytes(head + marshal.dumps(code))
                temporary.replace(kept)
        return code


class _Finder(MetaPathFinder):
    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not any(fullname == m or fullname.startswith(f"{m}.") for m in self._modules):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
