"""Plans of servers: `shardfn serve --decisions`, and `shardfn plan --serve` and `--replay`."""

import argparse
import pathlib

import pytest

from shardfn.cli._serve_job import ServeJob, add_serve_arguments, command_of, parse_serve


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
    [(["--replicas", "2", "--oversubscribe"], "one replica"), (["--drafter", "ngram"], "leave out the drafter")],
)
def test_a_log_that_cannot_be_is_refused(model: pathlib.Path, words: list[str], text: str):
    with pytest.raises(ValueError, match=text):
        parse([str(model), "--decisions", "log.jsonl", *words])
