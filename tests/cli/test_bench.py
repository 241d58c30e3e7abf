"""Covers `shardfn bench serve`: delays of a server in this process, rates, failures, JSON, and wrong numbers."""

import json
import pathlib
from collections.abc import Iterator

import pytest

from shardfn.cli import main
from shardfn.cli._bench_rates import draw_text, find_goodput, make_row, parse_slo

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from shardfn.serve import Delays, trace
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


def test_rates_have_rows_and_a_goodput(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "serve", "--url", server.url, "--model", NAME, "--requests", "4", "--drawn", "3", "--prompt", "4"]
    assert main([*args, "--rates", "100", "400", "--slo", "p95_ttft=60s", "p50_e2e=90s", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    tokens = sum(one.max_tokens for one in trace(4, None, drawn=3, prompt=4))
    assert [(row["rate"], row["requests"], row["failed"]) for row in made["rates"]] == [(100, 4, 0), (400, 4, 0)]
    for row in made["rates"]:
        assert row["meets_slo"] and 0 < row["p50_ttft_ms"] <= row["p95_ttft_ms"] <= row["p95_e2e_ms"]
        assert row["tokens_per_second"] / row["requests_per_second"] == pytest.approx(tokens / 4, rel=0.02)
    assert made["goodput"] in made["rates"] and made["slo"] == ["p95_ttft=60000ms", "p50_e2e=90000ms"]
    assert main([*args, "--rates", "100", "--slo", "p95_ttft=0.001ms"]) == 0
    assert "no rate meets it" in capsys.readouterr().out


def test_the_goodput_is_of_the_best_rate_within_the_objective() -> None:
    slos = [parse_slo("p95_itl=50ms")]
    fast, slow = (Delays(0.1, [gap] * 20, 1.0, 21) for gap in (0.01, 0.09))
    rows = [
        make_row(1, [fast] * 10, 10.0, slos),
        make_row(2, [fast] * 20, 10.0, slos),  # 18 of 20 would not do: 10 percent of its gaps are long
        make_row(4, [fast] * 36 + [slow] * 4, 10.0, slos),
        make_row(8, [fast] * 39 + [Delays(0, [], 0, 0, error="429")], 10.0, slos),
    ]
    assert [row["meets_slo"] for row in rows] == [True, True, False, False]
    assert [row["missed"] for row in rows] == [[], [], ["p95_itl=50ms"], []]
    best = find_goodput(rows)
    assert best is not None and (best["rate"], best["requests_per_second"], best["tokens_per_second"]) == (2, 2, 42)
    assert find_goodput(rows[2:]) is None
    lines = draw_text(rows).splitlines()
    assert len(lines) == 5 and all(line.endswith("#" * 40) for line in lines[1:])


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
        ("--rates 1 0", "--rates must be above 0, got 0.0"),
        ("--rate 1 --rates 1", "--rate cannot be combined with --rates"),
        ("--slo p95_itl=50ms", "--slo has no effect without --rates"),
        ("--rates 1 --slo p95_tpot=50ms", "--slo must be a percentile, one of ttft, itl, e2e"),
        ("--rates 1 --slo p0_itl=50ms", "--slo must be a percentile"),
    ],
)
def test_wrong_numbers(args: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--model", "x", *args.split()]) == 2
    assert f"shardfn bench: error: {words}" in capsys.readouterr().err
