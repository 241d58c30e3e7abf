"""Runs of several peers that take turns on the ranks of one group; all ranks begin and end each run together."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

# Turns whose times do not count.
_WARM = 2


def in_turns(runs: Mapping[str, tuple[Callable[[], Any], Any]], turns: int) -> dict[str, list[tuple[float, float]]]:
    """By peer and turn, the seconds until all ranks have ended, and those of this rank's processor."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for turn in range(turns + _WARM):
        for name, (run, _) in runs.items():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            run()
            used = time.process_time() - used
            dist.barrier()
            if turn >= _WARM:
                taken[name].append((time.perf_counter() - start, used))
    return taken
