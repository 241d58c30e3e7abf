"""Habits of names and sentences in the package, as rates; `scripts/prose` prints them beside their limits.

Rates are per 1,000 words of docstrings and comments, unless a row says otherwise. A word in backticks is code, and does
not count.
"""

import ast
import collections
import dataclasses
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

# Name of the rate -> its limit: a ceiling, or for `EXAMPLES` and `RULES` a floor. A limit is moved to the rate that is
# reached, never back.
ONE_WORD = "function names of one word, %"
PARTICIPLES = "function names that begin with a participle, preposition or pronoun, %"
TWO_ROOMS = "class names that belong to two rooms"
SMALL_FILES = "files under 40 code lines, %"
IMPORTS = "own names that a file imports, median"
ARTICLES = "docstrings that open with The, A, An, %"
NO_NOUN = "argument descriptions that begin without a noun, %"
EXAMPLES = "for example, such as, e.g."
RULES = "messages with expected, must, should, got (per 1,000 words of messages)"
SEMICOLONS = "semicolons in messages (per 1,000 words of messages)"
PHRASES = {
    "that of, those of": r"\b(that|those) of\b",
    "pronouns": r"\b(it|its|they|their|them|this|that|these|those)\b",
    "semicolons": r";",
    "one, ones, others": r"\b(ones?|others)\b",
    "which, whose, who": r"\b(which|whose|whom?)\b",
    "own": r"\bown\b",
    "alone, beside": r"\b(alone|beside)\b",
    "apart, anew, alike, likewise, meanwhile": r"\b(apart|anew|alike|likewise|meanwhile)\b",
    EXAMPLES: r"\b(for example|for instance|such as)\b|\be\.g\.",
}
LIMITS = {
    ONE_WORD: 31.6,
    PARTICIPLES: 4.8,
    TWO_ROOMS: 6,
    SMALL_FILES: 10,
    # It was 6 with 845 files. With 610 a file is a whole concept, and imports more names: compare it at equal sizes.
    IMPORTS: 8,
    ARTICLES: 3.1,
    NO_NOUN: 1.2,
    "that of, those of": 0.25,
    "pronouns": 28.5,
    "semicolons": 1.18,
    "one, ones, others": 3.1,
    "which, whose, who": 4.47,
    "own": 0.55,
    "alone, beside": 0.17,
    "apart, anew, alike, likewise, meanwhile": 0.12,
    EXAMPLES: 2,
    RULES: 29,
    SEMICOLONS: 3.6,
}
FLOORS = {EXAMPLES, RULES}
# First words of a function's name that are neither a verb nor a noun.
FIRST_WORDS = set(
    "of as for from in by at on to with without under over beside between into per and or if where when while than "
    "that those this these it its given kept taken made passed drawn laid dealt sent found held seen known owed joined "
    "counted sorted moved narrowed looked heard noted used any all each one no both other another same own".split()
)
NOT_A_NOUN = re.compile(
    r"^(of|as|for|from|in|by|at|on|to|with|without|under|those|that|whose|whether it|if|where|when|likewise|also|it|its"
    r"|them|their|the same)\b",
    re.I,
)
_ARGUMENT = re.compile(r"\s{2,8}\*{0,2}[a-z_A-Z, ]{1,30}: (.+)")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass
class Found:
    """Names, texts and sizes in the files of a package."""

    prose: list[str] = dataclasses.field(default_factory=list)
    messages: list[str] = dataclasses.field(default_factory=list)
    functions: list[str] = dataclasses.field(default_factory=list)
    docstrings: list[str] = dataclasses.field(default_factory=list)
    arguments: list[str] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)
    imports: list[int] = dataclasses.field(default_factory=list)
    rooms: dict[str, set[str]] = dataclasses.field(default_factory=lambda: collections.defaultdict(set))


def rates(package: pathlib.Path) -> dict[str, float]:
    """Returns the rates of a package by their names, in the order of `LIMITS`."""
    found = Found()
    for path in sorted(package.rglob("*.py")):
        _read(path, package, found)
    first = [name.split("_")[0] for name in found.functions]
    out = {
        ONE_WORD: _percent(["_" not in name for name in found.functions]),
        PARTICIPLES: _percent([word in FIRST_WORDS for word in first]),
        TWO_ROOMS: float(sum(len(rooms) > 1 for rooms in found.rooms.values())),
        SMALL_FILES: _percent([size < 40 for size in found.sizes]),
        IMPORTS: float(sorted(found.imports)[len(found.imports) // 2]),
        ARTICLES: _percent([bool(re.match(r"(The|A|An)\b", text)) for text in found.docstrings]),
        NO_NOUN: _percent([bool(NOT_A_NOUN.match(text)) for text in found.arguments]),
    }
    prose, messages = "\n".join(found.prose), "\n".join(found.messages)
    out |= {name: _per_thousand(phrase, prose) for name, phrase in PHRASES.items()}
    out[RULES] = _per_thousand(r"\b(expected|must|should|got)\b", messages)
    out[SEMICOLONS] = _per_thousand(";", messages)
    return out


def missed(found: dict[str, float]) -> list[str]:
    """Returns a line for each rate that is on the wrong side of its limit."""
    out = []
    for name, limit in LIMITS.items():
        if found[name] < limit if name in FLOORS else found[name] > limit:
            out.append(f"{name}: {found[name]:.2f}, and the {'floor' if name in FLOORS else 'ceiling'} is {limit}")
    return out


def _percent(flags: list[bool]) -> float:
    return 100 * sum(flags) / max(1, len(flags))


def _per_thousand(phrase: str, text: str) -> float:
    plain = _without_code(text)
    return 1000 * len(re.findall(phrase, plain, re.I)) / max(1, len(re.findall(r"[A-Za-z']+", plain)))


def _without_code(text: str) -> str:
    return re.sub(r"``?[^`]*`", " ", text)


def _read(path: pathlib.Path, package: pathlib.Path, found: Found) -> None:
    """Adds the contents of a file to `found`."""
    text = path.read_text()
    tree = ast.parse(text)
    lines = text.split("\n")
    found.prose += _comments(text)
    no_code = {n for n, line in enumerate(lines, 1) if not line.strip() or line.strip().startswith("#")}
    relative = path.relative_to(package).parts
    imports = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == package.name):
            imports += len(node.names)
        elif isinstance(node, _Function) and not node.name.startswith("__"):
            found.functions.append(node.name.strip("_"))
        elif isinstance(node, ast.ClassDef):
            found.rooms[node.name.lstrip("_")].add(relative[0] if len(relative) > 1 else ".")
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found.messages += filter(None, map(_text_of, node.exc.args))
        if isinstance(node, ast.Module | ast.ClassDef | _Function) and (docstring := ast.get_docstring(node)):
            no_code |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
            _read_docstring(docstring, isinstance(node, ast.Module), found)
    if path.name != "__init__.py":
        found.sizes.append(sum(n not in no_code for n in range(1, len(lines))))
        found.imports.append(imports)


def _read_docstring(text: str, of_module: bool, found: Found) -> None:
    found.prose.append("\n".join(x for x in text.split("\n") if not x.strip().startswith((">>>", "..."))))
    if not of_module:
        found.docstrings.append(text)
    found.arguments += arguments(text)


def arguments(docstring: str) -> Iterator[str]:
    """Yields the descriptions of a docstring's arguments, each from its first word to the end of the line."""
    inside = False
    for line in docstring.split("\n"):
        if re.match(r"\s*(Args|Attributes):", line):
            inside = True
        elif re.match(r"\S", line):
            inside = False
        argument = _ARGUMENT.match(line) if inside else None
        if argument:
            yield "code" if argument[1].startswith("`") else _without_code(argument[1]).strip()


def _comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(type:|noqa|pyright|!)", token.string):
            yield token.string.lstrip("# ")


def _text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(x.value) if isinstance(x, ast.Constant) else "X" for x in node.values)
    return ""
