"""Covers the resources of a mesh: its connections and threads end with it, however it ends; a closed one raises."""

import copy
import gc
import os
import pathlib
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.testing import distributed


def _loss(params: dict, x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean()


def _kept() -> tuple[int, int, int]:
    """Descriptors, threads and process groups of this process."""
    groups = dist.distributed_c10d._world.pg_map
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(groups)


def _left(then: tuple[int, int, int]) -> tuple[int, int, int]:
    """As `_kept`, after a while: a thread that has done its work takes a moment to end, gloo's as well as ours."""
    until = time.monotonic() + 10
    while _grew(now := _kept(), then) and time.monotonic() < until:
        time.sleep(0.01)
    return now


def _grew(now: tuple[int, int, int], then: tuple[int, int, int]) -> bool:
    """Whether there are more. gloo opens and closes a descriptor or two on its own thread, in its own time."""
    return now[0] > then[0] + 2 or now[1:] > then[1:]


def _trained(mesh: "sf.Mesh | dist.DeviceMesh", loss=_loss, *, axis: str = "dp") -> tuple:
    zero = sf.Zero(stage=3, persist_elements=0, axis=axis)
    step = sf.sharded_step(loss, sf.optim.adam(0.1), mesh=mesh, batch=sf.P(axis), zero=zero)
    state, _ = step(step.init({"w": torch.ones(4, 3)}), torch.ones(2, 4))
    return step, state


def _idle() -> tuple[int, int, int]:
    """As `_kept`, with nothing left of the test before, and with the resources that serve all meshes of a process."""
    with sf.make_mesh() as mesh:
        _trained(mesh)
    gc.collect()
    return _kept()


@distributed(world=2, timeout=240)
@pytest.mark.nightly
@pytest.mark.parametrize("num", [5, 40])
def test_meshes_that_are_dropped_leave_nothing(num: int) -> None:
    kept = []
    _idle()  # gloo's connections of a process's first mesh come in their own time
    for _ in range(num):
        _trained(sf.make_mesh({"dp": -1}))
        kept.append(_left(kept[0]) if kept else _kept())
    assert not _grew(kept[-1], kept[0]), kept
    for _ in range(num):
        with sf.make_mesh({"dp": -1, "tp": 1}) as mesh:
            _trained(mesh)
        kept.append(_left(kept[num]) if len(kept) > num else _kept())
    assert not _grew(kept[-1], kept[num]), kept
    assert _grew(kept[0], kept[-1]) and kept[-1][2] == 2


@pytest.mark.nightly
@distributed(world=2, timeout=240)
@pytest.mark.parametrize("num", [3, 20])
def test_failures_that_are_recovered_from_leave_nothing(num: int) -> None:
    failing, before, after = [False], [], []

    def loss(params: dict, x: Tensor) -> Tensor:
        y = _loss(params, x)
        if failing[0] and dist.get_rank() == 1:
            raise ValueError("over")
        return y

    idle = _idle()
    step, state = _trained(sf.make_mesh({"dp": -1}), loss)
    for _ in range(num):
        before.append(_left(before[0]) if before else _kept())
        failing[0] = True
        with pytest.raises((ValueError, sf.RankError), match="over"):
            step(state, torch.ones(2, 4))
        failing[0] = False
        after.append(_left(idle))
        state, _ = step(state, torch.ones(2, 4))
    assert not _grew(before[-1], before[0]) and not _grew(after[-1], idle), (idle, before, after)


@distributed(world=3)
def test_a_closed_mesh_raises() -> None:
    idle = _idle()
    with sf.make_mesh({"dp": -1}) as mesh:
        step, state = _trained(mesh)
    assert not _grew(_left(idle), idle) and mesh.closed
    mesh.close()
    assert state.params["w"].local.numel() < 12
    for use in (
        lambda: step(state, torch.ones(2, 4)),
        lambda: step.init({"w": torch.ones(4, 3)}),
        lambda: step.apply(_loss, state, torch.ones(2, 4)),
        lambda: state.params["w"].full_tensor(),
        lambda: sf.shard_map(lambda x: sf.psum(x, "dp"), mesh=mesh, in_specs=sf.P(), out_specs=sf.P())(torch.ones(1)),
    ):
        with pytest.raises(ValueError, match=r"Mesh\(dp=\d; rank \d on cpu\) is closed.*Make another mesh"):
            use()
    step, state = _trained(sf.make_mesh({"dp": -1}))  # the remedy
    state.params["w"].full_tensor()


@pytest.mark.nightly
@distributed(world=4)
def test_groups_of_several_axes_end_too_and_those_of_a_device_mesh_stay() -> None:
    idle = _idle()
    with sf.make_mesh({"dp": 2, "tp": 2}) as mesh:
        total = sf.shard_map(lambda x: sf.psum(x, ("dp", "tp")), mesh=mesh, in_specs=sf.P(), out_specs=sf.P())
        assert total(torch.ones(1)) == 4
        assert _grew(_kept(), idle)
    assert not _grew(_left(idle), idle)
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    outside = _kept()
    step, _ = _trained(grid)
    inside = _kept()
    again, _ = _trained(grid)  # steps on one DeviceMesh share a mesh
    assert again.mesh is step.mesh and not _grew(_left(inside), inside)
    step.mesh.close()
    assert not _grew(_left(outside), outside)
    dist.all_reduce(torch.ones(1), group=grid.get_group("tp"))
    _trained(grid)


def test_one_rank_is_closed_by_the_same_words() -> None:
    with sf.make_mesh({"dp": 1}) as mesh:
        step, state = _trained(mesh)
    with pytest.raises(ValueError, match="is closed"):
        step(state, torch.ones(2, 4))


@distributed(world=2, timeout=60)
def test_a_device_mesh_keeps_its_communicators_whenever_the_collector_runs() -> None:
    grid = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    gc.disable()
    try:
        _trained(grid)
        if dist.get_rank() == 1:
            gc.collect()
        _trained(grid)
    finally:
        gc.enable()
    assert copy.deepcopy(vars(grid)["_shardfn"]).mesh is None  # a copy of the mesh, or a pickle of it, has no `Mesh`


@distributed(world=2)
def test_a_device_mesh_of_other_ranks_or_in_another_order_is_refused() -> None:
    for ranks in ([1, 0], [dist.get_rank()]):
        grid = dist.DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("dp",))
        with pytest.raises(ValueError, match=r"must have all 2 ranks .*, got \[.*\].*Pass the whole mesh"):
            _trained(grid)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads")
@distributed(world=2)
def test_all_groups_of_a_rank_have_one_thread_that_reads() -> None:
    def readers() -> int:
        names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
        return names.count("gloo_tcp_loop")

    before = readers()
    whole, apart = sf.make_mesh({"dp": 1, "tp": 2}), sf.make_mesh({"tp": 2}, ranks=[0, 1])
    groups = [whole.new_group("tp"), whole.group_for_good(), apart.new_group("tp"), apart.group("tp")]
    for i, group in enumerate(groups):
        x = torch.full([3], float(i + dist.get_rank()))
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2 * i + 1] * 3 and dist.get_backend(group) == "gloo"
    assert before >= 1 and readers() == before
    whole.close()  # ends some of the groups alone
    x = torch.ones(1)
    dist.all_reduce(x, group=groups[-1])
    assert x == 2
