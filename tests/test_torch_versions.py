"""Covers the versions of torch: those of the project's requirement, refusals, and private names in one room."""

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
PRIVATE = re.compile(
    r"\btorch(\.[A-Za-z]\w*)*\._\w+|^\s*from torch(\.\w+)*\._\w+.* import|^\s*from torch[\w.]* import .*\b_\w+", re.M
)


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
        if path.parent.name == "_torch":
            continue
        code = re.sub(r'"""(.|\n)*?"""|#.*', "", path.read_text())
        found += [
            f"{path.relative_to(ROOT)}: {x[0].strip()}" for x in PRIVATE.finditer(code) if not DOCUMENTED.search(x[0])
        ]
    assert not found
