"""Covers shardfn/graph/_calibrate.py: the memory of the machine, or of a container on it."""

import pathlib

import pytest

from shardfn.graph import machine_memory

NEW = {"proc/self/cgroup": "0::/a/b\n"}
OLD = {"proc/self/cgroup": "7:cpu:/x\n4:memory:/a\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        (NEW | {"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/memory.max": "4096\n"}, 4096),
        (NEW | {"sys/fs/cgroup/memory.max": "8192\n"}, 8192),  # in a container: groups outside of it are not visible
        (NEW | {"sys/fs/cgroup/a/b/memory.max": "max\n"}, None),
        (OLD | {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4096\n"}, 4096),
        (OLD | {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, None),
        ({}, None),
    ],
    ids=["new", "new-container", "new-unlimited", "old", "old-unlimited", "none"],
)
def test_the_limit_of_a_group_counts(files: dict[str, str], limit: int | None, tmp_path: pathlib.Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    whole = machine_memory(tmp_path / "nowhere")
    assert whole > 2**28 and machine_memory(tmp_path) == (limit or whole)
