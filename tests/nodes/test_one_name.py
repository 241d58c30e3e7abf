"""Covers two machines of one name: they notice that they share no memory, and do not try to use any."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

_HOSTS = pathlib.Path(__file__).parents[1] / "collectives" / "test_memory_hosts.py"


@pytest.mark.nightly
def test_machines_of_one_name_send_by_gloo_without_a_word(nodes: Any) -> None:
    spec = importlib.util.spec_from_file_location("hosts", _HOSTS)
    assert spec is not None and spec.loader is not None
    hosts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hosts)
    program = [sys.executable, "-B", "-c", hosts.PROGRAM, "tcp://10.77.0.1:29501"]
    named = ["unshare", "--uts", "sh", "-c", 'hostname node17 && test "$(hostname)" = node17 && exec "$@"', "sh"]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "node0"}
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", node, *named, *program, str(rank)], env=env, stdout=subprocess.PIPE, text=True
        )
        for rank, node in enumerate(nodes.names)
    ]
    try:
        told = [json.loads(rank.communicate(timeout=100)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert told == [{"shared": [False, False], "warned": [], "right": True}] * 2
