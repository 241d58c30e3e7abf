"""Covers the warning at import where torch is not the one that is pinned."""

import pathlib
import re
import subprocess
import sys
import warnings

import pytest

from shardfn.core import check_torch
from shardfn.core._torch_version import MINOR

ROOT = pathlib.Path(__file__).parents[2]


def test_it_is_the_one_that_is_pinned() -> None:
    found = re.search(r'"torch==(\d+\.\d+)\.', (ROOT / "pyproject.toml").read_text())
    assert found is not None and found[1] == MINOR


@pytest.mark.parametrize(
    "version",
    [
        "2.12.1",
        pytest.param("2.14.0+cu130", marks=pytest.mark.nightly),
        pytest.param("3.13", marks=pytest.mark.nightly),
        "2.1",
    ],
)
def test_another_minor_is_told(version: str) -> None:
    with pytest.warns(
        UserWarning, match=rf"written for torch {MINOR}, and this is torch {re.escape(version)}.*pip inst"
    ):
        check_torch(version)


@pytest.mark.parametrize(
    "version",
    [
        MINOR,
        pytest.param(f"{MINOR}.0+cpu", marks=pytest.mark.nightly),
        pytest.param(f"{MINOR}.7", marks=pytest.mark.nightly),
        f"{MINOR}.0a0+git1234",
    ],
)
def test_the_same_minor_is_not(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch(version)


@pytest.mark.nightly
def test_it_is_told_once_at_import() -> None:
    program = "import torch; torch.__version__ = '2.99.0'; import shardfn, shardfn.optim; print('done')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, timeout=300
    )
    assert done.stdout == "done\n" and done.stderr.count("this is torch 2.99.0") == 1
