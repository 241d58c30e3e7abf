"""Covers the limits of a server: keys, hosts, bodies, connections, the line, slow readers and clients that leave."""

import contextlib
import json
import pathlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from shardfn.serve import ApiError, Settings, _connection, read_keys
from shardfn.serve._access import KeyLimits, KeyUse
from tests.serve.server import NAME, WORDS, Running, metric, open_files

BODY = {"model": NAME, "prompt": "ab", "max_tokens": 2}
LONG = {"model": NAME, "prompt": "ab", "max_tokens": 500, "ignore_eos": True}
Start = Callable[..., Running]


def raw(server: Running, data: bytes, *, receive: int | None = None) -> socket.socket:
    one = socket.socket()
    if receive is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    one.settimeout(20)
    one.connect(("127.0.0.1", server.port))
    one.sendall(data)
    return one


def request(body: Any, path: str = "/v1/completions", more: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    return f"{head}{more}\r\n".encode() + data


def read_answer(one: socket.socket) -> bytes:
    """An answer of JSON."""
    data = b""
    while not data.endswith(b"}"):
        data += one.recv(1000)
    return data


def test_keys(start: Start) -> None:
    server = start(keys=("first-key", "second-key"))
    for key in ("first-key", "second-key"):
        assert server.send("/v1/completions", BODY, {"Authorization": f"Bearer {key}"}).status == 200
    for wrong in (
        None,
        "",
        "Bearer",
        "Bearer first-ke",
        "Bearer first-keyy",
        "Basic first-key",
        "first-key",
        "Bearer é",
    ):
        found = server.get("/v1/models", {} if wrong is None else {"Authorization": wrong})
        assert (found.status, found.error["code"]) == (401, "invalid_api_key")
        assert found.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/ready", "/metrics"):
        assert server.get(path).status == 200


def test_a_key_is_asked_for_before_the_body_is_read(start: Start) -> None:
    server = start(keys=("key",))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
    with raw(server, head.encode()) as one:
        assert one.recv(100).startswith(b"HTTP/1.1 401 ")


def test_files_of_keys(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\n\n  one \ntwo\n")
    assert read_keys(path) == {"one": KeyLimits(), "two": KeyLimits()}
    path.write_text("one requests=3 concurrent=2\ntwo\ttokens=1000\n")
    assert read_keys(path) == {"one": KeyLimits(3, None, 2), "two": KeyLimits(tokens=1000)}
    known = "after key 1 of 1 there must be requests=N, tokens=N, concurrent=N, got"
    wrong = {"a b": f"{known} 'b'", "a requests=0": known, "a rate=3": known, "a\na\n": "key 2 of 2 is there twice"}
    for text, words in {"# none\n": "has no key. Write one", "é": "not ASCII", **wrong}.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_keys(path)


def test_keys_have_their_own_limits(start: Start) -> None:
    server = start(keys={"slow": KeyLimits(requests=2), "short": KeyLimits(tokens=4), "free": KeyLimits()})

    def ask(key: str) -> Any:
        return server.send("/v1/completions", BODY, {"Authorization": f"Bearer {key}"})

    assert [ask("slow").status for _ in range(3)] == [200, 200, 429]
    found = ask("slow")
    assert found.error["message"] == "The key may begin 2 requests a minute. Try again later."
    assert found.error["code"] == "rate_limit_exceeded" and 0 < int(found.headers["retry-after"]) <= 60
    assert server.get("/v1/models", {"Authorization": "Bearer slow"}).status == 200  # no request to the model
    assert ask("short").status == 200
    assert "may use 4 tokens a minute" in ask("short").error["message"]
    assert [ask("free").status for _ in range(3)] == [200, 200, 200]


def test_a_key_has_a_number_of_requests_in_progress(start: Start) -> None:
    server, key = start(slow=0.02, keys={"a": KeyLimits(concurrent=1)}), {"Authorization": "Bearer a"}
    stream = server.connect()
    body = json.dumps({**BODY, "max_tokens": 300, "ignore_eos": True, "stream": True})
    stream.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **key})
    stream.getresponse().readline()
    assert "may have 1 requests in progress" in server.send("/v1/completions", BODY, key).error["message"]
    stream.close()
    server.wait_for(lambda: server.send("/v1/completions", BODY, key).status == 200)


def test_limits_are_of_a_minute() -> None:
    now = [0.0]
    use = KeyUse(KeyLimits(requests=2, tokens=10), lambda: now[0])
    use.begin()
    now[0] = 20.0
    use.begin()
    use.add_tokens(10)
    for second, wait in ((20.0, "40"), (59.5, "1"), (60.5, "20"), (79.5, "1")):
        now[0] = second
        with pytest.raises(ApiError) as caught:
            use.begin()
        assert caught.value.headers["Retry-After"] == wait, second
    now[0] = 80.0
    use.begin()


def test_other_machines_need_keys() -> None:
    with pytest.raises(ValueError, match=r"needs a file of keys, got host 0\.0\.0\.0 without keys"):
        Settings(NAME, host="0.0.0.0")
    assert not Settings(NAME, host="0.0.0.0", keys=("a",)).loopback
    with pytest.raises(ValueError, match="port must be from 0 to 65535, got 70000"):
        Settings(NAME, port=70000)
    with pytest.raises(ValueError, match=r"drain_seconds must be above 0.*got 0"):
        Settings(NAME, drain_seconds=0)


def test_pages_of_other_sites_do_not_reach_it(start: Start) -> None:
    server = start(hosts=("proxy.example",))
    for host in ("localhost", "127.0.0.1:80", "[::1]:80", "proxy.example"):
        assert server.get("/v1/models", {"Host": host}).status == 200
    found = server.get("/v1/models", {"Host": "evil.example:8000"})
    assert found.status == 421 and "'evil.example:8000'" in found.error["message"]


@pytest.mark.parametrize("declared", [True, False])
def test_a_large_body(start: Start, declared: bool) -> None:
    server = start(max_body=1000)
    assert server.send("/v1/completions", BODY | {"user": "u" * 800}).status == 200
    if declared:
        found = server.send("/v1/completions", BODY | {"user": "u" * 1000})
    else:
        parts = iter([json.dumps(BODY).encode(), b" " * 2000])
        connection = server.connect()
        connection.request("POST", "/v1/completions", parts, {"Content-Type": "application/json"}, encode_chunked=True)
        response = connection.getresponse()
        found = type(server.get("/ready"))(response.status, response.read(), {})
        connection.close()
    assert found.status == 413 and "more than 1000 bytes" in found.error["message"]


def test_a_body_that_does_not_arrive(start: Start) -> None:
    server = start(body_seconds=0.1)
    with raw(server, request(BODY)[:-5]) as one:
        assert one.recv(100).startswith(b"HTTP/1.1 408 ")


def is_closed(one: socket.socket) -> bool:
    try:
        return one.recv(100) == b""
    except ConnectionResetError:
        return True


def test_headers_that_do_not_arrive(start: Start) -> None:
    server = start(header_seconds=0.2)
    for data in (b"", b"GET /health HT"):
        with raw(server, data) as one:
            assert is_closed(one)
    with raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as one:
        assert read_answer(one).startswith(b"HTTP/1.1 200 ")
        one.sendall(b"GET /hea")
        assert is_closed(one)


def test_bytes_that_are_not_http(server: Running) -> None:
    with raw(server, b"\x16\x03\x01\x02\x00\x01\r\n\r\n") as one:
        assert one.recv(1000).startswith(b"HTTP/1.1 400 Bad Request")


def test_too_many_connections(start: Start) -> None:
    server = start(max_connections=3)
    server.wait_for(lambda: True)
    held = [raw(server, b"") for _ in range(3)]
    time.sleep(0.2)
    with raw(server, request(BODY)) as one:
        answer = one.recv(1000)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"3 connections are open" in answer
    for one in held:
        one.close()
    server.wait_for(lambda: server.get("/health").status == 200)


def test_the_line_is_bounded(start: Start) -> None:
    server = start(max_waiting=600, slow=0.05)
    streams = [raw(server, request(LONG | {"prompt": "x" * 10, "stream": True})) for _ in range(3)]
    server.wait_for(lambda: server.engine.stats.counts["running"] == 3)
    answers = list[Any]()
    body = {"model": NAME, "prompt": "y" * 250, "max_tokens": 1}
    threads = [threading.Thread(target=lambda: answers.append(server.send("/v1/completions", body))) for _ in range(2)]
    for thread in threads:
        thread.start()
    server.wait_for(lambda: server.front.calls.waiting == 500)
    found = server.send("/v1/completions", body)
    assert (found.status, found.error["code"]) == (429, "rate_limit_exceeded")
    assert int(found.headers["retry-after"]) >= 1 and "500 tokens of prompts wait" in found.error["message"]
    for one in streams:
        one.close()
    for thread in threads:
        thread.join(20)
    assert [one.status for one in answers] == [200, 200]
    server.wait_idle()


def test_a_request_above_the_line_is_refused(start: Start) -> None:
    server = start(max_waiting=8)
    for path, body in (("/v1/embeddings", {"model": NAME, "input": ["ab"] * 5}), ("/v1/completions", LONG)):
        found = server.send(path, body | ({} if "input" in body else {"prompt": "x" * 9}))
        assert (found.status, found.error["code"]) == (413, "too_many_tokens")
        assert "it takes at most 8" in found.error["message"].replace("the line of this server", "it")
        assert metric(server, "shardfn:waiting_tokens") == 0
    assert server.send("/v1/completions", BODY | {"prompt": "x" * 8}).status == 200
    assert start().front.calls.max_waiting == 1 << 16


def test_long_texts_are_refused_before_they_become_tokens(start: Start) -> None:
    def encode(text: str) -> list[int]:
        assert len(text) < 2000
        return list(text.encode())

    server = start(text=WORDS._replace(encode=encode))
    many = {"messages": [{"role": "user", "content": "x" * 3000}], "model": NAME}
    for path, body in (
        ("/v1/completions", BODY | {"prompt": "x" * 3000}),
        ("/v1/completions", BODY | {"prompt": ["x" * 500] * 129}),
        ("/v1/embeddings", {"model": NAME, "input": ["a", "x" * 3000]}),
        ("/v1/chat/completions", many),
    ):
        assert server.send(path, body).status == 400


def test_short_bodies_do_not_wait_for_the_tokens_of_long_ones(start: Start) -> None:
    goes_on = threading.Event()

    def encode(text: str) -> list[int]:
        assert text != "slow" or goes_on.wait(20)
        return list(text.encode())

    server = start(text=WORDS._replace(encode=encode))
    answers = list[Any]()
    long = BODY | {"prompt": "slow", "user": "x" * (1 << 16)}
    asking = threading.Thread(target=lambda: answers.append(server.send("/v1/completions", long)))
    asking.start()
    assert server.send("/v1/completions", BODY).status == 200 and not answers
    goes_on.set()
    asking.join(20)
    assert answers[0].status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_without_a_writing_half_has_its_answer(start: Start, stream: bool, version: str) -> None:
    server = start(slow=0.01)
    data = request(LONG | {"stream": stream, "max_tokens": 20}).replace(b"HTTP/1.1", f"HTTP/{version}".encode())
    with raw(server, data) as one:
        one.shutdown(socket.SHUT_WR)
        answer = b""
        while more := one.recv(10_000):  # until the server closes
            answer += more
    assert answer.startswith(b"HTTP/1.1 200 ") and b'"finish_reason":"length"' in answer
    assert stream == (b"[DONE]" in answer)
    with raw(server, request(BODY) * 2) as one:
        one.shutdown(socket.SHUT_WR)
        answer = b""
        while more := one.recv(10_000):
            answer += more
    assert answer.count(b"HTTP/1.1 200") == 2
    with raw(server, request(BODY)[:-5]) as one:  # a body that never comes
        one.shutdown(socket.SHUT_WR)
        assert is_closed(one)


def test_a_client_without_a_writing_half_has_notes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connection, "_NOTE_SECONDS", 0.05)
    server = start(slow=0.02)
    for stream, note in ((False, b"HTTP/1.1 100 Continue\r\n\r\n"), (True, b"\r\n:\n\n\r\n")):
        with raw(server, request(LONG | {"stream": stream, "max_tokens": 20})) as one:
            one.shutdown(socket.SHUT_WR)
            answer = b""
            while more := one.recv(10_000):
                answer += more
        assert note in answer and b"HTTP/1.1 200 " in answer and b'"finish_reason":"length"' in answer


def test_a_whole_answer_that_is_not_read_is_dropped(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connection, "_UNREAD", 4096)
    server = start(stall_seconds=0.2)
    body = {"model": NAME, "input": [[1]] * 500}
    whole = server.send("/v1/embeddings", body)
    with raw(server, request(body, "/v1/embeddings"), receive=4096) as one:
        server.wait_for(lambda: metric(server, "shardfn:stalled_total") == 1)
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while more := one.recv(1 << 16):
                got += more
    assert len(got) < len(whole.data) / 2
    with raw(server, request(body, "/v1/embeddings"), receive=4096) as one:  # a slow reader that goes on
        got = b""
        while not got.endswith(whole.data[-100:]):
            got += one.recv(1 << 14)
            time.sleep(0.001)
    assert got.endswith(whole.data) and metric(server, "shardfn:stalled_total") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(start: Start, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connection, "_NOTE_SECONDS", 0.05)
    server = start(slow=0.01)
    one = raw(server, request(LONG | {"stream": stream}))
    server.wait_for(lambda: server.engine.stats.counts["held"] > 0)
    if stream:
        assert one.recv(100).startswith(b"HTTP/1.1 200 ")
    one.close()
    server.wait_idle()
    assert metric(server, "shardfn:disconnected_total") == 1
    assert metric(server, "vllm:generation_tokens_total") < 500


def test_a_client_that_leaves_in_the_body(server: Running) -> None:
    raw(server, request(BODY)[:-5]).close()
    assert server.send("/v1/completions", BODY).status == 200


@pytest.mark.nightly
def test_a_slow_reader_is_cancelled(start: Start) -> None:
    server = start(stall_seconds=0.3)
    many = LONG | {"stream": True, "n": 100, "logprobs": 0}  # megabytes of events
    with raw(server, request(many), receive=4096) as one:
        server.wait_for(lambda: metric(server, "shardfn:stalled_total") == 1)
        gone = select.poll()
        gone.register(one, select.POLLHUP)
        assert gone.poll(20_000)  # also for a client that does not read: the kernel keeps nothing for it
        server.wait_idle()
    assert metric(server, "vllm:generation_tokens_total") < 50_000


def test_connections_and_tasks_end(server: Running) -> None:
    server.send("/v1/completions", BODY)
    time.sleep(0.1)
    before = open_files()
    for _ in range(20):
        assert server.send("/v1/completions", BODY | {"stream": True}).status == 200
        assert server.send("/v1/completions", b"{").status == 400
    server.wait_idle()
    time.sleep(0.1)
    assert open_files() <= before + 2


def test_one_connection_for_many_requests(server: Running) -> None:
    connection = server.connect()
    for body in (BODY, {"model": 1}, BODY | {"stream": True}, BODY):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == (400 if body["model"] == 1 else 200) and response.read()
    connection.close()


def test_pipelined_requests(server: Running) -> None:
    with raw(server, request(BODY) * 2) as one:
        data = b""
        while data.count(b"HTTP/1.1 200") < 2:
            data += one.recv(10_000)
