"""Covers `shardfn speculate`: a speculator in one command, served by other commands, and arguments that are refused."""

import argparse
import json
import pathlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shardfn import core, interop
from shardfn.checkpoint import save
from shardfn.cli import _bench, main
from shardfn.models import gpt

CONFIG = gpt.Config.llama_like(vocab_size=256, num_layers=1, d_model=32, num_heads=2, d_ff=None, max_len=64)
SMALL = "--length 24 --batch 4 --steps 12 --drafts 3".split()
Told = tuple[int, str, str]


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run as of train_gpt, of a model without training."""
    row = {"model": interop.hf_config(CONFIG), "per_head": False, "tokenizer": "bytes"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/model.json").write_text(json.dumps(row))
    save(tmp_path / "run/checkpoints", gpt.init(CONFIG, core.key(0)), 3, at="params")
    return tmp_path / "run"


@pytest.fixture
def text(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": "abcabcabd" * 9}) + "\n" for _ in range(6)))
    return path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    def run_command(*args: object) -> Told:
        status = main([*map(str, args)])
        out, err = capsys.readouterr()
        return status, out, err

    return run_command


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["mlp", "lstm", "owl", "eagle3", "mtp"])
def test_a_speculator_in_one_command(
    run: pathlib.Path, text: pathlib.Path, call: Callable[..., Told], kind: str
) -> None:
    out = run.parent / "made"
    png = run.parent / "training.png"
    more = {"lstm": ["--draw", "0.7"], "mlp": ["--draft-vocab", "3"], "mtp": ["--window", "3"]}.get(kind, [])
    status, said, err = call("speculate", run, text, "--kind", kind, "--out", out, *SMALL, "--png", png, *more)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert status == 0 and re.search(
        rf"{kind} speculator: \d\.\d\d greedy, \d\.\d\d at .* 0.8 accepted drafts a step\nn-grams: \d\.", said
    ), err
    asked = ["generate", run, "abcab", "cabd", "--json", "--seed", "2", "--max-tokens", "12"]
    plain, guessed = call(*asked), call(*asked, "--speculator", out)
    assert plain[:2] == (0, guessed[1]) and "drafts accepted" in guessed[2]
    assert f"{out} guesses: {kind} speculator, " in guessed[2]
    plain_text = text.with_suffix(".txt")
    plain_text.write_text("abcabcabd" * 20)
    asked_bench = ["bench", "guess", run, plain_text, "--speculator", out, "--lengths", "8", "30", "--tokens", "9"]
    asked_bench += ["--branches", "2"]
    status, said, err = call(*asked_bench, "--prompts", "2")
    assert status == 0 and [x.split("  ")[0] for x in said.splitlines()[1:]] == [
        "n-grams",
        "suffixes",
        "made",
        "made with trees",
        "made with suffixes",
    ], err
    both = call(*asked, "--speculator", out, "--drafter", "suffix")
    assert both[1] == plain[1] and "with suffixes" in both[2]
    trees = call(*asked, "--speculator", out, "--branches", "3")
    assert trees[1] == plain[1] and "3 tokens, trees of 3 branches" in trees[2]
    about = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(about | {"model_digest": "0" * 16}))
    status, said, err = call(*asked, "--speculator", out)
    assert (status, said) == (2, "") and f"{out}: drafter: a speculator of another model" in err


@pytest.mark.nightly
def test_a_model_for_jacobi_decoding(run: pathlib.Path, text: pathlib.Path, call: Callable[..., Told]) -> None:
    out = run.parent / "forced"
    status, said, err = call("speculate", run, text, "--kind", "jacobi", "--out", out, *SMALL)
    assert status == 0 and re.search(r"decoding before: \d\.\d\d accepted.*\n.*decoding after: \d\.", said), err
    asked = ["generate", out, "abcab", "cabd", "--json", "--max-tokens", "12"]
    plain, guessed = call(*asked), call(*asked, "--drafter", "jacobi")
    assert plain[:2] == (0, guessed[1]) and plain[1] != call(*asked[:1], run, *asked[2:])[1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            "--kind jacobi --drafts 14 --length 24 --batch 1",
            "must have room for --drafts 14 in its second half",
        ),
        ("--kind jacobi --png training.png", "--png needs a speculator and matplotlib"),
        ("--window 4", "--window is only for eagle3 and mtp, got --kind lstm; leave --window out"),
        ("--kind mtp --draft-vocab 4", "--draft-vocab is not for --kind mtp; leave --draft-vocab out"),
        ("--draft-vocab 0", "--draft-vocab must be at least 1, got 0"),
        ("--draw -1", "--draw must be at least 0, and is for a speculator, got -1.0 and --kind lstm"),
        ("--drafts 0", "--drafts must be at least 1, got 0"),
        ("--length 5", "--length must be at least 6, --drafts and two more, got 5"),
        ("--lr 0", "--lr must be above 0, got 0"),
        ("--length 65 --batch 1", "--length 65: the longest sequence of .* has 64 tokens"),
        ("--length 60 --batch 9", r"has 486 tokens, and 600 are needed: --batch rows and a held-out row"),
    ],
)
def test_refused_arguments(
    run: pathlib.Path, text: pathlib.Path, call: Callable[..., Told], more: str, words: str
) -> None:
    status, said, err = call("speculate", run, text, "--out", run.parent / "made", *more.split())
    assert (status, said) == (2, "") and re.search(words, err), err
    assert not (run.parent / "made").exists()


def test_lines_without_a_text_are_refused(run: pathlib.Path, text: pathlib.Path, call: Callable[..., Told]) -> None:
    text.write_text(text.read_text() + '{"txet": "a"}\n')
    status, _, err = call("speculate", run, text, "--out", run.parent / "made", *SMALL)
    assert status == 2 and re.search(r"text.jsonl.*7.* must be an object with a text, .* got \{'txet': 'a'\}", err), err
    status, _, err = call("bench", "guess", run, text, "--lengths", "0", "60", "--tokens", "9")
    assert status == 2 and "--lengths must be at least 1, got 0" in err
    status, _, err = call("bench", "guess", run, text, "--lengths", "60", "--tokens", "9")
    assert status == 2 and "--lengths and --tokens must be at most the context 64, got 69" in err
    status, _, err = call("generate", run, "a", "--speculator", run)
    assert status == 2 and "has no config.json; give a directory of shardfn speculate" in err
    status, _, err = call("generate", run, "a", "--branches", "2")
    assert status == 2 and "--branches must be at least 1, and is for a --speculator, got 2" in err
    status, _, err = call("generate", run, "a", "--speculator", run, "--drafter", "ngram")
    assert status == 2 and "--speculator and --drafter ngram are 2 drafters; leave all but one of them out" in err


def test_prompts_of_all_lengths_have_the_same_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(_bench, "Engine", lambda *given, **more: None)
    monkeypatch.setattr(_bench, "limits_of", lambda *given, **more: None)
    monkeypatch.setattr(_bench, "measure_acceptance", lambda engine, prompts, how: seen.append(prompts) or 0.5)
    args = argparse.Namespace(speculator=[], branches=1, lengths=[2, 5], prompts=3, tokens=4, temperature=0.0)
    served: Any = SimpleNamespace(decoder=None, params=None)
    found = _bench.measure_lengths(served, range(11), args)
    assert found == {"n-grams": {2: 0.5, 5: 0.5}, "suffixes": {2: 0.5, 5: 0.5}}
    assert [[[*x] for x in prompts] for prompts in seen[:2]] == [
        [[3, 4], [5, 6], [7, 8]],
        [[0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [4, 5, 6, 7, 8]],
    ]
