"""Covers replicas: equal answers, a replica that ends, restarts and their bound, and metrics by replica."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shardfn.inference import Sampling
from tests.serve.server import NAME, Received, Running, new_engine
from tests.serve.test_ends import LONG, Stream

Start = Callable[..., Running]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts wait for hundredths of seconds."""
    monkeypatch.setattr("shardfn.serve._replicas._WAIT", 0.02)


@pytest.fixture(scope="module", autouse=True)
def captured() -> None:
    """Captures the graphs that all engines share, so that no two threads do."""
    new_engine().generate([[1, 2, 3, 4, 5, 6], [1]], Sampling(max_tokens=4))


def begin(start: Start, **settings: Any) -> Running:
    server = start(replicas=2, **{"restarts": 2, **settings})
    server.wait_for(lambda: len(server.front.calls.counts) == 2 or all(server.front.calls._replicas))
    return server


def numbers(server: Running, name: str) -> list[float]:
    """The values of a metric by replica."""
    lines = server.get("/metrics").data.decode().splitlines()
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f'{name}{{model_name="tiny",replica="')]


def test_an_answer_does_not_depend_on_the_replica(start: Start) -> None:
    server, alone = begin(start), start()
    bodies = [{"model": NAME, "prompt": f"{i} the sea", "max_tokens": 8, "seed": i} for i in range(2)]
    for body in bodies:
        want = alone.send("/v1/completions", body).json["choices"]
        streams = [Stream(server, max_tokens=60) for _ in range(2)]  # one on each replica
        found = [server.send("/v1/completions", body).json["choices"] for _ in range(2)]
        for stream in streams:
            stream.close()
        assert found == [want, want]
    assert min(numbers(server, "vllm:generation_tokens_total")) > 0
    assert numbers(server, "shardfn:replica_up") == [1, 1]
    assert numbers(server, "shardfn:replica_restarts_total") == [0, 0]


def test_a_replica_that_ends_loses_only_its_own_streams(start: Start) -> None:
    """Three sequences run on a replica at a time, so that two of its five requests have no token yet."""
    server = begin(start, slow=0.02)
    streams = [Stream(server, max_tokens=25) for _ in range(10)]
    sent = server.front.calls._sent
    server.wait_for(lambda: sum(x.begun for x in sent.values()) == 6)
    doomed = [name for name, x in sent.items() if x.replica == 1 and x.begun]
    assert len(doomed) == 3 and sum(x.replica for x in sent.values()) == 5
    server.made[1].die()
    ends = [list(stream.events)[-1] for stream in streams]
    errors = [json.loads(end)["error"] for end in ends if end != "[DONE]"]
    assert len(errors) == 3 and {error["code"] for error in errors} == {"engine_dead"}
    assert all(error["message"].startswith("Rank 0 of replica 1 has ended, with status 1") for error in errors)
    server.wait_for(lambda: server.front.calls._replicas[1] is not None)
    assert any("it is started again in 0.02 s, 1 of 2 times in a row" in line for line in server.lines)
    assert numbers(server, "shardfn:replica_restarts_total") == [0, 1]
    assert server.send("/v1/completions", LONG | {"max_tokens": 2}).status == 200
    server.wait_for(lambda: not len(server.front.calls))


@pytest.mark.nightly
def test_requests_without_a_token_have_the_answer_of_another_replica(start: Start) -> None:
    server = begin(start, slow=0.05)
    body = {"model": NAME, "prompt": "ab" * 60, "max_tokens": 3, "seed": 3}
    answers = list[Received]()

    def ask() -> None:
        answers.append(server.send("/v1/completions", body))

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for one in asking:
        one.start()
    server.wait_for(lambda: len(server.front.calls._sent) == 2)
    server.made[1].die()
    for one in asking:
        one.join()
    assert [x.status for x in answers] == [200, 200]
    assert answers[0].json["choices"] == answers[1].json["choices"]


@pytest.mark.nightly
def test_a_replica_that_ends_too_often_ends_the_server(start: Start) -> None:
    server = begin(start, restarts=1)
    stream = Stream(server, max_tokens=500)  # on replica 0
    next(stream.events)
    server.made[1].die()
    server.wait_for(lambda: any("1 of 1 times in a row" in line for line in server.lines))
    server.wait_for(lambda: server.front.calls._replicas[1] is not None)
    server.made[1].die()
    assert server.join() == 1
    assert any("rank 0 of replica 1 has ended, with status 1, after 1 restarts in a row" in x for x in server.lines)
    assert json.loads(list(stream.events)[-1])["error"]["code"] == "engine_dead"


@pytest.mark.nightly
def test_all_replicas_down(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardfn.serve._replicas._WAIT", 0.3)
    server = start(restarts=1)
    server.ranks.die()
    server.wait_for(lambda: not server.front.calls.is_up)
    for path in ("/ready", "/v1/models"):
        found = server.get(path)
        assert (found.status, found.error["code"]) == (503, "engine_dead") and found.headers["retry-after"]
    server.wait_for(lambda: server.front.calls.is_up)
    assert server.send("/v1/completions", LONG | {"max_tokens": 2}).status == 200
