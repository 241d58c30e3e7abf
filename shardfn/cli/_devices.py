"""The machine of an estimate: a known device, with the local memory where the device is local."""

import dataclasses
import math
from collections.abc import Mapping

import torch

from shardfn.graph import Cluster, cluster, machine_memory

_NAMES = {"v100": "v100-32", "h200": "h200", "h100": "h100", "b200": "b200", "4090": "rtx4090", "a6000": "a6000"}


def device_cluster(name: str, shape: Mapping[str, int]) -> Cluster:
    """Returns the cluster of a device by name. Processes on a CPU share the memory of this machine.

    Args:
        name: name of the device, as `DEVICES` lists it.
        shape: sizes of the mesh's axes.

    Raises:
        ValueError: the device is not known.
    """
    known = cluster(name)
    return _limit_memory(known, machine_memory() // _local_ranks(known, shape)) if known.device.name == "cpu" else known


def local_cluster(shape: Mapping[str, int]) -> Cluster:
    """Returns the cluster of the local device, with the memory. An unknown GPU computes as an A100.

    Args:
        shape: sizes of the mesh's axes.
    """
    if not torch.cuda.is_available():
        return device_cluster("cpu", shape)
    about = torch.cuda.get_device_properties(0)
    name = next((device for part, device in _NAMES.items() if part in about.name.lower()), "a100-80")
    return _limit_memory(cluster(name), about.total_memory)


def _local_ranks(known: Cluster, shape: Mapping[str, int]) -> int:
    """Returns the number of ranks on a single machine."""
    return max(1, min(math.prod(shape.values()), known.per_node))


def _limit_memory(known: Cluster, memory: int) -> Cluster:
    return dataclasses.replace(known, device=dataclasses.replace(known.device, memory=memory))
