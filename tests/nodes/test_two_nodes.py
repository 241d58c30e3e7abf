"""Covers two nodes: torchrun with its rendezvous across a link between two network namespaces, `tp` inside a node.

The step equals one device, and the link carries the bytes that the plan says, by the kernel's counter.
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

PROGRAM = pathlib.Path(__file__).parent / "train_on_nodes.py"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "node0"
# Beside payloads: agreements, barriers and the heartbeats of torchrun.
CONTROL = 200_000


def _why_not() -> str:
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if shutil.which("ip") else "ip not found: apt-get install iproute2"


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def _two_nodes() -> Iterator[list[str]]:
    """Two namespaces, joined by a link, that see nothing of the machine's network."""
    names = [f"shardfn-{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", INTERFACE, "netns", names[0], "type", "veth", "peer", "name", INTERFACE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "addrgenmode", "none", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _torchrun(names: list[str], *args: str) -> list[dict[str, float]]:
    """Runs the program on two ranks of each node; what the nodes have printed."""
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "PYTHONPATH": str(PROGRAM.parents[2]),
    }
    nodes = []
    for number, name in enumerate(names):
        how = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29500"]
        # Names of hosts tell torchrun which node has the rendezvous; namespaces of one machine share a name.
        how += ["--rdzv-id=test", f"--rdzv-conf=is_host={1 - number}", f"--local-addr={ADDRESSES[number]}"]
        line = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *how, str(PROGRAM), *args]
        nodes.append(subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        printed = [node.communicate(timeout=280)[0] for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                node.kill()
                node.communicate()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)[-6000:]
    return [json.loads(next(x for x in text.splitlines() if x.startswith("{"))) for text in printed]


@pytest.mark.nightly
@pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "possible")
@pytest.mark.parametrize(("across", "stage"), [("dp", 2), ("dp", 3), ("pp", 0)])
def test_two_nodes_equal_one_device_and_send_what_is_planned(across: str, stage: int) -> None:
    with _two_nodes() as names:
        for node in _torchrun(names, across, str(stage)):
            # What a byte of payload costs in frames (TCP's, IP's and Ethernet's headers) is measured on the same link.
            assert 1.0 < node["frames"] < 1.1
            assert node["planned"] > 1e6
            assert node["planned"] <= node["link"] <= node["planned"] * node["frames"] + CONTROL
