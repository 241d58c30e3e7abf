"""Covers the ends of a server: SIGTERM drains, a rank that ends is reported to each stream, and other failures."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serve.server import NAME, Received, Running, metric

Start = Callable[..., Running]
LONG = {"model": NAME, "prompt": "ab", "max_tokens": 200, "ignore_eos": True}


class Stream:
    """A stream that is read line by line."""

    def __init__(self, server: Running, **body: Any) -> None:
        self._connection = server.connect()
        data = json.dumps(LONG | {"stream": True} | body)
        self._connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        self.response = self._connection.getresponse()
        self.events = self._read()
        server.held.append(self)

    def _read(self) -> Iterator[str]:
        while line := self.response.readline():
            if line.strip():
                yield line.decode().removeprefix("data: ").strip()

    def close(self) -> None:
        self.response.close()
        self._connection.close()


def test_a_signal_lets_requests_end(start: Start) -> None:
    server = start(slow=0.01)
    stream = Stream(server, max_tokens=60)
    next(stream.events)
    server.signal()
    server.wait_for(lambda: server.get("/ready").status == 503)
    assert server.get("/health").status == 200
    found = server.send("/v1/completions", LONG)
    assert found.status == 503 and found.error["message"] == "The server ends." and found.headers["retry-after"]
    *_, last, done = stream.events
    assert json.loads(last)["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
    assert server.join() == 0


@pytest.mark.nightly
def test_requests_that_outlast_the_drain_are_cancelled(start: Start) -> None:
    server = start(slow=0.02, drain_seconds=0.2)
    stream = Stream(server)
    answers = list[Received]()
    asking = threading.Thread(target=lambda: answers.append(server.send("/v1/completions", LONG)))
    asking.start()
    next(stream.events)
    server.wait_for(lambda: len(server.front.calls) == 2)
    server.signal()
    *_, last = stream.events
    assert json.loads(last)["error"]["code"] == "server_ends"
    asking.join(20)
    assert answers[0].status == 503 and server.join() == 0
    assert server.engine.stats.counts["held"] == 0


def test_a_second_signal_ends_at_once(start: Start) -> None:
    server = start(slow=0.05)
    stream = Stream(server)
    next(stream.events)
    server.signal()
    server.signal()
    *_, last = stream.events
    assert "error" in json.loads(last) and server.join() == 0


def test_a_rank_that_ends_is_reported_to_all(start: Start) -> None:
    server = start(slow=0.02)
    streams = [Stream(server) for _ in range(5)]  # two of them wait
    next(streams[0].events)
    answers = list[Received]()
    asking = threading.Thread(target=lambda: answers.append(server.send("/v1/completions", LONG)))
    asking.start()
    server.wait_for(lambda: len(server.front.calls) == 6)
    began = time.monotonic()
    server.ranks.die()
    for stream in streams:
        *_, last = stream.events
        assert json.loads(last)["error"]["code"] == "engine_dead" and "Rank 0 of the engine" in last
    asking.join(5)
    assert answers[0].status == 503 and answers[0].error["code"] == "engine_dead"
    assert time.monotonic() - began < 5
    assert server.join() == 1
    assert any("error: rank 0 of the engine has ended, with status 1" in line for line in server.lines)


@pytest.mark.nightly
def test_a_step_that_does_not_end_is_seen(start: Start) -> None:
    server = start(health_seconds=0.2)
    assert server.get("/health").status == 200
    time.sleep(0.3)
    assert server.get("/health").status == 200  # without work no step is due
    server.ranks.slow = 1.0
    stream = Stream(server, max_tokens=3)
    server.wait_for(lambda: server.get("/health").status == 503)
    stream.close()


@pytest.mark.nightly
def test_logits_that_are_not_finite_end_their_request(start: Start) -> None:
    server = start()
    run = server.engine.runner.run

    def broken(*args: Any, **kwargs: Any) -> Any:
        found = run(*args, **kwargs)
        return found._replace(tokens=[-1] * len(found.tokens))

    server.engine.runner.run = broken  # pyright: ignore[reportAttributeAccessIssue]
    try:
        found = server.send("/v1/completions", LONG)
        assert found.status == 500 and "not finite" in found.error["message"]
        *_, last = Stream(server).events
        assert json.loads(last)["error"]["type"] == "server_error"
    finally:
        del server.engine.runner.run
    assert server.send("/v1/completions", LONG).status == 200
    server.wait_idle()


def test_a_failure_of_the_front_is_an_answer(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    def fails(text: str) -> list[int]:
        raise KeyError(text)

    from tests.serve.server import WORDS

    server = start(text=WORDS._replace(encode=fails))
    found = server.send("/v1/completions", LONG)
    assert (found.status, found.error["message"]) == (500, "The server has failed: KeyError.")
    assert server.send("/v1/completions", LONG | {"prompt": [1, 2], "max_tokens": 2}).status == 200
    assert metric(server, "shardfn:waiting_tokens") == 0
    assert "KeyError" in caplog.text


@pytest.mark.nightly
@pytest.mark.parametrize("stop", ["v", ["xyz", "v"]])
def test_stop_strings(start: Start, stop: Any) -> None:
    server = start()
    body = {"model": NAME, "prompt": "ab", "max_tokens": 200, "seed": 11, "ignore_eos": True}
    whole = server.send("/v1/completions", body).json["choices"][0]["text"]
    assert "v" in whole
    made = server.send("/v1/completions", body | {"stop": stop}).json
    assert made["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "text": whole.split("v")[0],
        "finish_reason": "stop",
        "logprobs": None,
    }
    assert made["usage"]["completion_tokens"] < 200
    server.wait_idle()
