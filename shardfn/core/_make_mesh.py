"""`make_mesh` and `as_mesh`: how a program gets its mesh.

How ranks that torchrun has started again meet, in a store that remembers earlier ranks.

torchrun's agent keeps one store for all rounds of a job. Entries of ranks that have ended (addresses, for example)
would be taken for entries of their successors: https://github.com/pytorch/pytorch/issues/135712. So the ranks of each
round find a name that no other round has, and keep everything below the name.

    rank r: here/r = a random word      rank 0: answers each word that it finds with its own, which is the name
            waits for the answer                until all ranks confirm that they have it

A word of an earlier round may be answered, too. Such an answer is not read.
"""

import atexit
import datetime
import math
import numbers
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardfn._torch import on_one_thread

from ._groups import MadeGroups, end_lost, end_with
from ._keywords import explains_keywords
from ._mesh import Mesh, close_at_exit

_PERIOD = 0.05


def start_group(backend: str, timeout: datetime.timedelta | None) -> None:
    """Starts torch.distributed from the launcher's environment variables, in any round of the job.

    Raises:
        RuntimeError: ranks did not arrive in time. The message names the ranks.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timeout or dist.distributed_c10d.default_pg_timeout
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=limit)
    own = dist.PrefixStore(round_name(store, rank, world, limit.total_seconds()), store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=timeout)


def round_name(store: dist.Store, rank: int, world: int, seconds: float) -> str:
    """Returns a name that the living ranks of a store have in common, and no earlier round has used.

    Args:
        store: store, perhaps already used by ranks that have ended.
        rank: rank of this process.
        world: the number of ranks.
        seconds: seconds to wait for the other ranks.

    Raises:
        RuntimeError: some ranks did not arrive.
    """
    word, at = secrets.token_hex(8), "shardfn/round"
    if rank:
        store.set(f"{at}/here/{rank}", word)
        store.wait([f"{at}/answer/{word}"], datetime.timedelta(seconds=seconds))
        name = store.get(f"{at}/answer/{word}").decode()
        store.set(f"{at}/has/{name}/{rank}", "1")
        return f"{at}/{name}"
    missing, answered, end = set(range(1, world)), set[bytes](), time.monotonic() + seconds
    while missing:
        for other in sorted(missing):
            if store.check([f"{at}/here/{other}"]) and (found := store.get(f"{at}/here/{other}")) not in answered:
                answered.add(found)
                store.set(f"{at}/answer/{found.decode()}", word)
            if store.check([f"{at}/has/{word}/{other}"]):
                missing.discard(other)
        if missing and time.monotonic() > end:
            raise RuntimeError(f"ranks {', '.join(map(str, sorted(missing)))} did not arrive within {seconds:g} s.")
        time.sleep(_PERIOD if missing else 0)
    return f"{at}/{word}"


@explains_keywords(otherwise="the axes as a dict: make_mesh({{'{name}': {value!r}}})")
def make_mesh(
    axes: Mapping[str, int] | None = None,
    *,
    device: torch.device | str | None = None,
    timeout: float | None = None,
    agreement_timeout: float | None = None,
    abstract: bool | Mapping[str, int] = False,
    alone: bool = False,
    ranks: Sequence[int] | None = None,
    flight_recorder: int = 0,
) -> Mesh:
    """Returns a mesh over all ranks of the program, or some.

    Under a launcher such as torchrun the function starts torch.distributed, if nothing has: NCCL on CUDA, gloo on CPU.
    With a single process nothing is started.

    Args:
        axes: axis name -> size, major to minor. One size may be -1: the remaining ranks. Default: `{"dp": -1}`.
        device: the device of this rank: "cuda" or "cpu". Default: CUDA if there is a GPU, else the CPU.
        timeout: the seconds that a collective waits for other ranks; default torch's (30 minutes for gloo).
        agreement_timeout: the seconds that a rank waits at the beginning of a call (a step, `evaluate`, a checkpoint's
            `save`, ...) for the other ranks to begin the same call. Default: 120, or `timeout` if less. Give more if a
            single rank works for longer between two calls, for example on an evaluation. Transfers, and waiting within
            a call, have `timeout`.
        abstract: whether the ranks do not exist. Such a mesh is for `step.lower`, with any sizes and no process group.
            Nothing runs on such a mesh. This process takes the place of the first rank, or of the rank at these
            coordinates, as in `abstract={"pp": 17}`.
        alone: whether the mesh has only this rank, although the program has more: for computations without the other
            ranks.
        ranks: the ranks of the program that are in the mesh, in ascending order. Default: all. Other ranks make the
            mesh too if the mesh has to be named there, as in `reshard`. Other ranks are not members, and running
            something on the mesh is an error there. Communicators are made on demand, only by the members.
        flight_recorder: the number of last collectives that each rank keeps. When ranks wait in vain, each rank prints
            them with shapes, dtypes, times and lines of the program, also the rank that hangs. 0 keeps none.

    Returns:
        The mesh. If a program makes many meshes, `close` each mesh, or use a `with` block.

    Raises:
        TypeError: `axes` is not a dict of sizes.
        ValueError: the sizes do not multiply to the number of ranks, or `ranks` are not ranks of the program, in order,
            or `flight_recorder` is below 0.

    Example:
        >>> make_mesh({"dp": -1}, device="cpu").shape
        {'dp': 1}
        >>> make_mesh({"dp": 1024}, device="cpu", abstract=True).size
        1024
        >>> make_mesh({"pp": 4, "dp": 8}, device="cpu", abstract={"pp": 2}).coords
        {'pp': 2, 'dp': 0}
    """
    view_mesh_from = abstract if isinstance(abstract, Mapping) else {}
    abstract = abstract is not False
    if ranks is not None and (abstract or alone):
        raise ValueError(f"make_mesh(ranks={list(ranks)}) has no effect with abstract= or alone=. Give one of them.")
    if flight_recorder < 0:
        raise ValueError(
            f"make_mesh: flight_recorder must be at least 0, got {flight_recorder}. Give a number of collectives, such"
            " as 256."
        )
    shape = _checked_axes(({} if abstract else {"dp": -1}) if axes is None else axes)
    if abstract:
        return _abstract_mesh(shape, torch.device(device or "cpu"), view_mesh_from)
    dev = _local_device(device)
    limit = None if timeout is None else datetime.timedelta(seconds=timeout)
    agreement = None if agreement_timeout is None else datetime.timedelta(seconds=agreement_timeout)
    more: dict[str, Any] = {"timeout": limit, "agreement_timeout": agreement, "flight_recorder": flight_recorder}
    if alone:
        return Mesh(_fill_sizes(shape, 1), dev)
    if num_launched() > 1 and not dist.is_initialized():
        if dev.type == "cuda":
            torch.cuda.set_device(dev)
        start_group("nccl" if dev.type == "cuda" else "gloo", limit)
        atexit.register(_leave_program)
    close_at_exit()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if ranks is not None:
        end_lost()
        size = len(_check_rank_list(ranks, world))
        return Mesh(_fill_sizes(shape, size), dev, ranks=ranks, **more)
    shape = _fill_sizes(shape, world)
    if world == 1:
        return Mesh(shape, dev, **more)
    end_lost()
    with on_one_thread():
        grid = dist.init_device_mesh(dev.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    mesh, own = Mesh(shape, dev, grid, **more), MadeGroups()
    for group in grid.get_all_groups():
        if group is not dist.group.WORLD:
            own.add(group)
    end_with(grid, own)
    mesh._made_by_grid = own
    return mesh


def _checked_axes(axes: Any) -> dict[str, int]:
    """Returns the axes as a dict of sizes.

    Raises:
        TypeError: `axes` is not a dict of names and sizes. The message shows an example.
    """
    how = "axes are a dict of names and sizes; one size may be -1, for the rest of the ranks"
    if isinstance(axes, str) or (isinstance(axes, list | tuple) and axes and all(isinstance(a, str) for a in axes)):
        names = [axes] if isinstance(axes, str) else axes
        example = {a: -1 if i == 0 else 2 for i, a in enumerate(names)}
        raise TypeError(f"make_mesh({axes!r}): {how}. Write make_mesh({example}).")
    if not isinstance(axes, Mapping):
        example = {"dp": axes if isinstance(axes, int) else -1}
        raise TypeError(
            f"make_mesh({axes!r}): this is of type {type(axes).__name__}; {how}. Write make_mesh({example})."
        )
    wrong = [f"{name!r}: {size!r}" for name, size in axes.items() if not _is_size(size) or not isinstance(name, str)]
    if wrong:
        raise TypeError(f"make_mesh({dict(axes)}): {how}, but not {', '.join(wrong)}.")
    return {name: int(size) for name, size in axes.items()}


def _is_size(size: Any) -> bool:
    return isinstance(size, numbers.Integral) and not isinstance(size, bool)


def num_launched() -> int:
    """Returns the number of processes of the program, connected or not."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def is_first_launched() -> bool:
    """Returns whether this is the first process of the program, by the launcher's environment variables."""
    return os.environ.get("RANK", "0") == "0"


def _check_rank_list(ranks: Sequence[int], world: int) -> Sequence[int]:
    if not ranks or list(ranks) != sorted({*ranks} & {*range(world)}):
        raise ValueError(
            f"make_mesh(ranks={list(ranks)}): some of the program's ranks, 0 to {world - 1}, each once and in ascending"
            " order."
        )
    return ranks


def _abstract_mesh(shape: dict[str, int], device: torch.device, view_mesh_from: Mapping[str, int]) -> Mesh:
    if any(s < 1 for s in shape.values()):
        raise ValueError(f"an abstract mesh of {shape}: every size must be 1 or more. -1 has no meaning there.")
    wrong = {axis: at for axis, at in view_mesh_from.items() if not 0 <= at < shape.get(axis, 0)}
    if wrong:
        raise ValueError(f"abstract={dict(view_mesh_from)}: an abstract mesh of {shape} has no rank at {wrong}.")
    return Mesh(shape, device, abstract=True, view_mesh_from=view_mesh_from)


def as_mesh(mesh: "Mesh | DeviceMesh | None") -> Mesh:
    """Returns `mesh` as a `Mesh`: a `DeviceMesh` is wrapped, None is the mesh of a single rank and no axes.

    Raises:
        ValueError: the program has several ranks, and there is no mesh, or this rank is not in the mesh, or a
            DeviceMesh has no names, or does not have all ranks in order.
    """
    if mesh is None:
        return _make_single_rank_mesh()
    if isinstance(mesh, Mesh):
        mesh.check_member()
        return mesh
    if not isinstance(mesh, DeviceMesh):
        made = dict(mesh) if isinstance(mesh, Mapping) else {"dp": -1}
        raise TypeError(f"mesh={mesh!r} is a {type(mesh).__name__}, not a mesh. Make one: mesh=sf.make_mesh({made}).")
    known: _Wrapped | None = getattr(mesh, "_shardfn", None)
    if known is not None and known.mesh is not None and not known.mesh.closed:
        return known.mesh
    names = mesh.mesh_dim_names
    if not names:
        raise ValueError("the DeviceMesh has no axis names. Pass mesh_dim_names to init_device_mesh.")
    sizes: Sequence[int] = tuple(mesh.mesh.shape)
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    _check_ranks(mesh)
    close_at_exit()
    end_lost()
    wrapped = Mesh(dict(zip(names, sizes, strict=True)), device, mesh)
    mesh._shardfn = _Wrapped(wrapped)  # pyright: ignore[reportAttributeAccessIssue]
    return wrapped


class _Wrapped:
    """Attribute by which a DeviceMesh keeps its `Mesh` alive.

    Nothing weaker will do: the collector finds a mesh at another time on each rank. A rank would then make
    communicators, which need all ranks, while another rank still has the old communicators: a deadlock. A copy of the
    DeviceMesh has no mesh.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.mesh = mesh

    def __reduce__(self) -> Any:
        return _Wrapped, ()


def _check_ranks(mesh: DeviceMesh) -> None:
    ranks, world = mesh.mesh.flatten().tolist(), dist.get_world_size()
    if ranks != list(range(world)):
        raise ValueError(
            f"a DeviceMesh must have all {world} ranks of the program in order, got {ranks}. Pass the whole mesh, of"
            f" ranks 0 to {world - 1}, as init_device_mesh makes it. Specs need not use all axes of the mesh."
        )


def _make_single_rank_mesh() -> Mesh:
    if (world := num_launched()) > 1:
        raise ValueError(
            f"the program has {world} ranks, but no mesh, so each rank would run alone. Pass mesh=sf.make_mesh(). For a"
            " computation of this rank only, pass mesh=sf.make_mesh(alone=True)."
        )
    return Mesh({}, _local_device(None))


def _fill_sizes(shape: dict[str, int], world: int) -> dict[str, int]:
    free = [n for n, s in shape.items() if s == -1]
    known = math.prod(s for s in shape.values() if s != -1)
    if len(free) == 1 and known > 0 and world % known == 0:
        shape[free[0]] = world // known
    if len(free) > 1 or math.prod(shape.values()) != world or any(s < 1 for s in shape.values()):
        start = f"torchrun --nproc-per-node {known if known > 1 else 'N'}"
        raise ValueError(
            f"a mesh of {shape} does not fit {world} rank{'s' * (world > 1)}: the sizes must multiply to the number of"
            f" ranks (one of them may be -1, for the rest). Start the program with `{start}` on one node, or write -1."
        )
    return shape


def _local_device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        try:
            dev = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device={device!r} is unknown to torch. Use 'cuda' or 'cpu'.") from error
    else:
        dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device is not None and dev.type == "cuda" and not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no GPU, or no driver"
        raise ValueError(f"make_mesh(device={device!r}): {why}. Leave device= out, or write device='cpu'.")
    if dev.type == "cuda" and dev.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return dev


def _leave_program() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
