"""Covers a link between two nodes that is cut in the middle of a run: ranks on both sides stop, with the reason.

No connection is closed then, and the store by which ranks report failures is on one side only.
"""

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import pytest

PROGRAM = pathlib.Path(__file__).parent / "train_over_cut.py"
TIMEOUT = 15.0
# A bound for a hang, under any load of the machine. The wait for the store alone would take a quarter of an hour.
PATIENCE = 240


@pytest.mark.nightly
def test_ranks_on_both_sides_of_a_cut_link_stop_with_the_reason(tmp_path: pathlib.Path, nodes: Any) -> None:
    with nodes.torchrun(PROGRAM, str(tmp_path), str(TIMEOUT)) as agents:
        _until(lambda: all(_read(tmp_path / f"at-{rank}") > "1" for rank in range(4)))
        assert [agent.poll() for agent in agents] == [None, None]
        nodes.cut()
        told = [tmp_path / f"told-{rank}" for rank in range(4)]
        _until(lambda: all(_read(path).endswith("}") for path in told))
    found = [json.loads(path.read_text()) for path in told]
    assert {x["kind"] for x in found} == {"RankError"}
    at = int(_read(tmp_path / "at-0"))
    for x in found[:2]:  # the store is theirs
        assert "ranks 2, 3" in x["text"] and f"step {at}" in x["text"] and f"waited for {TIMEOUT:g} s" in x["text"]
    for rank, x in enumerate(found[2:], 2):
        assert f"rank {rank} waited for {TIMEOUT:g} s in step {at}" in x["text"]
        assert "The link to the node of rank 0" in x["text"]


def _read(path: pathlib.Path) -> str:
    return path.read_text() if path.exists() else ""


def _until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)
