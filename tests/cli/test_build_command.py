"""Covers `shardfn build`: a line for each file, whether it is there or not; no later kernel is built."""

import os
import pathlib

import pytest

from shardfn.cli import main
from shardfn.kernels import _build, _sources, cxx_compiler

needs_compiler = pytest.mark.skipif(cxx_compiler() is None, reason="there is no C++ compiler")


@needs_compiler
def test_it_lists_all_files_and_builds_those_that_are_not_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"kernels/_chain.cpp": (), "kernels/_pool.cpp": ("-pthread",)}
    monkeypatch.setattr(_sources, "FLAGS", few)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for state in ("built", "was there"):
        assert main(["build"]) == 0
        said = capsys.readouterr().out
        for name in ("chain", "pool"):
            [line] = [line for line in said.splitlines() if line.split()[0] == name]
            assert state in line and str(tmp_path) in line
    assert len(os.listdir(tmp_path / "shardfn")) == len(few)


def test_without_a_compiler_the_status_is_1(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_sources, "compiler", lambda: None)
    monkeypatch.setattr(_sources, "SHIPPED", tmp_path)
    monkeypatch.setattr(_build, "cxx_compiler", lambda: None)
    assert main(["build"]) == 1
    said = capsys.readouterr().out
    assert said.count("there is no C++ compiler") == len(_sources.FLAGS)
