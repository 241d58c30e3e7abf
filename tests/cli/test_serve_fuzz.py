"""Covers a server of two ranks next to requests drawn at random: none is a failure, and honest ones are answered."""

import json
import pathlib
import threading
import time
from statistics import median

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
        answers, alone, beside, found = list[str](), list[float](), list[float](), list[int | None]()

        def ask(seconds: list[float]) -> None:
            begun = time.monotonic()
            answers.append(json.load(server.open("/v1/completions", HONEST))["choices"][0]["text"])
            seconds.append(time.monotonic() - begun)

        def ask_on(ends: threading.Event) -> None:
            while not ends.is_set():
                ask(beside)

        port = int(server.url.rsplit(":", 1)[1])
        for first in range(0, 1000, 100):  # alternates, so that both kinds see the machine's other work alike
            for _ in range(4):
                ask(alone)
            ends = threading.Event()
            asking = threading.Thread(target=ask_on, args=(ends,))
            asking.start()
            found += fuzz(port, 100, first=first, late=0)
            ends.set()
            asking.join(60)
        print(f"{ {status: found.count(status) for status in set(found)} }")
        for name, seconds in ("alone", sorted(alone)), ("beside", sorted(beside)):
            print(f"an honest request {name}: {median(seconds):.3f} s of {len(seconds)}, at most {seconds[-1]:.3f} s")
        print(f"ratio of medians {median(beside) / median(alone):.2f}")
        assert len(set(answers)) == 1
