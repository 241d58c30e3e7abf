"""Covers `generation_config.json`: its values hold where a user gives none, in `generate` and `serve`."""

import argparse
import json
import pathlib
from typing import Any

import pytest

from shardfn.cli import main
from shardfn.cli._generate_job import GenerateJob, add_generate_arguments, parse_generate
from shardfn.cli._serve_job import add_serve_arguments, command_of, parse_serve

transformers = pytest.importorskip("transformers")
VALUES = {"temperature": 0.5, "top_p": 0.75, "top_k": 4, "min_p": 0.125, "repetition_penalty": 1.25}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Files that look like a model of Hugging Face."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def write(folder: pathlib.Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def job_of(*args: object) -> GenerateJob:
    parser = argparse.ArgumentParser()
    add_generate_arguments(parser)
    return parse_generate(parser.parse_args([*map(str, args)]))


def test_generate_takes_the_defaults_of_absent_options(folder: pathlib.Path) -> None:
    def sampling(*args: object) -> dict[str, float]:
        made = job_of(folder, "a", *args).sampling
        return {name: getattr(made, name) for name in VALUES}

    plain = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert sampling() == plain
    write(folder, **VALUES, do_sample=True, max_new_tokens=5, eos_token_id=[1, 2])
    assert sampling() == VALUES
    given = ["--temperature", 0, "--top-p", 1, "--top-k", 0, "--min-p", 0, "--repetition-penalty", 1]
    assert sampling(*given) == plain | {"temperature": 0}
    assert sampling("--generation-config", "none") == plain
    write(folder, top_k=-1, temperature=None)
    assert sampling() == plain


def test_a_server_takes_the_defaults_of_absent_fields(folder: pathlib.Path) -> None:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    write(folder, **VALUES)
    for more, want in ((), VALUES), (("--generation-config", "none"), {}):
        job = parse_serve(parser.parse_args([str(folder), *more]))
        assert job.server["defaults"] == want
        assert parse_serve(parser.parse_args([*command_of(job, 3, "python")[4:]])).model == job.model


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_wrong_values_name_the_file_and_the_remedy(
    folder: pathlib.Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [
        (
            '{"top_p": 0}',
            "top_p must be a number above 0 and at most 1, got 0. Correct the file, or pass --generation-config",
        ),
        ('{"temperature": "hot"}', "temperature must be a number from 0 to 100, got 'hot'"),
        ("{", "its JSON cannot be read"),
        ("[]", "must contain a JSON object"),
    ]
    for text, words in cases:
        (folder / "generation_config.json").write_text(text)
        assert main([command, str(folder), *["a"] * (command == "generate")]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and words in err and f"{folder / 'generation_config.json'}" in err


@pytest.mark.nightly
def test_a_model_is_sampled_as_its_file_recommends(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.cli.test_serve_command import hugging_face

    hugging_face(tmp_path / "model")

    def drawn(*args: object) -> tuple[list[int], str, str]:
        assert (
            main(["generate", str(tmp_path / "model"), "one two", "--max-tokens", "8", "--json", *map(str, args)]) == 0
        )
        out = capsys.readouterr()
        row = json.loads(out.out)
        return row["tokens"], row["finish"], out.err

    config = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    plain = drawn("--temperature", 0, "--repetition-penalty", 1.5)
    first = plain[0][1]
    write(tmp_path / "model", **config | {"temperature": 0.0, "repetition_penalty": 1.5})
    tokens, _, err = drawn()
    assert tokens == plain[0]
    assert "sampling of generation_config.json, where none is given: temperature 0.0, repetition_penalty 1.5\n" in err
    write(tmp_path / "model", **config | {"temperature": 0.0, "repetition_penalty": 1.5, "eos_token_id": [2, first]})
    assert drawn()[:2] == (plain[0][: plain[0].index(first) + 1], "stop")
    ignored = drawn("--generation-config", "none", "--temperature", 0, "--repetition-penalty", 1.5)
    assert ignored[:2] == plain[:2] and "generation_config.json" not in ignored[2]
