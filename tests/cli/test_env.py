"""Covers `shardfn env`: found and missing parts of a machine, and the features that the missing ones disable."""

import shutil
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch

from shardfn.cli import _env, main


def test_it_lists_the_installed_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = {line.split("  ")[0]: line for line in lines if "  " in line.strip()}
    assert torch.__version__.split("+")[0] in told["torch"]
    assert "yes" in told["gloo"] and "GiB" in told["memory"]
    assert lines[-1] == "all of it works" or "not there:" in lines


def test_it_lists_features_that_lack_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(_env.importlib.metadata, "version", missing)
    monkeypatch.setattr(_env, "cxx_compiler", lambda: None)
    text = _env.env_text()
    below = text[text.index("not there:") :]
    assert "triton: kernels on a GPU" in below and "C++ compiler: kernels in C++" in below
    assert "not installed" in text.splitlines()[0]


def test_a_compiler_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no compiler")
    monkeypatch.setattr(_env, "_PROBE", "this is no C++")
    (found,) = [x for x in _env.facts() if x.what == "C++ compiler"]
    assert "CalledProcessError" in found.found and "gloo do without" in found.lacks
