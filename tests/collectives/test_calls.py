"""Covers the flight recorder: the last collectives of each rank, printed by all ranks when one hangs."""

import contextlib
import io
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.collectives import flight_recorder_of, psum
from shardfn.testing import distributed


def _step(mesh: sf.Mesh, loss: Any) -> Any:
    return sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero(3, persist_elements=0))


def _loss(params: Any, x: Tensor) -> Tensor:
    return psum((x @ params["w"]).square().mean(), "dp") / 2


def test_a_mesh_keeps_no_collectives_unless_asked() -> None:
    assert flight_recorder_of(sf.make_mesh()) is None
    with pytest.raises(ValueError, match="flight_recorder must be at least 0, got -1"):
        sf.make_mesh(flight_recorder=-1)


@pytest.mark.parametrize("jitted", [False, True])
@distributed(world=2)
def test_entries_are_the_collectives_of_a_step(jitted: bool) -> None:
    mesh = sf.make_mesh(flight_recorder=64)
    step = _step(mesh, sf.jit(_loss) if jitted else _loss)
    state = step.init({"w": torch.ones(5, 3)})
    state, _ = step(state, torch.ones(2, 5))
    recorder = flight_recorder_of(mesh)
    assert recorder is not None
    before = recorder.num
    with sf.count_traffic() as traffic:
        state, _ = step(state, torch.ones(2, 5))
    own = [x for x in [*recorder.entries][before - recorder.num :] if x.dtype is not None]
    counted = {name: calls for (name, _), (calls, _) in traffic.by_op.items()}
    found = {name: sum(x.op == name for x in own) for name in {x.op for x in own}}
    assert found == counted and found["all_gather"] >= 1
    assert all(x.waited is not None and x.axes == ("dp",) and x.ranks == (0, 1) for x in own)
    assert all(x.file == __file__ for x in recorder.entries)
    [gather] = {(x.shape, x.dtype) for x in own if x.op == "all_gather"}
    assert gather == ((9 - 3 * mesh.rank,), torch.float32)  # 3 of 5 rows, then 2
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, [(x.op, x.number, x.axes) for x in own])
    assert everywhere[0] == everywhere[1]  # a collective has the same number on all ranks


def test_the_oldest_entries_make_room() -> None:
    recorder = flight_recorder_of(sf.make_mesh(flight_recorder=2))
    assert recorder is not None
    for _ in range(5):
        recorder.add("psum", ("dp",), (0, 1), torch.ones(3))
    assert [x.number for x in recorder.entries] == [4, 5] and recorder.num == 5
    assert "psum" in str(recorder) and "not waited for" in str(recorder) and __file__ in str(recorder)


def _hang(params: Any, x: Tensor) -> Tensor:
    if _HANGS and dist.get_rank() == 1:
        time.sleep(8)
    return _loss(params, x)


_HANGS = list[bool]()


@pytest.mark.nightly
@distributed(world=2, timeout=60)
def test_all_ranks_print_when_one_hangs() -> None:
    mesh, said = sf.make_mesh(timeout=2, flight_recorder=16), io.StringIO()
    step = _step(mesh, _hang)
    state = step.init({"w": torch.ones(5, 3)})
    state, _ = step(state, torch.ones(2, 5))
    _HANGS.append(True)
    with contextlib.redirect_stderr(said), pytest.raises(sf.RankError):
        step(state, torch.ones(2, 5))
    text = said.getvalue()
    assert text.count("rank 0 has waited in vain in step 1. The last 16 of") == 1, text
    assert f"shardfn: rank {mesh.rank} of 2: " in text and "all_gather" in text and f"{__file__}:" in text
    assert "not waited for" in text or mesh.rank == 1
    if mesh.rank == 1:  # printed while this rank hangs
        assert "in _hang\n    time.sleep(8)" in text, text


@pytest.mark.nightly
@distributed(world=2, timeout=60)
def test_an_error_of_one_rank_is_no_hang() -> None:
    mesh, said = sf.make_mesh(timeout=5, flight_recorder=16), io.StringIO()

    def loss(params: Any, x: Tensor) -> Tensor:
        if mesh.rank == 1:
            raise ZeroDivisionError("own")
        return _loss(params, x)

    step = _step(mesh, loss)
    state = step.init({"w": torch.ones(5, 3)})
    with contextlib.redirect_stderr(said), pytest.raises((sf.RankError, ZeroDivisionError)):
        step(state, torch.ones(2, 5))
    assert "collectives" not in said.getvalue()
