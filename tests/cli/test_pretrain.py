"""Covers `shardfn pretrain`: layouts train as one rank, runs go on, recipes have their sizes, mistakes are named."""

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from shardfn.cli import main
from shardfn.cli._pretrain import make_batches
from shardfn.cli._pretrain_job import parse_pretrain, read_tables
from shardfn.data import ByteTokenizer, encode_files
from shardfn.models import gpt
from tests.cli.test_finetune_command import torchrun

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples/recipes").glob("*.toml"))
SIZES = {"python": 1_312_160, "experts_8x": 4_325_280, "gpt2_124m": 124_439_808, "smollm2_135m": 134_515_008}
RUN = """
model = {num_layers = 2, d_model = 32, num_heads = 4, tie_embeddings = true}
optimizer = {name = "adamw", learning_rate = 4e-3, weight_decay = 0.1}
train = {steps = 4, log_every = 1, out = "OUT"}
checkpoints = {every = 2}
evaluation = {every = 2, batches = 2}
[data]
length = 16
batch = 6
[data.sources]
docs = {files = "ROOT/docs/a*.md", weight = 2}
code = {files = ["ROOT/shardfn/core/_texts.py", "ROOT/shardfn/core/_m*.py"], weight = 1}
"""


def write_run(folder: pathlib.Path, text: str = RUN) -> str:
    path = folder / "run.toml"
    path.write_text(text.replace("OUT", str(folder / "out")).replace("ROOT", str(ROOT)))
    return str(path)


def losses_of(folder: pathlib.Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows for name in ("loss", "validation_loss") if name in row]


def run_command(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    start = torchrun(ranks) if ranks > 1 else [sys.executable, "-m", "shardfn"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*start, "pretrain", *words], capture_output=True, text=True, timeout=300, env=env)


def test_a_run_and_its_model(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path)
    assert main(["pretrain", path, "--set", "train.steps=2"]) == 0
    out = capsys.readouterr().out
    assert "Time of a step" in out and "step 2 of 2: loss " in out
    assert json.loads((tmp_path / "out" / "model.json").read_text())["tokenizer"] == "bytes"
    before = losses_of(tmp_path)
    assert main(["pretrain", path]) == 0  # goes on
    after = losses_of(tmp_path)
    assert after[: len(before)] == before and len(after) == 4 + 2
    assert main(["pretrain", path, "--set", "data.batch=7"]) == 2
    assert "[data] batch was 6, and now it is 7" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (3, ["mesh.dp=-1", "train.zero=2"]),
        (2, ["mesh.tp=2", "train.sequence=true"]),
        (2, ["mesh.sp=2", 'model.attention="ring"']),
        (2, ["mesh.pp=2", "train.accumulate=2"]),
        (2, ['train.jit="graph"', "train.remat=true", "train.accumulate=3"]),
        (2, ["experts.num=4", "experts.top_k=2", "data.ramp={start = 2, increment = 2, rows = 8}"]),
    ],
)
def test_every_layout_trains_as_one_rank(ranks: int, changes: list[str], tmp_path: pathlib.Path) -> None:
    alone, many = tmp_path / "alone", tmp_path / "many"
    for folder, world in ((alone, 1), (many, ranks)):
        folder.mkdir()
        here = changes if world > 1 else [x for x in changes if x.startswith(("experts", "data"))]
        done = run_command(world, write_run(folder), *(word for x in here for word in ("--set", x)))
        assert done.returncode == 0, done.stderr
    assert losses_of(many) == pytest.approx(losses_of(alone), rel=2e-5)


@pytest.mark.nightly
def test_sigterm_saves_and_the_run_goes_on(tmp_path: pathlib.Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    words = ["--set", "train.steps=40", "--set", "evaluation.every=50"]
    assert run_command(1, write_run(whole), *words).returncode == 0
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardfn", "pretrain", write_run(cut), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3 "):
                process.send_signal(signal.SIGTERM)
                break
        process.stdout.read()
        assert process.wait(60) in (0, 75)
    assert run_command(1, write_run(cut), *words).returncode == 0
    steps = [json.loads(line) for line in (cut / "out" / "metrics.jsonl").read_text().splitlines()]
    want = [json.loads(line) for line in (whole / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in steps] == [row["loss"] for row in want]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_have_their_sizes(path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for pattern in re.findall(r'"(data/\w+)/\*\.txt"', path.read_text()):
        (tmp_path / pattern).mkdir(parents=True)
        (tmp_path / pattern / "a.txt").write_text("text")
    job = parse_pretrain(argparse.Namespace(config=str(path), set=[], plan=False))
    vocab = job.data.vocab_size if job.data.tokenizer == "bpe" else 256
    assert gpt.num_params(job.config(vocab)) == SIZES[path.stem]
    assert f"{SIZES[path.stem]:,}" in (ROOT / "docs/pretrain.md").read_text()


def test_batches_do_not_depend_on_ranks(tmp_path: pathlib.Path) -> None:
    job = parse_pretrain(argparse.Namespace(config=write_run(tmp_path), set=[], plan=False))
    tokens = {
        name: encode_files(job.files(name), tmp_path / f"{name}.bin", ByteTokenizer()) for name in job.data.sources
    }
    training, validation = make_batches(job, tokens)
    for batches in (training, validation):
        whole = batches(3)["tokens"]
        parts = [row for rank in range(4) for row in batches(3, rank=rank, world=4)["tokens"].tolist()]
        assert parts == whole.tolist() and whole.shape == (6, 17)


MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "tables": ({"modle": {}}, [r"table \[modle\] is not known. Did you mean 'model'"]),
    "keys": (
        {"train": {"step": 3}, "model": {"layers": 2}, "data": {"lenght": 3}},
        [r"\[train\] step is not known. Did you mean 'steps'", r"\[model\] layers is not known", "'length'"],
    ),
    "types": ({"train": {"steps": "3"}, "data": {"batch": 1.5}}, [r"steps must be of type int, got '3'", "got 1.5"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_unknown_names_and_types(name: str) -> None:
    tables, patterns = MISTAKES[name]
    _, problems = read_tables(tables)
    assert len(problems) >= len(patterns)
    for pattern in patterns:
        assert re.search(pattern, "\n".join(problems)), problems


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        (["train.steps=0", "data.validation=1.0"], r"steps must be at least 1, got 0[\s\S]*validation must be above 0"),
        (['optimizer.name="adamv"'], r"got 'adamv'. Did you mean 'adam"),
        (["optimizer.beta=3"], r"adamw has no argument 'beta'"),
        (["model.num_heads=5"], r"\[model\][\s\S]*num_heads"),
        (["mesh.tp=2"], r"must have as many ranks as the program, 1"),
        (['model.attention="ring"'], r"sp and \[model\] attention"),
        (['data.sources={a={files="none.txt"}}'], r"none.txt is not a file, and matches no file"),
        (["data.sources={}"], r"at least one source"),
        (["experts.top_k=2"], r"must have num"),
        (["train.steps"], r"--set must be TABLE.KEY=VALUE"),
    ],
)
def test_mistakes_are_named_before_the_run(
    changes: list[str], pattern: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for change in changes for word in ("--set", change)]
    assert main(["pretrain", write_run(tmp_path), *words]) == 2
    assert re.search(pattern, capsys.readouterr().err)


@pytest.mark.nightly
def test_the_slurm_script(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    fakes = {
        "srun": 'for _ in 1 2; do "$@" & pids="$pids $!"; done; for pid in $pids; do wait "$pid" || exit 1; done',
        "scontrol": "echo localhost; echo other",
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, code in fakes.items():
        (folder / name).write_text(f"#!/bin/bash\n{code}\n")
        (folder / name).chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= {"SLURM_NNODES": "2", "SLURM_JOB_ID": str(time.time_ns()), "SLURM_JOB_NODELIST": "n[0-1]", "PORT": "29641"}
    command = [str(ROOT / "examples/cluster/slurm.sh"), write_run(tmp_path), "--set", "mesh.dp=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert len(losses_of(tmp_path)) == 6
