"""Measures the machine that the program runs on, for the cost model."""

import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.collectives import all_gather, bind_mesh
from shardfn.core import Mesh, dtype_name

from ._device import DEVICES, Cluster, Device, Link

# Memory that this process may use: the machine's memory, or less in a container.


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


_SIZES = (1 << 10, 1 << 18, 1 << 22)


def calibrate(mesh: Mesh | None = None, *, seconds: float = 2.0) -> Cluster:
    """Measures a `Cluster`: matrix products by dtype, memory bandwidth, and the network between the mesh's ranks.

    rate = 2 n^3 / time of an n x n product, and bandwidth = bytes moved by a copy / time of the copy. The link's
    latency is the time of the smallest transfer. The link's bandwidth is the bytes of the largest transfer over the
    further time of the largest transfer. Each figure is the best of several runs. Collective over the mesh: all ranks
    get the same figures, the slowest rank's, so that decisions drawn from the figures agree.

    Args:
        mesh: ranks to measure. Default: only this rank.
        seconds: approximate time of the measurement.

    Returns:
        A cluster with the measured wire as `inside` and as `between`.

    Example:
        >>> box = calibrate(seconds=0.05)
        >>> box.device.flops["float32"] > 0 and box.device.bandwidth > 0
        True
    """
    device = mesh.device if mesh is not None else torch.device("cpu")
    each = seconds / 4
    rates = {dtype_name(d): measure_rate(d, device, each) for d in _supported_dtypes(device)}
    measured = [*rates.values(), _measure_bandwidth(device, each), *_measure_link(mesh, device)]
    *flops, memory, wire, latency = _reduce_slowest(mesh, measured)
    link = Link(wire, latency)
    known = Device(str(device), _device_memory(device), dict(zip(rates, flops, strict=True)), memory)
    return Cluster(known, _ranks_per_node(mesh), link, link)


def _supported_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    return (torch.float32, torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32, torch.bfloat16)


def measure_rate(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Returns the operations a second of a matrix product."""
    n = 4096 if device.type == "cuda" else 384
    a = torch.ones(n, n, dtype=dtype, device=device)
    return 2 * n**3 / _time_best(lambda: torch.mm(a, a), device, seconds)


def _measure_bandwidth(device: torch.device, seconds: float) -> float:
    source = torch.zeros(1 << 26 if device.type == "cuda" else 1 << 23, device=device)
    target = torch.zeros_like(source)
    return 2 * 4 * source.numel() / _time_best(lambda: target.copy_(source), device, seconds)


def _measure_link(mesh: Mesh | None, device: torch.device) -> tuple[float, float]:
    """Returns bandwidth and latency of a gather over all ranks. A single rank uses no link, and gets round numbers."""
    if mesh is None or mesh.size == 1:
        return 1e9, 1e-5
    times = []
    with bind_mesh(mesh):
        for size in _SIZES:
            own = torch.zeros(size // 4, device=device)
            times.append(_time_repeated(lambda own=own: all_gather(own, mesh.axis_names), device))
    sent = (_SIZES[-1] - _SIZES[0]) * (mesh.size - 1)
    return sent / max(times[-1] - times[0], 1e-9), times[0]


def _time_best(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Returns the shortest time of the runs that fit into `seconds`, at least three."""
    end, times = time.perf_counter() + seconds, list[float]()
    while len(times) < 4 or time.perf_counter() < end:
        times.append(_time_run(run, device))
    return min(times[1:])


def _time_repeated(run: Callable[[], object], device: torch.device, count: int = 9) -> float:
    """Returns the shortest time of `count` runs.

    The number is fixed, as all ranks must run the same number of collectives.
    """
    return min([_time_run(run, device) for _ in range(count)][1:])


def _time_run(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - start, 1e-9)


def _reduce_slowest(mesh: Mesh | None, measured: Sequence[float]) -> list[float]:
    """Returns for each figure the lowest of all ranks. For latency, the last figure, the highest."""
    if mesh is None or mesh.size == 1:
        return list(measured)
    with bind_mesh(mesh):
        every: Tensor = all_gather(torch.tensor([measured], dtype=torch.float64, device=mesh.device), mesh.axis_names)
    return [*every[:, :-1].amin(0).tolist(), every[:, -1].amax().item()]


def _device_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return machine_memory()


def _ranks_per_node(mesh: Mesh | None) -> int:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return local or (dist.get_world_size() if mesh is not None and dist.is_initialized() else 1)


# `peak_flops`: the rate of a device, known by name or measured.


# Words of the names that drivers give, each with an entry of `DEVICES`. The first that fits counts.
_NAMES = {
    r"V100.*32": "v100-32",
    r"A100.*80": "a100-80",
    r"A100": "a100-40",
    r"H100 (SXM|80GB HBM3)": "h100",
    r"H200": "h200",
    r"B200": "b200",
    r"RTX 4090": "rtx4090",
    r"RTX A6000": "a6000",
}


def peak_flops(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16, *, seconds: float = 0.5
) -> float:
    """Returns the floating-point operations a second of a device, for model FLOPs utilisation.

    For a GPU in `DEVICES` the vendor's figure. For any other device the rate of the fastest of several matrix products
    that run now, so utilisation is then a fraction of this rate.

    Args:
        device: device, such as `mesh.device`. For all devices of a mesh multiply by `mesh.size`.
        dtype: dtype of the products.
        seconds: approximate time of a measurement.

    Example:
        >>> peak_flops("cpu", torch.float32, seconds=0.01) > 0
        True
    """
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = find_device(name)
    rates = {} if known is None else DEVICES[known].device.flops
    return rates.get(dtype_name(dtype)) or measure_rate(dtype, device, seconds)


def find_device(name: str) -> str | None:
    """Returns the entry of `DEVICES` for a driver's name of a device, or None if the device is not listed.

    Example:
        >>> find_device("NVIDIA H100 80GB HBM3"), find_device("NVIDIA T4")
        ('h100', None)
    """
    return next((entry for pattern, entry in _NAMES.items() if re.search(pattern, name)), None)
