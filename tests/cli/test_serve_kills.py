"""Covers ranks that are killed while they compute: each stream and each other request has an error within seconds.

With replicas, only the streams of the killed replica have one, and the replica is started again.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from typing import Any

import pytest

from tests.cli.test_serve_command import LIMIT, LONG, ROOT, SMALL, Program, events, running
from tests.cli.test_serve_command import model as model  # a fixture

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.nightly

WORDS = "x" * 400
STREAMS: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": WORDS, "max_tokens": 100},
    "decode": {},
    "choices": {"n": 8, "max_tokens": 100, "logprobs": 5},
    "grammar": {"regex": "[a-z]{400}", "max_tokens": 450},
    "drain": {},
}


def wait_for(server: Program, name: str, least: int) -> None:
    """Waits until a number of the metrics is high enough."""
    end = time.monotonic() + LIMIT
    while True:
        lines = server.open("/metrics").read().decode().splitlines()
        [value] = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")]
        if value >= least:
            return
        assert time.monotonic() < end
        time.sleep(0.01)


class Waiting(threading.Thread):
    """A request that waits for its whole answer."""

    def __init__(self, server: Program, path: str, body: Any) -> None:
        super().__init__(daemon=True)
        self._server, self._path, self._body = server, path, body
        self.found: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.found = self._server.open(self._path, self._body).read()
        except urllib.error.HTTPError as error:
            self.found = error.code, json.load(error)["error"]["code"]


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("phase", [*STREAMS, "embeddings"])
def test_a_rank_that_is_killed_at_a_phase(model: pathlib.Path, phase: str, dies: int) -> None:
    if phase == "grammar":
        pytest.importorskip("llguidance")
    with running(model, *SMALL, "--mesh", "tp=2") as server:
        num = 0 if phase == "embeddings" else 4  # the last one waits: three run at a time
        streams = [events(server.open("/v1/completions", LONG | STREAMS[phase])) for _ in range(num)]
        whole = list[Waiting]()
        if phase != "prompt":
            whole = [Waiting(server, "/v1/embeddings", {"model": "tiny", "input": [WORDS] * 60})]
            whole += [Waiting(server, "/v1/completions", LONG | {"stream": False}) for _ in range(2)]
        wait_for(server, "shardfn:open_streams", num + len(whole))
        if streams and phase != "prompt":
            next(streams[0])
        ranks = server.ranks
        if phase == "drain":
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        began = time.monotonic()
        os.kill(ranks[dies], signal.SIGKILL)
        for stream in streams:
            *_, last = stream
            error = json.loads(last)["error"]
            assert error["code"] == "engine_dead"
            assert error["message"].startswith(f"Rank {dies} of the engine has ended, by signal 9")
        for one in whole:
            one.join(LIMIT)
            assert one.found == (503, "engine_dead"), one.found
        assert time.monotonic() - began < LIMIT / 20  # 5 s, or more on a machine with other work
        assert server.process.wait(LIMIT) == 1
        assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in ranks)


def test_a_replica_that_is_killed(model: pathlib.Path) -> None:
    with running(model, *SMALL, "--replicas", "2", "--oversubscribe") as server:
        wait_for_replicas(server, [1, 1])
        streams = [events(server.open("/v1/completions", LONG | {"max_tokens": 400})) for _ in range(6)]
        for stream in streams:
            next(stream)
        os.kill(server.ranks[1], signal.SIGKILL)
        ends = [list(stream)[-1] for stream in streams]
        errors = [json.loads(end)["error"]["message"] for end in ends if end != "[DONE]"]
        assert len(errors) == 3 and all("by signal 9; this request was on it" in text for text in errors)
        wait_for_replicas(server, [1, 1])
        assert any("it is started again in 1 s, 1 of 3 times in a row" in line for line in server.lines)
        assert len(server.ranks) == 2
        answers = [
            server.open("/v1/completions", LONG | {"stream": False, "max_tokens": 9, "seed": 7}).read()
            for _ in range(4)
        ]
        assert len({json.loads(x)["choices"][0]["text"] for x in answers}) == 1


def wait_for_replicas(server: Program, want: list[int]) -> None:
    """Waits until these replicas take requests."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        lines = server.open("/metrics").read().decode().splitlines()
        if [int(line[-1]) for line in lines if line.startswith("shardfn:replica_up{")] == want:
            return
        time.sleep(0.05)
    raise AssertionError(server.lines)


def test_a_replica_that_dies_while_it_loads(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A stand-in of the rank's program dies by a signal at each start: three restarts, and then the server's end."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\nif '_serve_rank' in ' '.join(sys.orig_argv): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardfn", "serve", str(model), *SMALL, "--replicas", "2", "--oversubscribe"]
    made = subprocess.run([*command, "--restarts", "1"], env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert made.returncode == 1
    assert "has ended, by signal 9; it is started again in 1 s, 1 of 1 times in a row" in made.stderr
    assert "has ended, by signal 9, after 1 restarts in a row" in made.stderr
