"""Covers files of requests: answers are those of the routes, a run goes on later, bad lines are named."""

import asyncio
import io
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from shardfn.cli._main import main
from shardfn.serve import BatchRequest, read_answered, read_batch, send_batch
from tests.serve.server import NAME, Running

COMPLETION = {"model": NAME, "prompt": "ab", "max_tokens": 5, "seed": 3}


def write(path: pathlib.Path, *rows: Any) -> pathlib.Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def row(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def send(server: Running, requests: list[BatchRequest], **options: Any) -> tuple[int, dict[str, dict[str, Any]]]:
    out = io.StringIO()
    lost = asyncio.run(send_batch(server.url.removesuffix("/v1"), "none", requests, out, **options))
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len({x["custom_id"] for x in rows}) == len(rows)
    return lost, {x["custom_id"]: x["response"] for x in rows}


def test_answers_are_those_of_the_routes(server: Running, tmp_path: pathlib.Path) -> None:
    chat = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1}
    bodies = {
        "a": ("/v1/completions", COMPLETION),
        "b": ("/v1/chat/completions", chat),
        "c": ("/v1/embeddings", {"model": NAME, "input": "ab"}),
        "d": ("/v1/completions", COMPLETION | {"max_tokens": -1}),
        "e": ("/v1/completions", COMPLETION | {"model": "another"}),
    }
    path = write(tmp_path / "in.jsonl", *(row(name, url, **body) for name, (url, body) in bodies.items()), "", "  ")
    lost, found = send(server, read_batch(path), at_once=2)
    assert lost == 0 and found.keys() == bodies.keys()
    for name, (url, body) in bodies.items():
        answer = server.send(url, body)
        assert found[name]["status_code"] == answer.status and found[name]["request_id"].startswith("req_")
        for key in ("choices", "data", "error", "usage"):
            assert found[name]["body"].get(key) == answer.json.get(key)
    assert [found[name]["status_code"] for name in bodies] == [200, 200, 200, 400, 404]


def test_more_requests_than_the_server_takes_are_sent_again(start: Callable[..., Running]) -> None:
    server = start(max_waiting=6)
    requests = [BatchRequest(str(i), "/v1/completions", COMPLETION | {"prompt": "abcd", "seed": i}) for i in range(4)]
    lost, found = send(server, requests)
    assert lost == 0 and {x["status_code"] for x in found.values()} == {200}


def test_a_server_that_ends_leaves_requests_without_an_answer(start: Callable[..., Running]) -> None:
    server = start(slow=0.02)
    requests = [BatchRequest(str(i), "/v1/completions", COMPLETION | {"ignore_eos": True}) for i in range(30)]
    server.loop.call_soon_threadsafe(server.loop.call_later, 0.3, server.front.take_signal)
    lost, found = send(server, requests, at_once=2)
    assert 0 < lost < 30 and lost + len(found) == 30
    assert {x["status_code"] for x in found.values()} == {200} and server.join() == 0


def test_a_run_goes_on_with_its_file(tmp_path: pathlib.Path) -> None:
    requests = read_batch(write(tmp_path / "in.jsonl", row("a"), row("b"), row("c")))
    out = tmp_path / "out.jsonl"
    out.write_text('{"custom_id": "b"}\n{"custom_id": "a", "respo')
    assert read_answered(out, requests) == {"b"} and out.read_text() == '{"custom_id": "b"}\n'
    write(out, {"custom_id": "b"}, {"custom_id": "z"})
    with pytest.raises(ValueError, match="line 2: must be an answer to a request of this batch, got b'"):
        read_answered(out, requests)


def test_all_bad_lines_are_named(tmp_path: pathlib.Path) -> None:
    rows = [
        "{",
        "[]",
        {"custom_id": "a"},
        row(""),
        row("a") | {"method": "GET"},
        row("a", "/v1/models"),
        row("a") | {"body": 1},
        row("a", stream=True),
        row("b"),
        row("b"),
        *[row("b")] * 5,
    ]
    with pytest.raises(ValueError) as error:
        read_batch(write(tmp_path / "in.jsonl", *rows))
    text = str(error.value)
    assert text.count("\n") == 11 and "and 4 more" in text
    for words in (
        "line 1: must be JSON, got '{'",
        "line 2: must be an object with custom_id, method, url, body, got []",
        "line 3: must have custom_id, method, url, body, got no method, url, body",
        "line 4: custom_id must be a string with at least one character, got ''",
        "line 5: method must be 'POST', got 'GET'",
        "got '/v1/models'",
        "line 7: body must be an object, got 1",
        "line 8: body must not have stream",
        "line 10: custom_id must be unique, got 'b' again",
    ):
        assert words in text
    with pytest.raises(ValueError, match="must have at least one request"):
        read_batch(write(tmp_path / "empty.jsonl", ""))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "must not exist. Write to another file, or continue this file with --resume"),
        (["--resume", "--port", "1"], "a batch has no clients but itself, got --port"),
        (["--resume", "--at-once", "0"], "--at-once must be at least 1, got 0"),
    ],
)
def test_refusals_of_the_command(
    options: list[str], words: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = write(tmp_path / "in.jsonl", row("a"))
    (tmp_path / "out.jsonl").write_text("")
    assert main(["batch", str(given), str(tmp_path / "out.jsonl"), str(tmp_path), *options]) == 2
    assert words in capsys.readouterr().err
