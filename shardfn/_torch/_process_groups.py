"""torch's registry of process groups: the default group, its store, and groups that are made without a collective."""

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist


def default_group() -> Any:
    """Returns the group of all ranks.

    Raises:
        ValueError: there is no process group.
    """
    return _load_c10d()._get_default_group()


def default_store() -> Any:
    """Returns the store of the default group."""
    return _load_c10d()._get_default_store()


def is_registered(group: dist.ProcessGroup) -> bool:
    """Returns whether a group has not been destroyed."""
    return group in _load_c10d()._world.pg_map


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """Makes new gloo groups share the device of the default group, if it is gloo: a single thread reads all groups.

    torch gives each group a separate device, with a thread that wakes a hundred times a second, and takes no other
    device. So the constructor is replaced while groups are made.
    """
    if not dist.is_gloo_available():
        yield
        return
    c10d, own = _load_c10d(), _load_c10d().ProcessGroupGloo
    c10d.ProcessGroupGloo = _SharingGloo
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = own


if dist.is_gloo_available():

    class _SharingGloo(dist.ProcessGroupGloo):
        """Gloo group on the device of the default group."""

        def __init__(
            self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, **reconfigured: bool
        ) -> None:
            group, cpu = default_group(), torch.device("cpu")
            default = group._get_backend(cpu) if cpu in group._device_types else None
            # Torch 2.14 can make groups that are reconfigured later. Such groups take no options.
            if any(reconfigured.values()) or not isinstance(default, dist.ProcessGroupGloo):
                super().__init__(store, rank, size, timeout=timeout, **reconfigured)
                return
            shared: Any = default.options  # torch's stubs lack some fields
            options = type(shared)()
            options._timeout, options._devices, options._threads = timeout, shared._devices, shared._threads
            super().__init__(store, rank, size, options)


def registered_group(
    line: Sequence[int], name: str, backend: str | None, timeout: datetime.timedelta | None
) -> dist.ProcessGroup:
    """Returns a group of some ranks, this rank among them, made only by these ranks.

    Args:
        line: the ranks.
        name: name of the group, the same on all ranks, and new.
        backend: backend of the group. None means the default group's backend.
        timeout: timeout of the group's collectives. None means the backend's default.
    """
    c10d = _load_c10d()
    default_backend, store = c10d._world.pg_map[c10d._get_default_group()]
    made = dist.Backend(backend or default_backend)
    limit = timeout or c10d._get_default_timeout(made)
    at = line.index(dist.get_rank())
    with on_one_thread():
        group, _ = c10d._new_process_group_helper(len(line), at, list(line), made, store, name, timeout=limit)
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(line)}
    return group


def default_timeout(device: torch.device) -> datetime.timedelta:
    """Returns the time limit of the default group's collectives of tensors on a device."""
    return default_group()._get_backend(torch.device(device.type)).options._timeout


def _load_c10d() -> Any:
    return dist.distributed_c10d
