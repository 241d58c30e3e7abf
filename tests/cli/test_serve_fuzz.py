"""Covers a server of two ranks next to requests drawn at random: none is a failure, and honest ones are answered."""

import json
import pathlib
import threading
import time

import pytest

from tests.cli.test_serve_command import model as model  # a fixture
from tests.cli.test_serve_command import running
from tests.serve.test_fuzz import fuzz

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
HONEST = {"model": "tiny", "prompt": "The sea", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.mark.nightly
def test_a_thousand_requests_at_two_ranks(model: pathlib.Path) -> None:
    sizes = "--port 0 --budget 16 --running 12 --cache-gib 0.05".split()
    with running(model, *sizes, "--mesh", "tp=2", "--chat-template", model / "chat.jinja") as server:
        answers, seconds, ends = list[str](), list[float](), threading.Event()

        def ask() -> None:
            begun = time.monotonic()
            answers.append(json.load(server.open("/v1/completions", HONEST))["choices"][0]["text"])
            seconds.append(time.monotonic() - begun)

        def ask_on() -> None:
            while not ends.is_set():
                ask()

        for _ in range(10):
            ask()
        alone = sorted(seconds)[len(seconds) // 2]
        seconds.clear()
        asking = threading.Thread(target=ask_on)
        asking.start()
        found = fuzz(int(server.url.rsplit(":", 1)[1]), 1000, late=0)
        ends.set()
        asking.join(60)
        beside = sorted(seconds)
        print(f"{ {status: found.count(status) for status in set(found)} }; an honest request: {alone:.3f} s alone,")
        print(f"beside {beside[len(beside) // 2]:.3f} s at the median of {len(beside)}, at most {beside[-1]:.3f} s")
        assert len(set(answers)) == 1
