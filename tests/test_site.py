"""Covers the site: each page has its place, links and their anchors exist, generated pages are new, and it builds."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types
import xml.etree.ElementTree

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *DOCS.rglob("*.md")])
PAGES = [page for page in PAGES if page.parent != DOCS / "reference"]  # made with the site
_FENCE = re.compile(r"^(`{3,})[^`\n]*\n.*?^\1\s*$", re.M | re.S)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def _script(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it of plain letters."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


def _anchors(page: pathlib.Path) -> set[str]:
    text = _FENCE.sub("", page.read_text())
    found = {_slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)}
    return found | set(re.findall(r'^<a id="([\w.]+)"></a>$', text, re.M))


def _links(page: pathlib.Path) -> list[str]:
    return _LINK.findall(_FENCE.sub("", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_exist(page: pathlib.Path) -> None:
    broken = []
    for link in _links(page):
        if re.match(r"\w+:", link):
            assert link.startswith(("https://", "http://")), f"{link}: neither a file nor a page of the web"
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_link_check_sees_missing_targets(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title, `code`\n\n[here](#a-title-code) [gone](#b) [file](none.md) [web](https://a.b)\n")
    assert _links(page) == ["#a-title-code", "#b", "none.md", "https://a.b"]
    assert _anchors(page) == {"a-title-code"}


def test_every_page_has_its_place_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    named = re.findall(r"([\w./-]+\.md)$", nav, re.M)
    assert len(named) == len(set(named))
    made = {name for name in named if name.startswith("reference/")}
    rooms = {f"reference/{room}.md" for room in ["index", *re.findall(r"- shardfn\.([\w.]+): reference/", nav)]}
    assert made == rooms
    assert set(named) - made == {page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS)}


def test_the_list_of_public_names_is_complete() -> None:
    code = "import json, make_reference as m; print(json.dumps([m.public_names(), m.pages()]))"
    env = os.environ | {"PYTHONPATH": f"{DOCS}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    names, pages = json.loads(done.stdout)
    listed = (DOCS / "names.txt").read_text().splitlines()
    missing, gone = sorted(set(names) - set(listed)), sorted(set(listed) - set(names))
    assert (missing, gone) == ([], []), "public names have changed: run python docs/make_reference.py --names"
    assert "sf.sharded_step" in names and "shardfn.optim.adamw" in names
    entries = re.findall(
        r'^<a id="shardfn.optim.adamw"></a>\n\n### adamw\n\n```python\ndef adamw\(', pages["optim.md"], re.M
    )
    assert len(entries) == 1 and not any(re.search(r"^:::", text, re.M) for text in pages.values())


def test_the_notebook_is_its_page() -> None:
    made = _script("make_notebook").notebook((DOCS / "several_ranks.md").read_text())
    assert (DOCS / "several_ranks.ipynb").read_text() == made, "run python docs/make_notebook.py"


def test_the_picture_of_the_readme_shows_the_published_results() -> None:
    peers = _script("make_peers")
    peaks = {peer: float(cells[0]) for peer, cells in peers.rows(peers.PEAKS).items()}
    made = peers.picture(peers.ratios(peers.TIMES), peaks)
    assert (DOCS / "figures/peers.svg").read_text() == made, "run python docs/make_peers.py"
    readme = (ROOT / "README.md").read_text()
    for peer in ("fsdp2", "deepspeed3", "shardfn3"):
        median, low, high = peers.ratios(peers.TIMES)[peer]
        assert re.search(rf"{median:.2f}\b.*?{low:.2f}.to.{high:.2f}", readme, re.S), (peer, median, low, high)
        assert f"{peaks[peer]:.0f}" in readme


@pytest.mark.nightly
def test_the_pictures_of_a_step_are_drawn(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = _script("make_figures")
    monkeypatch.setattr(figures, "OUT", tmp_path)
    figures.leaf()
    figures.schedule()
    for name, words in {"leaf.svg": "being gathered", "schedule.svg": "no prefetch"}.items():
        drawn = xml.etree.ElementTree.parse(tmp_path / name).getroot()
        texts = {"".join(text.itertext()) for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
        assert any(words in text for text in texts)
        assert len(list(drawn.iter("{http://www.w3.org/2000/svg}rect"))) > 6


@pytest.mark.nightly
def test_the_notebook_runs_and_prints_the_output_that_it_shows(tmp_path: pathlib.Path) -> None:
    cells = json.loads((DOCS / "several_ranks.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    shown = ["".join(line for out in cell.get("outputs", ()) for line in out["text"]) for cell in cells]
    program = tmp_path / "cells.py"
    program.write_text("\n\n".join(code))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=170, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(shown)


@pytest.mark.nightly
def test_the_site_builds_without_a_warning(tmp_path: pathlib.Path) -> None:
    for package in ("mkdocs", "material"):
        pytest.importorskip(package, reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"^WARNING", done.stderr, re.M)
    page = (tmp_path / "site/from_fsdp2/index.html").read_text()
    assert 'href="../reference/core/#shardfn.core.Zero"' in page  # inline names are links
    assert 'href="../source/README.md/"' in page  # files outside of docs/ have a page
    optimizers = (tmp_path / "site/reference/optim/index.html").read_text()
    assert 'id="shardfn.optim.adamw"' in optimizers


def test_the_jax_of_the_page_for_its_users_prints_the_same() -> None:
    page = (DOCS / "from_jax.md").read_text()
    theirs = re.findall(r"^```python notest\n(.*?)^```$", page, re.M | re.S)[0]
    shown = re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S)[0]
    python = shutil.which(os.environ.get("JAX_PYTHON", sys.executable))
    assert python
    has = subprocess.run([python, "-c", "import jax, optax"], capture_output=True, timeout=120)
    if has.returncode:
        pytest.skip("jax and optax are not installed; JAX_PYTHON names a Python that has them")
    done = subprocess.run([python, "-c", theirs], capture_output=True, text=True, timeout=120)
    assert done.stdout == shown, done.stderr
