"""Memory that this process may use: the machine's memory, or less in a container."""

import os
import pathlib
from collections.abc import Iterator


def machine_memory(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Returns the bytes of memory of this machine, or of this process's smallest Linux control group.

    Args:
        root: directory that has `proc` and `sys`.

    Example:
        >>> machine_memory() > 2**20
        True
    """
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits(root)])


def _group_limits(root: pathlib.Path) -> Iterator[int]:
    """Yields the limits of this process's control groups, and of the surrounding groups, in versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes") if controllers else ("sys/fs/cgroup", "memory.max")
        )
        parts = pathlib.PurePath(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            try:
                text = (root / top).joinpath(*parts[:depth], name).read_text().strip()
            except OSError:  # the groups around a container's group are not visible in the container
                continue
            if text.isdecimal():  # "max" is no limit
                yield int(text)
