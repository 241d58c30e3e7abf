"""Covers requests drawn at random: malformed bodies, large ones, clients that leave or stall; nothing leaks."""

import json
import random
import select
import socket
import threading
from typing import Any

import pytest

from shardfn.serve import _connection
from tests.serve.server import LIMIT, NAME, Running, metric, open_files

_FIELDS = (
    "model prompt messages max_tokens temperature top_p top_k min_p seed n stop stop_token_ids stream stream_options"
    " logprobs presence_penalty frequency_penalty repetition_penalty user tools echo response_format ignore_eos other"
    " logit_bias top_logprobs input encoding_format dimensions regex cache_salt"
).split()


def value(draw: random.Random, depth: int = 0) -> Any:
    """Any JSON."""
    kinds = 6 if depth > 2 else 8
    kind = draw.randrange(kinds)
    if kind == 6:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 7:
        return {draw.choice(_FIELDS): value(draw, depth + 1) for _ in range(draw.randrange(3))}
    texts = ["", "a", "\x00", "\ud800", "\U0001f642", "x" * draw.randrange(2000)]
    numbers = [0, 1, -1, 2**31, 2**64, -(2**63), 1e308, -0.0, 0.5, 1e-320]
    return [None, True, False, draw.choice(texts), draw.choice(numbers), draw.randrange(300)][kind]


def body(draw: random.Random, path: str) -> bytes:
    """A body with some wrong fields, or with wrong bytes."""
    good: dict[str, Any] = {"model": NAME, "max_tokens": draw.randrange(1, 8), "stream": draw.random() < 0.5}
    if "chat" in path:
        good["messages"] = [{"role": "user", "content": "hello"}]
    elif "embeddings" in path:
        good = {"model": NAME, "input": draw.choice(["hello", [1, 2, 3], ["a", "b"]])}
    else:
        good["prompt"] = draw.choice(["hello", [1, 2, 3], ["a", "b"]])
    if draw.random() < 0.7:
        for _ in range(draw.randrange(1, 4)):
            good[draw.choice(_FIELDS)] = value(draw)
    data = json.dumps(good).encode()
    how = draw.random()
    if how < 0.1:
        return data[: draw.randrange(len(data))]
    if how < 0.2:
        at = draw.randrange(len(data))
        return data[:at] + draw.randbytes(3) + data[at + 1 :]
    return b" " * (10 << 20) if how < 0.22 else data


def one(server: Running, seed: int) -> int | None:
    """One request; its status, or None for a client that leaves, or whose connection the server closes."""
    draw = random.Random(seed)
    path = draw.choice(["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
    data = body(draw, path)
    size = len(data) + (draw.random() < 0.05)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    leaves = draw.random()
    with socket.socket() as made:
        made.settimeout(LIMIT)
        try:
            made.connect(("127.0.0.1", server.port))
            made.sendall(head.encode() + (data[: len(data) // 2] if leaves < 0.1 else data))
            if leaves < 0.2:
                return None
            answer = b""
            while more := made.recv(1 << 16):
                answer += more
                if leaves < 0.3 or b"[DONE]" in answer or (b"event-stream" not in answer and _whole(answer)):
                    break
        except ConnectionError:
            return None
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    return int(answer.split()[1])


STALLS = {"model": NAME, "prompt": "ab", "max_tokens": 500, "ignore_eos": True, "stream": True, "logprobs": 5}


def stall(server: Running) -> None:
    """A client that reads nothing, until the server gives it up."""
    data = json.dumps(STALLS).encode()
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect(("127.0.0.1", server.port))
        made.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + data)
        gone = select.poll()
        gone.register(made, select.POLLHUP)
        assert gone.poll(1000 * LIMIT)


def _whole(answer: bytes) -> bool:
    head, found, rest = answer.partition(b"\r\n\r\n")
    size = next((int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length")), 0)
    return bool(found) and len(rest) >= size


@pytest.mark.parametrize(("num", "slow"), [(200, 0), pytest.param(1000, 10, marks=pytest.mark.nightly)])
def test_no_request_takes_it_down(num: int, slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connection, "_UNREAD", 4096)  # a stream of 500 tokens stalls
    server = Running(body_seconds=0.3, max_body=4 << 20, stall_seconds=0.5, max_waiting=1 << 20)
    first, found = open_files(), list[int | None]()

    def some(start: int) -> None:
        found.extend(one(server, seed) for seed in range(start, num, 8))

    threads = [threading.Thread(target=some, args=(i,)) for i in range(8)]
    threads += [threading.Thread(target=lambda: [stall(server) for _ in range(slow)])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    assert len(found) == num
    assert set(found) <= {None, 200, 400, 404, 408, 413, 415, 429}, sorted(map(str, set(found)))
    assert found.count(200) > num / 20 and found.count(400) > num / 20
    server.wait_idle()
    assert not slow or metric(server, "shardfn:stalled_total") >= slow
    good = {"model": NAME, "prompt": "ab", "max_tokens": 2}
    assert server.send("/v1/completions", good).status == 200
    server.wait_idle()
    server.wait_for(lambda: open_files() <= first + 4)
    assert server.close() == 0
