"""Covers the mark `day`, which leaves some cases of a test to the day, and the others to the night."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = """
import pytest

@pytest.mark.day("a", "c")
@pytest.mark.parametrize("x", ["a", "b", "c"])
def test_named(x): ...

@pytest.mark.day(2)
@pytest.mark.parametrize("x", [*range(5), pytest.param(9, marks=pytest.mark.nightly)])
def test_number(x): ...
"""


def collected(folder: pathlib.Path, source: str, *options: str) -> tuple[list[str], str]:
    """The tests that pytest collects in a file, and the output of pytest."""
    path = folder / "test_sample.py"
    path.write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    command += ["--collect-only", *options, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    text = done.stdout + done.stderr
    return [line.partition("::")[2] for line in text.splitlines() if "::" in line and "[" in line], text


@pytest.mark.nightly
def test_each_case_runs_by_day_or_at_night(tmp_path: pathlib.Path) -> None:
    day, _ = collected(tmp_path, SOURCE)
    night, _ = collected(tmp_path, SOURCE, "-m", "nightly")
    assert day == ["test_named[a]", "test_named[c]", "test_number[0]", "test_number[2]"]
    assert night == ["test_named[b]", *(f"test_number[{i}]" for i in (1, 3, 4, 9))]


@pytest.mark.nightly
def test_an_unknown_case_is_an_error(tmp_path: pathlib.Path) -> None:
    _, text = collected(tmp_path, SOURCE.replace('"c")', '"d")'))
    assert "::test_named[a]: day names ['d'], and its cases are ['a', 'b', 'c']" in text
