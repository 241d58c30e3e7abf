"""Covers two nodes: torchrun with its rendezvous across a link between two network namespaces, `tp` inside a node.

The step equals one device, and the link carries the planned bytes, by the kernel's counter.
"""

import json
import pathlib
from typing import Any

import pytest

PROGRAM = pathlib.Path(__file__).parent / "train_on_nodes.py"
# Beside payloads: agreements, barriers and the heartbeats of torchrun.
CONTROL = 200_000


def _torchrun(nodes: Any, *args: str) -> list[dict[str, Any]]:
    """The output of the nodes."""
    with nodes.torchrun(PROGRAM, *args) as agents:
        printed = [agent.communicate(timeout=280)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(printed)[-6000:]
    return [json.loads(next(x for x in text.splitlines() if x.startswith("{"))) for text in printed]


@pytest.mark.nightly
@pytest.mark.parametrize(("across", "stage"), [("dp", 2), ("dp", 3), ("pp", 0), ("node", 3)])
def test_two_nodes_equal_one_device_and_send_the_planned_bytes(nodes: Any, across: str, stage: int) -> None:
    for node in _torchrun(nodes, across, str(stage)):
        # The bytes in frames (TCP's, IP's and Ethernet's headers) per byte of payload are measured on the same link.
        if across == "node":  # in two hops: those of one node share memory, and only those
            assert node["memory"] == ["dp"] and "node" in node["gloo"]
        else:
            assert across in node["gloo"] and across not in node["memory"]
        assert 1.0 < node["frames"] < 1.1
        assert node["planned"] > 1e6
        assert node["planned"] <= node["link"] <= node["planned"] * node["frames"] + CONTROL
