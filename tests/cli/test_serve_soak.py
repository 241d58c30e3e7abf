"""Covers a server of two ranks under 50 clients that stream and leave: answers are those alone, memory and blocks flat.

It runs for two minutes, or for the seconds that `SHARDFN_SOAK` says.
"""

import http.client
import json
import os
import pathlib
import random
import re
import threading
import time
from collections import Counter
from typing import Any

import pytest

from tests.cli.test_serve_command import LIMIT, Program, running
from tests.cli.test_serve_command import model as model  # a fixture

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

SECONDS, CLIENTS, REQUESTS = float(os.environ.get("SHARDFN_SOAK", "120")), 50, 40
SIZES = "--port 0 --budget 64 --running 24 --cache-gib 0.02".split()
GROWTH = 24  # MiB a process, from a fifth of the time to the end
HELD = ("shardfn:free_blocks", "shardfn:cached_blocks")


def request(number: int) -> dict[str, Any]:
    """One of the requests, whose answer is a function of its number."""
    draw = random.Random(number)
    prompt = [draw.randrange(256) for _ in range(draw.choice((1, 5, 30, 120)))]
    if draw.random() < 0.4:  # a common beginning, for the cache of prefixes
        prompt = list(range(64, 112)) + prompt
    given: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": draw.choice((1, 8, 30, 60)),
        "seed": number,
    }
    given |= {"temperature": draw.choice((0.0, 0.8, 1.5)), "stream": True}
    given |= draw.choice(({}, {"stop": ["a", "the"]}, {"top_p": 0.7}, {"frequency_penalty": 1.0}, {"top_k": 5}))
    return given | {"ignore_eos": True}


def ask(port: int, number: int, leaves: int | None) -> tuple[str, bool]:
    """Sends a request; returns its text, up to the events after which the client leaves, and whether it is whole."""
    made = http.client.HTTPConnection("127.0.0.1", port, timeout=4 * LIMIT)
    try:
        made.request("POST", "/v1/completions", json.dumps(request(number)), {"Content-Type": "application/json"})
        answer, text, num = made.getresponse(), "", 0
        assert answer.status == 200, answer.read()
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return text, True
            if leaves is not None and num >= leaves:
                return text, False
            found = json.loads(line[6:])
            assert "error" not in found, found
            text, num = text + found["choices"][0]["text"], num + 1
        raise AssertionError(f"the stream of request {number} has no end")
    finally:
        made.close()


def numbers(server: Program) -> dict[str, float]:
    """The numbers of the metrics, by name."""
    text = server.open("/metrics").read().decode()
    return {name: float(value) for name, value in re.findall(r"^([\w:]+){[^}]*} (\S+)$", text, re.M)}


def resident(server: Program) -> list[float]:
    """MiB of memory of the front and of each rank."""
    status = [pathlib.Path(f"/proc/{pid}/status").read_text() for pid in (server.process.pid, *server.ranks)]
    return [int(text.partition("VmRSS:")[2].split()[0]) / 1024 for text in status]


def wait_idle(server: Program) -> dict[str, float]:
    """The numbers once no request is in progress."""
    end = time.monotonic() + LIMIT
    while (found := numbers(server))["shardfn:open_streams"] or found["vllm:num_requests_running"]:
        assert time.monotonic() < end, found
        time.sleep(0.1)
    return found


@pytest.mark.nightly
def test_fifty_streams_with_clients_that_leave(model: pathlib.Path) -> None:
    with running(model, *SIZES, "--mesh", "tp=2") as server:
        port = int(server.url.rsplit(":", 1)[1])
        alone = [ask(port, number, None)[0] for number in range(REQUESTS)]
        assert len(set(alone)) > REQUESTS / 2
        before, counts, wrong, ends = wait_idle(server), Counter[str](), list[str](), threading.Event()
        lock = threading.Lock()

        def stream_on(client: int) -> None:
            draw = random.Random(client)
            while not ends.is_set():
                number, leaves = draw.randrange(REQUESTS), draw.choice((None, None, 0, draw.randrange(1, 40)))
                try:
                    text, whole = ask(port, number, leaves)
                    right = text == alone[number] if whole else alone[number].startswith(text.rstrip("\ufffd"))
                    said = "" if right else f"request {number}: {text!r}, alone {alone[number]!r}"
                except Exception as error:
                    whole, said = False, f"request {number}: {type(error).__name__}: {error}"
                with lock:
                    counts.update(["whole" if whole else "left"])
                    wrong.extend([said] if said else [])

        clients = [threading.Thread(target=stream_on, args=(i,)) for i in range(CLIENTS)]
        for client in clients:
            client.start()
        memory = list[list[float]]()
        for _ in range(10):
            time.sleep(SECONDS / 10)
            memory.append(resident(server))
            print(f"{dict(counts)}, {len(wrong)} wrong; MiB of front and ranks: {[f'{x:.1f}' for x in memory[-1]]}")
        ends.set()
        for client in clients:
            client.join(4 * LIMIT)
        after = wait_idle(server)
        print(f"blocks before {[before[x] for x in HELD]}, after {[after[x] for x in HELD]}")
        assert not wrong, f"{len(wrong)} of {counts.total()}: {wrong[:5]}"
        assert sum(after[x] for x in HELD) == sum(before[x] for x in HELD)
        assert all(last - first < GROWTH for first, last in zip(memory[1], memory[-1], strict=True)), memory
        assert counts["whole"] > CLIENTS and counts["left"] > CLIENTS
