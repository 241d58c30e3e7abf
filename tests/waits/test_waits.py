"""Covers lines about waits: one line for all waits in progress, every two seconds, by the first rank alone."""

import gc
import io
import re
import sys
import time

import pytest

from shardfn.waits import Wait, _waits, waiting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, seconds: float) -> str:
    """The output of two waits beside one another."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(_waits, "PERIOD", 0.05)
    monkeypatch.setattr(_waits, "_TICK", 0.01)
    with waiting("starting", whole=True), waiting("building", "a"), waiting("building", "b"):
        with waiting("capturing", total=4) as graphs:
            graphs.update(3)
            time.sleep(seconds)
    return stream.getvalue()


def test_waits_share_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "RANK", "TQDM_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    said = lines_of(monkeypatch, io.StringIO(), 0.3)
    assert "shardfn: building a, b, 0 s; capturing, 3 of 4, 0 s\n" in said
    assert "starting" not in said and "\r" not in said


def test_a_terminal_gets_a_bar_that_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "RANK", "TQDM_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    said = lines_of(monkeypatch, Terminal(), 0.3)
    assert "building a, b" in said and "3 of 4" in said and "\r" in said
    assert re.search(r"\r *\r$", said)


@pytest.mark.parametrize("name, value", [("LOCAL_RANK", "1"), ("TQDM_DISABLE", "1")])
def test_other_ranks_and_hidden_bars_are_silent(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert lines_of(monkeypatch, io.StringIO(), 0.2) == ""


def test_the_wait_for_the_program_is_reported_if_there_is_no_other() -> None:
    whole = Wait("starting", "", 0, True)
    assert _waits.text_of([whole], whole.start + 3) == "starting, 3 s"


@pytest.mark.parametrize(
    "argv, announced",
    [
        (["python", "/usr/bin/shardfn", "serve", "MODEL"], True),
        (["python", "-u", "-m", "shardfn", "generate", "MODEL"], True),
        (["python", "-m", "shardfn.cli._serve_rank", "3", "MODEL"], True),
        (["python", "/usr/bin/shardfn", "plan"], False),
        (["python", "train.py", "--command", "generate"], False),
        (["python"], False),
    ],
)
def test_commands_that_load_a_model_are_announced(argv: list[str], announced: bool) -> None:
    assert _waits._is_command(argv) == announced


def test_garbage_is_collected_again_after_the_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_waits, "_STARTED", [])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "pytest"])
    _waits.announce_start()
    assert gc.isenabled()
    _waits.end_imports()
    assert gc.get_freeze_count() == 0
    monkeypatch.setattr(sys, "orig_argv", ["python", "/usr/bin/shardfn", "generate"])
    try:
        _waits.announce_start()
        assert not gc.isenabled()
        _waits.end_imports()
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()
        _waits.end_start()
    assert gc.isenabled() and gc.get_freeze_count() == 0
