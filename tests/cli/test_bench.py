"""Covers `shardfn bench serve`: delays of a server in this process, failures, JSON, a picture, and wrong numbers."""

import json
import pathlib
from collections.abc import Iterator

import pytest

from shardfn.cli import main

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from shardfn.serve import trace
from tests.serve.server import NAME, Running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    made = Running()
    yield made
    assert made.close() == 0


@pytest.mark.nightly
def test_all_requests_are_measured(server: Running, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    args = ["bench", "serve", "--url", server.url, "--model", NAME, "--requests", "12", "--rate", "200", "--drawn", "8"]
    assert main([*args, "--json", "--png", str(tmp_path / "delays.png")]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["requests"], made["failed"]) == (12, 0)
    assert made["tokens"] == sum(one.max_tokens for one in trace(12, None, drawn=8))
    first, whole = made["delays"]["first token, ms"], made["delays"]["whole request, ms"]
    assert 0 < first["p50"] <= first["p99"] <= first["p100"] <= whole["p100"]
    assert (tmp_path / "delays.png").read_bytes().startswith(b"\x89PNG")
    assert main(args) == 0
    assert "12 requests, 0 failed" in capsys.readouterr().out


def test_requests_that_fail_are_counted(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "serve", "--url", server.url, "--requests", "2"]
    assert main([*args, "--model", "other"]) == 1
    out, err = capsys.readouterr()
    assert "2 requests, 2 failed" in out and "model 'other' does not exist" in err
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1/v1", "--model", "x", "--requests", "1"]) == 1
    assert "ConnectionRefusedError" in capsys.readouterr().err


def test_a_trace_is_that_of_its_seed() -> None:
    assert trace(5, 3.0, seed=1) == trace(5, 3.0, seed=1) != trace(5, 3.0, seed=2)
    arrivals = [one.seconds for one in trace(50, 10.0)]
    assert arrivals == sorted(arrivals) and 2 < arrivals[-1] < 10


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--requests 0", "--requests must be at least 1, got 0"),
        ("--rate 0", "--rate must be above 0, got 0.0"),
        ("--vocab 1", "--vocab must be at least 2, got 1"),
    ],
)
def test_wrong_numbers(args: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--model", "x", *args.split()]) == 2
    assert f"shardfn bench: error: {words}" in capsys.readouterr().err
