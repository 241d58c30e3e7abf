"""Descriptions of hardware: devices, links, and clusters, as numbers. Nothing here touches a machine.

Costs follow: f floating-point operations take f / rate, a transfer of b bytes takes latency + b / bandwidth.
"""

import dataclasses
import math
from collections.abc import Mapping

from shardfn.core import did_you_mean


@dataclasses.dataclass(frozen=True)
class Link:
    """Wire between ranks: b bytes take latency + b / bandwidth.

    Attributes:
        bandwidth: bytes a second, each way, per rank.
        latency: seconds until the first byte arrives.

    Example:
        >>> Link(bandwidth=25e9, latency=5e-6).seconds(25e9)
        1.000005
    """

    bandwidth: float
    latency: float

    def seconds(self, nbytes: float, messages: int = 1) -> float:
        """Returns the time of `messages` transfers of `nbytes` together."""
        return messages * self.latency + nbytes / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Device:
    """Accelerator (or a process on a CPU).

    Attributes:
        name: name as `DEVICES` lists the device.
        memory: bytes.
        flops: dtype name -> floating-point operations a second, dense.
        bandwidth: bytes a second between the device and the device's memory.

    Example:
        >>> DEVICES["a100-80"].device.rate("bfloat16")
        312000000000000.0
    """

    name: str
    memory: int
    flops: Mapping[str, float]
    bandwidth: float

    def rate(self, dtype: str) -> float:
        """Returns the floating-point operations a second in `dtype`.

        Raises:
            ValueError: the device does not compute in `dtype`.
        """
        if dtype not in self.flops:
            raise ValueError(
                f"{self.name} does not compute in {dtype}: the dtype must be one of {', '.join(self.flops)}."
            )
        return self.flops[dtype]


@dataclasses.dataclass(frozen=True)
class Machine:
    """Memory of a machine next to its devices, which the ranks of the machine share.

    Attributes:
        memory: bytes of main memory.
        bandwidth: bytes a second of main memory.
        disk: bytes of the local disks.

    Example:
        >>> round(DEVICES["v100-32"].machine.memory / 2**40, 1)
        1.5
    """

    memory: int
    bandwidth: float
    disk: int


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices, with ranks numbered node by node.

    Attributes:
        device: device of each rank.
        per_node: number of ranks in a node.
        inside: wire between ranks of a node.
        between: each rank's share of the wire between nodes.
        host: each rank's share of the wire between device and host. None: moves take no time.
        disk: each rank's share of the wire between host and disk. None: moves take no time.
        machine: memory of a node next to its devices. None: unknown.

    Raises:
        ValueError: a node has no rank.
    """

    device: Device
    per_node: int
    inside: Link
    between: Link
    host: Link | None = None
    disk: Link | None = None
    machine: Machine | None = None

    def __post_init__(self) -> None:
        """Refuses nodes without ranks."""
        if self.per_node < 1:
            raise ValueError(f"Cluster(per_node={self.per_node}): a node must have 1 rank or more.")

    def link(self, mesh_shape: Mapping[str, int], axes: str) -> Link:
        """Returns the wire of a collective along `axes`, with ranks numbered row-major over the mesh.

        If every group of ranks along `axes` lies in a single node, the wire is `inside`. Else the group's ring leaves
        each node on k wires, for the k ranks of the group there, so that the slowest hop is min(inside, k * between).
        For example, a group of 16 ranks on nodes of 8 ranks has k = 8.

        Args:
            mesh_shape: axis name -> size, major to minor.
            axes: axis names with commas, as in "dp,tp".

        Raises:
            ValueError: an axis is not in the mesh.

        Example:
            >>> box = DEVICES["a100-80"]
            >>> box.link({"dp": 4, "tp": 8}, "tp") == box.inside
            True
            >>> box.link({"dp": 4, "tp": 8}, "dp").bandwidth
            25000000000.0
        """
        names = [a for a in axes.split(",") if a]
        unknown = [a for a in names if a not in mesh_shape]
        if unknown:
            hint = did_you_mean(unknown[0], mesh_shape)
            raise ValueError(f"axis {unknown[0]!r} is not in the mesh, which has {tuple(mesh_shape)}.{hint}")
        size = math.prod(mesh_shape[a] for a in names)
        extent = max((_axis_stride(mesh_shape, a) * mesh_shape[a] for a in names if mesh_shape[a] > 1), default=1)
        if self.per_node % extent == 0 or math.prod(mesh_shape.values()) <= self.per_node:
            return self.inside
        wires = _ranks_in_node(mesh_shape, names, self.per_node) if size > 1 else 1
        return Link(min(self.inside.bandwidth, wires * self.between.bandwidth), self.between.latency)


def cluster(name: str) -> Cluster:
    """Returns the usual machine of the device called `name` in `DEVICES`.

    Raises:
        ValueError: no such device.

    Example:
        >>> cluster("h100").per_node
        8
    """
    known = name.lower()
    if known not in DEVICES:
        raise ValueError(f"device {name!r} is not known.{did_you_mean(known, DEVICES)} Known: {', '.join(DEVICES)}.")
    return DEVICES[known]


def _axis_stride(mesh_shape: Mapping[str, int], axis: str) -> int:
    names = list(mesh_shape)
    return math.prod(mesh_shape[a] for a in names[names.index(axis) + 1 :])


def _ranks_in_node(mesh_shape: Mapping[str, int], names: list[str], per_node: int) -> int:
    """Returns the number of ranks of rank 0's group that are in rank 0's node."""
    offsets = [0]
    for axis in names:
        stride = _axis_stride(mesh_shape, axis)
        steps = range(0, min(mesh_shape[axis] * stride, per_node), stride)
        offsets = [o + s for o in offsets for s in steps]
    return sum(o < per_node for o in offsets)


def _make_cluster(
    name: str,
    gib: float,
    flops: tuple[float, float | None, float | None],
    memory_gb: float,
    *,
    inside_gb: float,
    between_gb: float,
    per_node: int = 8,
    latency: float = 5e-6,
    outside: tuple[float, float, float, float, float] | None = None,
) -> Cluster:
    """Returns a cluster from 10^12 flops per second (float32, float16, bfloat16) and links in 10^9 bytes per second.

    `outside` has the TiB of a machine's memory, its 10^9 bytes per second, the TB of its disks, and each device's 10^9
    bytes per second to the memory and to the disks while all devices move.
    """
    rates = dict(zip(("float32", "float16", "bfloat16"), flops, strict=True))
    device = Device(name, int(gib * 2**30), {k: v * 1e12 for k, v in rates.items() if v}, memory_gb * 1e9)
    made = Cluster(device, per_node, Link(inside_gb * 1e9, latency / 2), Link(between_gb * 1e9, latency))
    if outside is None:
        return made
    tib, rate, disk_tb, to_host, to_disk = outside
    machine = Machine(int(tib * 2**40), rate * 1e9, int(disk_tb * 1e12))
    links = Link(to_host * 1e9, 2 * latency), Link(to_disk * 1e9, 20 * latency)
    return dataclasses.replace(made, host=links[0], disk=links[1], machine=machine)


# Vendors' figures: dense tensor-core rates with float32 accumulation for the 16-bit types, plain (not TF32) float32,
# memory in GiB as the driver counts it (the vendors' GB are that, rounded). NVLink is halved, since vendors add both
# directions. Wires between nodes: those of the vendor's reference machine, divided by its devices. Latencies are
# typical, not vendors'. Main memory and disks: those of the reference machine, at the rates of its channels and slots.
# V100 of 32 GB: NVIDIA Tesla V100 datasheet (2020) and DGX-2 datasheet: 16 x SXM3, NVSwitch 300 GB/s, 8 x EDR 100
# Gbit/s. Rates to memory and disk with 16 devices at once: Rajbhandari et al. 2021, arXiv 2104.07857.
# V100 of 16 GB: Summit's nodes, 6 devices, NVLink to the processors, 2 x EDR.
# A100: NVIDIA A100 datasheet (2021), DGX A100 datasheet: NVSwitch 600 GB/s, 8 x HDR 200 Gbit/s for training.
# H100, H200: NVIDIA H100 and H200 datasheets (2023, 2024), DGX H100/H200: NVSwitch 900 GB/s, 8 x NDR 400 Gbit/s.
# B200: NVIDIA DGX B200 datasheet (2024): 1440 GB and 36 PFLOPS sparse bfloat16 by eight, NVSwitch 1.8 TB/s.
# RTX 4090: NVIDIA Ada GPU architecture (2022). RTX A6000: NVIDIA Ampere GA102 (2021). Both on PCIe 4.0 x16 at 32 GB/s,
# eight to a machine with one 100 Gbit/s Ethernet port and 512 GB (an assumption).
# cpu: one process on a few cores of a server, gloo over loopback and 10 Gbit/s Ethernet (assumptions: calibrate).
_DGX_2, _SUMMIT = (1.5, 256, 28, 3, 1.6), (0.5, 340, 1.6, 50, 0.9)
_DGX_A100, _DGX_H100, _DGX_B200 = (2, 409, 30, 25, 6), (2, 614, 30, 50, 7), (2, 717, 30, 50, 7)
_WORKSTATION = (0.5, 205, 8, 25, 0.9)

DEVICES: Mapping[str, Cluster] = {
    "v100-16": _make_cluster(
        "v100-16", 16, (15.7, 125, None), 900, inside_gb=50, between_gb=4.17, per_node=6, outside=_SUMMIT
    ),
    "v100-32": _make_cluster(
        "v100-32", 32, (15.7, 125, None), 900, inside_gb=150, between_gb=6.25, per_node=16, outside=_DGX_2
    ),
    "a100-40": _make_cluster(
        "a100-40", 40, (19.5, 312, 312), 1555, inside_gb=300, between_gb=25, outside=(1, 409, 15, 25, 6)
    ),
    "a100-80": _make_cluster("a100-80", 80, (19.5, 312, 312), 2039, inside_gb=300, between_gb=25, outside=_DGX_A100),
    "h100": _make_cluster("h100", 80, (67, 989.4, 989.4), 3350, inside_gb=450, between_gb=50, outside=_DGX_H100),
    "h200": _make_cluster("h200", 140, (67, 989.4, 989.4), 4800, inside_gb=450, between_gb=50, outside=_DGX_H100),
    "b200": _make_cluster("b200", 179, (75, 2250, 2250), 8000, inside_gb=900, between_gb=50, outside=_DGX_B200),
    "rtx4090": _make_cluster(
        *("rtx4090", 24, (82.6, 165.2, 165.2), 1008),
        inside_gb=32,
        between_gb=1.5625,
        latency=2e-5,
        outside=_WORKSTATION,
    ),
    "a6000": _make_cluster(
        "a6000", 48, (38.7, 154.8, 154.8), 768, inside_gb=32, between_gb=1.5625, latency=2e-5, outside=_WORKSTATION
    ),
    "cpu": _make_cluster("cpu", 4, (0.1, None, 0.05), 10, inside_gb=1, between_gb=0.15625, latency=1e-4),
}
