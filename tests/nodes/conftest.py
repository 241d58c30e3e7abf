"""Two nodes on one machine: network namespaces that are joined by a link, and torchrun's agent in each."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "node0"


class TwoNodes(NamedTuple):
    """The names of two namespaces, joined by a link and isolated from the machine's network."""

    names: tuple[str, str]

    @contextlib.contextmanager
    def torchrun(self, program: pathlib.Path, *args: str) -> Iterator[list[subprocess.Popen[str]]]:
        """Runs a program on two ranks of each node; yields the agents, which are ended after the block."""
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "PYTHONPATH": str(program.parents[2]),
        }
        agents = []
        try:
            for number, name in enumerate(self.names):
                how = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
                how += [f"--rdzv-endpoint={ADDRESSES[0]}:29500"]
                # torchrun finds the node of the rendezvous by host names, and namespaces of one machine share a name.
                how += ["--rdzv-id=test", f"--rdzv-conf=is_host={1 - number}", f"--local-addr={ADDRESSES[number]}"]
                line = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *how, str(program)]
                agents.append(
                    subprocess.Popen(
                        [*line, *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                    )
                )
            yield agents
        finally:
            for agent in agents:
                agent.kill()
                with agent:  # waits for it, and closes its pipe, which stays open if the run ended by itself
                    pass

    def cut(self) -> None:
        """Cuts the link, which closes no connection."""
        _ip("-n", self.names[1], "link", "set", INTERFACE, "down")


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    """Two nodes, for one test."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if not shutil.which("ip"):
        pytest.skip("ip not found: apt-get install iproute2")
    names = (f"shardfn-{os.getpid()}-a", f"shardfn-{os.getpid()}-b")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", INTERFACE, "netns", names[0], "type", "veth", "peer", "name", INTERFACE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "addrgenmode", "none", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
        yield TwoNodes(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)
