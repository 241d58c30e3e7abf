"""Covers kinds of hosts: no room in /dev/shm, limits, containers that look like one host but are several."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json, sys, warnings, torch, torch.distributed as dist, shardfn as sf
from shardfn.collectives import Channels
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
mesh = sf.make_mesh({"dp": 2}, device="cpu")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    channels = Channels(mesh)
    made = [channels.gather(("dp",)), channels.reduce(("dp",))]
got = made[0].all_gather(torch.full((1 << 20,), 1.0 + rank), [1 << 20] * 2).result()
print(json.dumps({
    "shared": [channel.shared_bytes > 0 for channel in made],
    "warned": [str(w.message) for w in caught],
    "right": got[:: 1 << 20].tolist() == [1.0, 2.0],
}))
"""


def _ranks(meets: pathlib.Path, *within: str, script: str = 'exec "$@"') -> list[dict[str, Any]]:
    """The reports of two ranks, each run by a shell of its own under the given command."""
    line = [*within, "sh", "-c", script, "sh"]
    if within and (os.getuid() or subprocess.run([*line, "true"], capture_output=True, check=False).returncode):
        pytest.skip("namespaces of one's own need root")
    line += [sys.executable, "-B", "-c", PROGRAM, f"file://{meets}"]
    ranks = [subprocess.Popen([*line, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        return [json.loads(rank.communicate(timeout=100)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _by_gloo(told: list[dict[str, Any]], *reasons: str) -> None:
    assert all(one["right"] and one["shared"] == [False, False] for one in told), told
    assert len(told[0]["warned"]) == 1 and not told[1]["warned"], told
    assert any(reason in told[0]["warned"][0] for reason in reasons), told


@pytest.mark.nightly
@pytest.mark.parametrize("options", ["ro", "size=4k"])
def test_a_dev_shm_that_is_tiny_or_cannot_be_written_does_not_matter(options: str, tmp_path: pathlib.Path) -> None:
    mounts = f'mount -t tmpfs -o {options} none /dev/shm && exec "$@"'
    for one in _ranks(tmp_path / "meets", "unshare", "--mount", script=mounts):
        assert one == {"shared": [True, True], "warned": [], "right": True}


@pytest.mark.nightly
def test_a_limit_on_locked_memory_does_not_matter(tmp_path: pathlib.Path) -> None:
    for one in _ranks(tmp_path / "meets", script='ulimit -l 0 && exec "$@"'):
        assert one == {"shared": [True, True], "warned": [], "right": True}


@pytest.mark.nightly
def test_a_limit_on_the_size_of_files_is_warned_of(tmp_path: pathlib.Path) -> None:
    told = _ranks(tmp_path / "meets", script='ulimit -f 2048 && exec "$@"')  # of 512 bytes
    _by_gloo(told, "cannot make 8392704 bytes to share: [Errno 27] File too large")


@pytest.mark.nightly
def test_containers_on_one_network_have_processes_of_the_same_numbers(tmp_path: pathlib.Path) -> None:
    told = _ranks(tmp_path / "meets", "unshare", "--uts", "--pid", "--fork", "--mount-proc")
    _by_gloo(told, "is another process's memory", "cannot be opened", "is not a memfd")
