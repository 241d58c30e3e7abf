"""Timing and meshes for the parts of `bench_gpu.py`."""

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import shardfn as sf

Figures = dict[str, Any]
Step = Callable[[], Any]


def soft(run: Callable[[], Any]) -> Any:
    """The result, or the error as a text, so that the other figures of a part are not lost."""
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


def seconds(device: str, step: Step, rounds: int = 10) -> list[float]:
    """Quartiles of the seconds of a call, after two warm ones."""
    times = []
    for k in range(rounds + 2):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        if k >= 2:
            times.append(time.perf_counter() - start)
    return [round(x, 6) for x in statistics.quantiles(times, n=4)]


@contextlib.contextmanager
def fresh(device: str) -> Iterator[None]:
    """Memory without the rest of an earlier peer."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield


def peak(device: str) -> int | None:
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def mesh_on(device: str) -> Any:
    group_on(device)
    return sf.make_mesh({"dp": 1}, device=device)


def group_on(device: str) -> None:
    if not torch.distributed.is_initialized():
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", "RANK": "0", "WORLD_SIZE": "1"}
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
