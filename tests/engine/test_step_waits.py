"""Covers ranks that wait for another one in vain: they report the missing rank, the place, and whether it is alive."""

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.testing import distributed


def _loss(params: dict, x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean()


def _step(mesh: sf.Mesh, loss: Callable = _loss, stage: int = 2):
    return sf.sharded_step(loss, sf.optim.adam(0.1), mesh=mesh, zero=sf.Zero(stage=stage, persist_elements=0))


def _error(f: Callable, *args) -> str:
    with pytest.raises(sf.RankError) as caught:
        f(*args)
    return str(caught.value)


@pytest.mark.nightly
@distributed(world=[2, 3], timeout=120)
def test_a_rank_that_is_late_is_called_late_and_no_rank_dead(world: int) -> None:
    rank, late = dist.get_rank(), world - 1
    pids: list = [None] * world
    dist.all_gather_object(pids, os.getpid())
    mesh, slow = sf.make_mesh(timeout=2), {"how": ""}

    def loss(params: dict, x: Tensor) -> Tensor:
        if slow["how"] == "sleeps" and rank == late:
            time.sleep(5)
        if slow["how"] == "stops" and rank == late:
            os.kill(os.getpid(), signal.SIGSTOP)  # until rank 0 has seen the error
        return _loss(params, x)

    step = _step(mesh, loss)
    state = step.init({"w": torch.ones(5, 3)})
    state, _ = step(state, torch.ones(2, 5))
    others = "rank 0" if world == 2 else "ranks 0, 1"
    for n, where in enumerate(("comes late", "sleeps", "stops"), 1):
        slow["how"] = where
        if where == "comes late" and rank == late:
            time.sleep(5)
        said = _error(step, state, torch.ones(2, 5))
        if where == "stops" and rank == 0:
            os.kill(pids[late], signal.SIGCONT)
        slow["how"] = ""
        did = "did not reach" if where == "comes late" else "reached"
        assert f"rank {late} {did} step {n}" in said and f"; {others} waited for 2 s. The process is there" in said, (
            said
        )
        limit = "agreement_timeout" if where == "comes late" else "timeout"
        assert "it is slow, stopped, cut off, or at another call" in said and f"make_mesh({limit}=2)" in said, said
        assert "died" not in said and "left the step" not in said
        own = f"the other ranks have given up waiting for this one, rank {late}."
        assert said.startswith(own) == (rank == late), said
        state, metrics = step(state, torch.ones(2, 5))
        assert metrics["finite"]
    slow["how"] = "sleeps"
    patient = _step(sf.make_mesh(timeout=60), loss)  # the remedy
    patient(patient.init({"w": torch.ones(5, 3)}), torch.ones(2, 5))


@pytest.mark.nightly
@distributed(world=2, timeout=60)
def test_a_rank_that_does_not_come_to_the_first_step_is_waited_for_no_longer_than_agreed() -> None:
    mesh = sf.make_mesh(timeout=2)
    if dist.get_rank() == 1:
        time.sleep(6)  # at another call
        return
    said = _error(_step(mesh).init, {"w": torch.ones(5, 3)})
    assert (
        "make the communicators of Mesh(dp=2; rank 0 on cpu)" in said and "ranks 1 did not arrive within 2 s" in said
    ), said
    assert "slow, at another call, or gone" in said and "died" not in said


@distributed(world=2)
def test_ranks_at_different_calls_name_them() -> None:
    mesh, rank = sf.make_mesh(), dist.get_rank()
    step = _step(mesh)
    state = step.init({"w": torch.ones(5, 3)})
    x = torch.ones(2, 5)
    calls = {
        "init": lambda: step.init({"w": torch.ones(5, 3)}),
        "step 0": lambda: step(state, x),
        "apply": lambda: step.apply(_loss, state, x),
        "the loss of a step": lambda: _step(mesh).loss(state.params, x),
    }
    names = list(calls)
    for k, name in enumerate(names):
        mine, other = (name, names[k - 1]) if rank == 0 else (names[k - 1], name)
        said = _error(calls[mine])
        assert f"rank {rank}: {mine}" in said and f"rank {1 - rank}: {other}" in said, said
    state, _ = step(state, x)


_PROGRAM = """
import os, sys, time, signal
import torch, torch.distributed as dist
import shardfn as sf
mesh, how, place = sf.make_mesh(timeout=60), sys.argv[1], sys.argv[2]
last = mesh.rank == mesh.size - 1
def loss(p, x):
    if last and how == "kill" and turns:
        os.kill(os.getpid(), signal.SIGKILL)
    return (x @ p).square().mean()
turns = []
step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage=2, persist_elements=0))
state, _ = step(step.init(torch.ones(5, 3)), torch.ones(2, 5))
turns.append(1)
try:
    if last and how == "exit":
        sys.exit(0)
    if last and how == "raise":
        raise KeyError("the data of turn 1")
    if not (last and how == "end"):
        step(state, torch.ones(2, 5))
except sf.RankError as error:
    open(f"{place}/{mesh.rank}", "w").write(str(error))
"""


def _run(world: int, how: str, place: pathlib.Path) -> list[str]:
    """The errors of all ranks but the last when that one goes; each is a process of its own."""
    store = place / "store"
    program = (
        f"import torch.distributed as d; d.init_process_group('gloo', init_method='file://{store}', "
        f"rank=int(__import__('os').environ['RANK']), world_size={world})\n" + _PROGRAM
    )
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, how, str(place)]
    ranks = [subprocess.Popen(command, env=env | {"RANK": str(r)}, stderr=subprocess.PIPE) for r in range(world)]
    try:
        for process in ranks:
            process.communicate(timeout=100)
    finally:
        for process in ranks:
            process.kill()
    return [(place / str(r)).read_text() for r in range(world - 1)]


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["exit", "end", "raise", "kill"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_goes_is_reported_with_the_cause(world: int, how: str, tmp_path: pathlib.Path) -> None:
    last = world - 1
    for said in _run(world, how, tmp_path):
        if how == "kill":
            assert f"rank {last} died without a word" in said and "last checkpoint" in said, said
        else:
            why = "KeyError: 'the data of turn 1'" if how == "raise" else "its script came to an end"
            assert f"rank {last} left the program ({why}), while another one waited for it" in said, said
            assert "died" not in said, said
