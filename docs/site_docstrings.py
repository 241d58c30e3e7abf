"""Docstrings as Markdown: an entry of the reference, from the source of a class or a function.

Signatures are the text of the source, so that an entry does not depend on the version of Python.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import pathlib
import re
import textwrap
from collections.abc import Iterator

WIDTH = 100
_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "References")
_TITLES = {"Args": "Arguments"}
_ITEM = re.compile(r"((?:\*{0,2}[\w.\[\]]+(?:, )?)+): +(.*)", re.S)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Defined = ast.ClassDef | _Function
Source = tuple[str, ...]  # the lines of a file


def entry(path: str, value: object) -> str:
    """The entry of a public class or function, and those of a class's methods below it."""
    name = path.rsplit(".", 1)[1]
    out = [_anchor(path), f"### {name}", _code(_signature(name, value)), _docstring(inspect.getdoc(value) or "")]
    if inspect.isclass(value):
        out += _methods(path, name, value)
    return "\n\n".join(filter(None, out))


def _anchor(path: str) -> str:
    return f'<a id="{path}"></a>'


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


# Docstrings.


def _docstring(text: str) -> str:
    """A Google docstring as Markdown: its description, and a title and a list for each section."""
    found = re.split(rf"^({'|'.join(_SECTIONS)}):\n", text, flags=re.M)
    parts = [_description(found[0])]
    for title, body in zip(found[1::2], found[2::2], strict=True):
        parts += [f"**{_TITLES.get(title, title)}**", _section(title, textwrap.dedent(body).strip("\n"))]
    return "\n\n".join(parts)


def _description(text: str) -> str:
    """The paragraphs. Those that are indented are code, and those with columns are laid out by hand."""
    out = []
    for paragraph in re.split(r"\n{2,}", text.strip()):
        lines = paragraph.splitlines()
        if all(line.startswith("    ") for line in lines) or any(re.search(r"\S {3,}\S", line) for line in lines):
            out.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
        else:
            out.append(_prose(paragraph))
    return "\n\n".join(out)


def _prose(text: str) -> str:
    """Text whose characters are its own: outside of code `<` begins no markup."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(x if i % 2 else re.sub(r"<(?=[\w/])", r"\\<", x) for i, x in enumerate(pieces))


def _section(title: str, body: str) -> str:
    if title == "Example":
        return _code(body)
    if title in ("Returns", "Yields"):
        return _description(body)
    shown = "\n".join(_item(x) for x in _items(body))
    return re.sub(r"https?://[^\s,)]+", r"<\g<0>>", shown) if title == "References" else shown


def _items(body: str) -> Iterator[str]:
    """The entries of a section: a line, and the lines below it that are indented."""
    entry: list[str] = []
    for line in body.splitlines():
        if entry and line and not line[0].isspace():
            yield "\n".join(entry)
            entry = []
        entry.append(line.strip())
    yield "\n".join(entry)


def _item(text: str) -> str:
    named = _ITEM.fullmatch(text)
    names, words = (named[1].split(", "), named[2]) if named else ([], text)
    head = ", ".join(f"`{name}`" for name in names) + (": " if names else "")
    return "- " + head + _prose(words.strip()).replace("\n", "\n  ")


# Signatures.


def _signature(name: str, value: object) -> str:
    node = defined(value)
    if node is None:
        return f"{name}{inspect.signature(value)}"
    if not isinstance(node, ast.ClassDef):
        return _def(name, node, _source(value))
    fields = _fields(value)
    if fields is not None:
        return _call(f"class {name}", fields)
    bases = [base for base in map(ast.unparse, node.bases) if not base.startswith("_")]
    init = next((m for m in _members(value) if m.name == "__init__"), None)
    if init is not None and "Protocol" not in bases:
        return _call(f"class {name}", _parameters(init, _source(value))[1:])
    return f"class {name}" + (f"({', '.join(bases)})" if bases else "")


def _def(name: str, node: _Function, source: Source) -> str:
    given = _parameters(node, source)
    returned = f" -> {_text(node.returns, source)}" if node.returns else ""
    opens = [d for d in node.decorator_list if ast.unparse(d).endswith("contextmanager")]
    return ("@contextmanager\n" if opens else "") + _call(f"def {name}", given, returned)


def _call(head: str, given: list[str], tail: str = "") -> str:
    line = f"{head}({', '.join(given)}){tail}"
    if len(line) <= WIDTH or not given:
        return line
    return "\n".join([f"{head}(", *(f"    {x}," for x in given), f"){tail}"])


def _parameters(node: _Function, source: Source) -> list[str]:
    """The parameters of a function, with `*` and `/` between them."""
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    defaults = [*itertools.repeat(None, len(plain) - len(a.defaults)), *a.defaults]
    out = [_parameter(x, default, source) for x, default in zip(plain, defaults, strict=True)]
    if a.posonlyargs:
        out.insert(len(a.posonlyargs), "/")
    if a.vararg:
        out.append(f"*{_parameter(a.vararg, None, source)}")
    elif a.kwonlyargs:
        out.append("*")
    out += [_parameter(x, default, source) for x, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    return [*out, f"**{_parameter(a.kwarg, None, source)}"] if a.kwarg else out


def _parameter(x: ast.arg, default: ast.expr | None, source: Source) -> str:
    kind = f": {_text(x.annotation, source)}" if x.annotation else ""
    value = "" if default is None else (" = " if kind else "=") + _text(default, source)
    return f"{x.arg}{kind}{value}"


def _text(node: ast.expr | None, source: Source) -> str:
    """The source of an expression, on one line and without comments."""
    assert node is not None and node.end_lineno is not None
    lines = list(source[node.lineno - 1 : node.end_lineno])
    lines[-1] = lines[-1][: node.end_col_offset]  # in bytes, and our sources are ASCII
    lines[0] = lines[0][node.col_offset :]
    if len(lines) == 1:
        return lines[0]
    line = " ".join(re.sub(r"  #.*", "", line).strip() for line in lines)
    return re.sub(r",? ?([)\]}])$", r"\1", re.sub(r"([(\[{]) ", r"\1", line))


def _fields(value: type) -> list[str] | None:
    """The fields of a dataclass or a NamedTuple as parameters; None for other classes."""
    if dataclasses.is_dataclass(value):
        chosen = {x.name: x.kw_only for x in dataclasses.fields(value) if x.init and not x.name.startswith("_")}
        if "__init__" in vars(value) and not _is_made(value):
            return None
    elif issubclass(value, tuple) and hasattr(value, "_fields"):
        chosen = dict.fromkeys(value._fields, False)
    else:
        return None
    written: dict[str, str] = {}
    for base in reversed(value.__mro__):
        node = defined(base)
        for x in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name):
                written[x.target.id] = _field(x, _source(base))
    out = [written[name] for name in chosen if not chosen[name]]
    later = [written[name] for name in chosen if chosen[name]]
    return [*out, *(["*", *later] if later else [])]


def _is_made(value: type) -> bool:
    """Whether the dataclass has made the `__init__`."""
    return not any(x.name == "__init__" for x in _members(value))


def _field(x: ast.AnnAssign, source: Source) -> str:
    kind = f"{x.target.id}: {_text(x.annotation, source)}"
    if x.value is None:
        return kind
    if isinstance(x.value, ast.Call) and ast.unparse(x.value.func) in ("dataclasses.field", "field"):
        given = {word.arg: word.value for word in x.value.keywords}
        if "default" in given:
            return f"{kind} = {_text(given['default'], source)}"
        made = given.get("default_factory")
        first = "..." if isinstance(made, ast.Lambda) else f"{ast.unparse(made)}()" if made else ""
        return f"{kind} = {first}" if made else kind
    return f"{kind} = {_text(x.value, source)}"


# Methods.


def _methods(path: str, name: str, value: type) -> Iterator[str]:
    source = _source(value)
    for node in _members(value):
        text = ast.get_docstring(node)
        if not text or (node.name.startswith("_") and node.name != "__call__"):
            continue
        marks = [ast.unparse(d) for d in node.decorator_list]
        if any(mark.endswith((".setter", ".deleter")) for mark in marks):
            continue
        yield _anchor(f"{path}.{node.name}")
        yield f"#### {name}.{node.name}"
        if any(mark.endswith("property") for mark in marks):
            returned = f": {_text(node.returns, source)}" if node.returns else ""
            yield _code(f"{node.name}{returned}  # a property")
        else:
            kinds = [f"@{mark}\n" for mark in marks if mark in ("classmethod", "staticmethod")]
            yield _code("".join(kinds) + _def(node.name, node, source))
        yield _docstring(text)


def _members(value: type) -> list[ast.FunctionDef]:
    """The functions in the body of a class, the last one of each name."""
    node = defined(value)
    found = {x.name: x for x in node.body if isinstance(x, ast.FunctionDef)} if isinstance(node, ast.ClassDef) else {}
    return list(found.values())


# Sources.


def defined(value: object) -> _Defined | None:
    """The statement that defines a class or a function of the package; None if it is not one of its source."""
    value = inspect.unwrap(value) if callable(value) and not inspect.isclass(value) else value
    if not getattr(value, "__module__", "").startswith("shardfn"):
        return None
    return _definitions(_file(value)).get(getattr(value, "__qualname__", ""))


def _source(value: object) -> Source:
    return _lines(_file(value))


@functools.cache
def _lines(file: pathlib.Path) -> Source:
    return tuple(file.read_text().splitlines())


def _file(value: object) -> pathlib.Path:
    value = inspect.unwrap(value) if callable(value) and not inspect.isclass(value) else value
    file = inspect.getsourcefile(value)
    assert file is not None, value
    return pathlib.Path(file)


@functools.cache
def _definitions(file: pathlib.Path) -> dict[str, _Defined]:
    found: dict[str, _Defined] = {}

    def visit(body: list[ast.stmt], before: str) -> None:
        for node in body:
            if isinstance(node, _Defined):
                found[before + node.name] = node
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{before}{node.name}.")

    visit(ast.parse(file.read_text()).body, "")
    return found
