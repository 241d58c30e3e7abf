"""Changes each page in `mkdocs build`: links to programs get a page, names of the library a link to the reference."""

import pathlib
import posixpath
import re
from typing import Any

import make_reference
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_NAME = re.compile(r"(?<![\[`])`((?:sf|step)(?:\.\w+)+|[A-Z]\w*)([^`\n]*)`(?![\]`])")
_STEP = ("apply", "cache_info", "close", "evaluate", "init", "loss", "lower", "resume", "rows", "specs")


def _reference() -> dict[str, str]:
    """Names as scripts write them -> the page of the reference and the anchor there."""
    found: dict[str, str] = {}
    for file, text in sorted(_PAGES.items()):
        for name in re.findall(r'^<a id="(shardfn\.[\w.]+)"></a>$', text, re.M):
            found["sf" + name.removeprefix("shardfn")] = f"{file}#{name}"
    short = re.findall(r"\[`(sf\.\w+)`\]\((\S+?\.md#[\w.]+)\)", _PAGES["index.md"])
    classes = {name.removeprefix("sf."): anchor for name, anchor in short if name[3].isupper()}
    methods = {f"step.{name}": f"transforms.md#shardfn.transforms.ShardedStep.{name}" for name in _STEP}
    return found | dict(short) | classes | methods


_PAGES = make_reference.pages()
_KNOWN = _reference()


def on_files(files: Files, config: Any, **rest: Any) -> Files:
    """Adds the pages of the reference, and a page for each file outside of docs/ that a page links to."""
    del rest
    for file, text in _PAGES.items():
        old = files.get_file_from_path(f"reference/{file}")  # written by hand, and not newer
        if old is not None:
            files.remove(old)
        files.append(File.generated(config, f"reference/{file}", content=text))
    for path in sorted({path for page in _written() for path in _outside(page)}):
        source = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        page = f"# {source}\n\n````{_language(path)}\n{text}\n````\n"
        page = _moved(text, path) if path.suffix == ".md" else page
        files.append(File.generated(config, f"source/{source}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Page, **rest: Any) -> str:
    """Outside of code: links that leave docs/ go to their page, and inline `sf.name` becomes a link."""
    del rest
    here = DOCS / page.file.src_uri
    if page.file.src_uri.startswith(("source/", "reference/")):
        return markdown
    out, last = [], 0
    for fence in _FENCE.finditer(markdown):
        out += [_prose(markdown[last : fence.start()], here), fence[0].replace("```python notest", "```python", 1)]
        last = fence.end()
    return "".join([*out, _prose(markdown[last:], here)])


def _prose(text: str, page: pathlib.Path) -> str:
    def link(found: re.Match[str]) -> str:
        path = (page.parent / found[1]).resolve()
        if "://" in found[1] or path.is_relative_to(DOCS) or not path.is_file():
            return found[0]
        to = DOCS / "source" / f"{path.relative_to(ROOT).as_posix()}.md"
        return f"]({posixpath.relpath(to.as_posix(), page.parent.as_posix())})"

    def name(found: re.Match[str]) -> str:
        target = _KNOWN.get(found[1])
        return f"[{found[0]}]({reference}/{target})" if target else found[0]

    reference = posixpath.relpath((DOCS / "reference").as_posix(), page.parent.as_posix())
    lines = _LINK.sub(link, text).split("\n")
    return "\n".join(line if line.startswith("#") else _NAME.sub(name, line) for line in lines)


def _written() -> list[pathlib.Path]:
    """Returns the pages that are written by hand."""
    return [page for page in DOCS.rglob("*.md") if page.parent != make_reference.OUT]


def _outside(page: pathlib.Path) -> set[pathlib.Path]:
    """The files of the repository, outside of docs/, that a page links to."""
    links = _LINK.findall(_FENCE.sub("", page.read_text()))
    paths = {(page.parent / link).resolve() for link, _ in links if "://" not in link}
    return {path for path in paths if path.is_file() and not path.is_relative_to(DOCS) and path.is_relative_to(ROOT)}


def _moved(text: str, path: pathlib.Path) -> str:
    """The text of a page that lies outside of docs/, with links that hold from its page of the site."""
    here = (DOCS / "source" / path.relative_to(ROOT)).parent

    def link(found: re.Match[str]) -> str:
        target = (path.parent / found[2]).resolve()
        if "://" in found[2]:
            return found[0]
        if target.is_file() and target.is_relative_to(DOCS):
            return f"{found[1]}({posixpath.relpath(target.as_posix(), here.as_posix())}{found[3] or ''})"
        return found[1].strip("[]")  # files without a page in the site

    return re.sub(r"(!?\[[^\[\]]*\])\(([^)#\s]+)(#[^)\s]*)?\)", link, text)


def _language(path: pathlib.Path) -> str:
    return {".py": "python", ".sh": "bash", "": "bash"}.get(path.suffix, "text")
