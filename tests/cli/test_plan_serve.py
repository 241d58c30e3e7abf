"""Plans of servers: `shardfn serve --decisions`, and `shardfn plan --serve` and `--replay`."""

import argparse
import dataclasses
import json
import pathlib
import xml.dom.minidom
from typing import Any

import pytest

from shardfn.cli import main
from shardfn.cli._bench_rates import parse_slo
from shardfn.cli._plan_serve import (
    ServeSetup,
    _capture_rank,
    choose_sizes,
    make_decoder,
    plan_rank,
    plan_server,
    play_trace,
)
from shardfn.cli._serve_command import read_trace
from shardfn.cli._serve_job import ServeJob, add_serve_arguments, command_of, parse_serve
from shardfn.cli._serve_times import FittedTimes, Roofline, fit_times
from shardfn.core import key
from shardfn.graph import cluster
from shardfn.inference import (
    DecisionLog,
    Engine,
    Limits,
    LoggedStep,
    Request,
    Sampling,
    TimedRequest,
    decoder,
    simulate,
)
from shardfn.models import gpt, moe


def parse(words: list[str]) -> ServeJob:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return parse_serve(parser.parse_args(words))


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "model.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def test_ranks_have_the_log_of_their_front(model: pathlib.Path):
    asked = parse([str(model), "--decisions", "log.jsonl"])
    assert parse([*command_of(asked, 7, "python")[4:]]).decisions == "log.jsonl"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--replicas", "2", "--oversubscribe"], "one replica"),
        (["--drafter", "ngram"], "leave out the drafter"),
        (["--enable-prompt-embeds"], "has only prompts of token ids; leave out --enable-prompt-embeds"),
    ],
)
def test_a_log_that_cannot_be_is_refused(model: pathlib.Path, words: list[str], text: str):
    with pytest.raises(ValueError, match=text):
        parse([str(model), "--decisions", "log.jsonl", *words])


CONFIG = gpt.Config(vocab_size=64, num_layers=4, d_model=32, num_heads=4, num_kv_heads=2, max_len=64)
MODEL = "gpt:vocab_size=64,num_layers=4,d_model=32,num_heads=4,num_kv_heads=2,max_len=64"
SIZES: dict[str, Any] = {"context": 64, "running": 4, "budget": 8}


def write_trace(path: pathlib.Path, num: int = 12, gap: float = 0.001) -> str:
    lines = [{"seconds": i * gap, "prompt": [1 + i % 3] * 20, "answer": 5 + i % 4} for i in range(num)]
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return str(path)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param({"window": (8, None) * 2}, marks=pytest.mark.nightly),
        pytest.param({"experts": moe.Experts(num=4, top_k=1)}, marks=pytest.mark.nightly),
    ],
)
def test_bytes_of_many_layers_follow_from_two(fields: dict[str, Any], tp: int):
    config, dtype = dataclasses.replace(CONFIG, **fields), "float32" if tp == 1 else "bfloat16"
    setup = ServeSetup("m", config, cluster("h200"), tp, dtype, **SIZES)
    limits = Limits(64, 64, 20, buckets=(4, 8), running=4, cache_dtype=dtype)
    assert plan_rank(setup, limits) == _capture_rank(setup, config, limits)


def test_planned_bytes_are_a_real_engines():
    setup = ServeSetup("m", CONFIG, cluster("h200"), 1, "float32", **SIZES)
    limits, memory = choose_sizes(setup, 1 << 30)
    engine = Engine(make_decoder(setup, CONFIG), gpt.init(CONFIG, key(0)), limits=limits)
    assert memory == engine.memory()


def test_a_small_device_has_a_small_cache_or_none():
    setup = ServeSetup("m", CONFIG, cluster("h200"), 1, "float32", **SIZES)
    most, whole = choose_sizes(setup, 1 << 30)
    assert most is not None and most.blocks == 4 * 4 + 1
    least, memory = choose_sizes(setup, whole.weights + whole.step + whole.cache // 2)
    assert least is not None and 5 <= least.blocks < most.blocks
    assert memory.total <= whole.weights + whole.step + whole.cache // 2
    assert choose_sizes(setup, whole.weights)[0] is None


def test_one_replica_is_one_engine_and_more_are_faster():
    limits = Limits(64, 64, 20, buckets=(4, 8), running=4)
    trace = [TimedRequest(0.01 * i, Request((1 + i % 3,) * 20, Sampling(max_tokens=9)), (7,) * 9) for i in range(24)]
    one, alone = play_trace(limits, trace, lambda: lambda plan: 0.01, 1), simulate(limits, trace, lambda plan: 0.01)
    assert one.latencies == alone.latencies and one.cache == alone.cache
    three = play_trace(limits, trace, lambda: lambda plan: 0.01, 3)
    assert len(three.latencies) == 24
    assert three.percentile("ttft", 95) < one.percentile("ttft", 95) and three.seconds < one.seconds


def test_the_fewest_replicas_are_found():
    trace = [TimedRequest(0.0, Request((1 + i,) * 20, Sampling(max_tokens=9)), (7,) * 9) for i in range(24)]
    times = FittedTimes({8: 0.01}, 0.0, {8: [0.0]}, 0.0)
    setup = ServeSetup("m", CONFIG, cluster("h200"), times=times, **SIZES)
    slos = [parse_slo("p95_ttft=300ms")]
    made = plan_server(setup, trace, slos)
    assert made.meets and 1 < made.replicas < 24
    fewer = plan_server(setup, trace, slos, replicas=made.replicas - 1)
    assert not fewer.meets and fewer.sort_key > made.sort_key


def test_windows_make_attention_cheaper_and_ranks_a_step():
    plans = []
    for config in (CONFIG, dataclasses.replace(CONFIG, window=4)):
        limits, seen = Limits(64, 64, 20, buckets=(4, 8), running=4), []
        times = Roofline(config, limits, cluster("h200"), 1, 1 << 20, 4)

        def seconds_of(plan, times=times, seen=seen):
            seen.append(0.0 if plan is None else times(plan) - times.bucket_seconds(plan.bucket))
            return 0.01

        simulate(limits, [TimedRequest(0.0, Request((1,) * 40, Sampling(max_tokens=9)), (7,) * 9)], seconds_of)
        plans.append(seen)
    assert all(b <= a for a, b in zip(*plans, strict=True)) and sum(plans[1]) < sum(plans[0]) / 4


def test_fitted_times_have_the_tails_of_the_log():
    steps = [LoggedStep(0.0, 0.2 + 0.001 * (n % 5) + 0.5 * (n == 7), 8, n % 5, "") for n in range(20)]
    limits = Limits(64, 64, 20, buckets=(4, 8), running=4)
    found = fit_times(steps)
    trace = [TimedRequest(0.0, Request((1,) * 8, Sampling(max_tokens=50)), (7,) * 50)]
    gaps = simulate(limits, trace, found.start()).latencies[0].gaps
    assert found.base[8] == pytest.approx(0.2, abs=0.02) and max(gaps) > 0.5 > sorted(gaps)[-10]


def test_mooncakes_traces_share_the_blocks_of_their_hashes(tmp_path: pathlib.Path):
    lines = [{"timestamp": 500 * i, "input_length": 600, "output_length": 3, "hash_ids": [7, i]} for i in range(2)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    one, two = read_trace(path, 1000, 1024).requests
    assert (one.seconds, two.seconds, len(one.answer)) == (0.0, 0.5, 3)
    assert one.request.prompt[:512] == two.request.prompt[:512] and one.request.prompt != two.request.prompt
    assert len(one.request.prompt) == 600


@pytest.mark.parametrize("tp", [[1], pytest.param([1, 2], marks=pytest.mark.nightly)])
def test_a_plan_from_the_command_line(tp: list[int], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    told = [
        "plan",
        "--serve",
        MODEL,
        "--device",
        "h200",
        "--context",
        "64",
        "--running",
        "4",
        "--budget",
        "8",
    ]
    told += ["--search"] if len(tp) > 1 else []
    told += ["--trace", write_trace(tmp_path / "t.jsonl"), "--slo", "p95_itl=50ms", "--svg", str(tmp_path / "x.svg")]
    assert main(told) == 0
    text = capsys.readouterr().out
    assert "**1 replica of 1 x h200 meet the objectives.**" in text and f"shardfn serve {MODEL}" in text
    assert xml.dom.minidom.parse(str(tmp_path / "x.svg")).getElementsByTagName("polyline")
    assert main([*told, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [p["tp"] for p in plans] == tp and all(p["meets"] for p in plans)
    assert main([*told[:-4], "--slo", "p95_itl=0.001ms", "--most-replicas", "2"]) == 1


def test_a_log_is_trace_and_times(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "log.jsonl"
    config = dataclasses.replace(CONFIG, batch_invariant=True)
    limits = Limits(64, 64, 20, buckets=(4, 8), running=4)
    engine = Engine(decoder(config), gpt.init(config, key(0)), limits=limits, decisions=(log := DecisionLog(path)))
    engine.generate([[1, 2, 3], [4, 5]], Sampling(max_tokens=4))
    log.close()
    assert main(["plan", "--replay", str(path)]) == 0
    assert "2 requests: all decisions are those of the log" in capsys.readouterr().out
    told = ["plan", "--serve", MODEL, "--device", "cpu", "--running", "4", "--budget", "8", "--json"]
    assert main([*told, "--trace", str(path), "--calibrate", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["replicas"] == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--slo", "p95_tpot=50ms"], "one of ttft, itl, e2e"),
        (["--device", "h20"], "device 'h20' is not known. Did you mean 'h200'?"),
        (["--mesh", "tp=3"], "3 ranks of 'tp' do not divide the 2 key heads"),
        (["--mesh", "tp=2,pp=2"], "leave out pp"),
        (["--zero", "2"], "--zero 2: it sets up a run"),
        (["--running", "9"], "--running must be from 1 to 7, got 9"),
        (["--context", "20"], "request 0 has 20 + 5 tokens; the context is 20"),
    ],
)
def test_bad_arguments_are_named(
    words: list[str], text: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    told = ["plan", "--serve", MODEL, "--running", "4", "--budget", "8", "--trace", write_trace(tmp_path / "t.jsonl")]
    assert main([*told, *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (
            ['{"seconds": 2, "prompt": 3, "answer": 1}', '{"seconds": 1, "prompt": 3, "answer": 1}'],
            "run backwards, got 1 s",
        ),
        (['{"seconds": 2, "prompt": [64], "answer": 1}'], "line 1: prompt must be token ids from 0 to 63"),
        (['{"seconds": -1, "prompt": 3, "answer": 1}'], "line 1: seconds must be a number from 0 on, got -1"),
        (['{"seconds": 1, "prompt": 3, "answer": 0}'], "line 1: answer must be a list of token ids"),
        (["[]", "x"], "line 1: a request is an object, got a list"),
        ([], "the file must have a request, got none"),
    ],
)
def test_bad_traces_are_named(lines: list[str], text: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    assert main(["plan", "--serve", MODEL, "--trace", str(tmp_path / "t.jsonl")]) == 2
    assert text in capsys.readouterr().err


def test_options_of_a_server_need_a_server(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", MODEL, "--slo", "p95_itl=50ms"]) == 2
    assert "add --serve" in capsys.readouterr().err
    assert main(["plan", "--serve", MODEL]) == 2
    assert "add --trace FILE" in capsys.readouterr().err
