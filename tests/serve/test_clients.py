"""Covers the server by packages that its users have: chats, streams, tools, structured output and embeddings."""

import json
import os
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.server import LIMIT, NAME, TALKS, Running

CALLS = pathlib.Path(__file__).with_name("client_calls.py")
TEXT = "Fine, **thanks**."


@pytest.fixture(scope="module")
def talks() -> Iterator[Running]:
    """A server whose template has tools."""
    made = Running(text=TALKS)
    yield made
    made.wait_idle()
    assert made.close() == 0


@pytest.mark.nightly
@pytest.mark.parametrize("client", ["openai", "anthropic", "langchain-openai", "litellm", "instructor"])
def test_a_client(talks: Running, client_python: str, client: str) -> None:
    pytest.importorskip("llguidance")
    url = f"http://127.0.0.1:{talks.port}"
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGCHAIN_TRACING_V2": "false", "NO_PROXY": "127.0.0.1"}
    command = [client_python, "-P", str(CALLS), client, url, NAME]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **quiet}, timeout=6 * LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert made.get("chat", TEXT) == made.get("stream", TEXT) == TEXT
    assert made.get("tools", []) in ([], [["find", {"place": "here"}]])
    assert set(made["structured"]) == {"kind", "sure"} and made["structured"]["kind"] in ("x", "yz")
    if client != "instructor":
        assert {"chat", "stream", "tools"} <= set(made)
    if client in ("openai", "langchain-openai", "litellm"):
        body = {"model": NAME, "input": ["one", "two words"], "dimensions": 16}
        want = [row["embedding"] for row in talks.send("/v1/embeddings", body).json["data"]]
        assert made["embeddings"] == [pytest.approx(row, abs=1e-6) for row in want]
