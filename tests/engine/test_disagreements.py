"""Covers ranks that make different calls: all raise, the error has both calls, and the next joint call runs at once.

No test asserts a time. The mesh's limits are longer than that of the test where a hang would be hidden, and short where
many cases share a test.
"""

import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn import checkpoint
from shardfn.testing import distributed

NAMES = ("step", "evaluate", "apply", "save", "restore", "sharded", "bound", "reshard", "gradients", "update")
PAIRS = list(itertools.permutations(NAMES, 2))
# By day: each call once, in one of the two places.
BY_DAY = [
    ("step", "evaluate"),
    ("bound", "save"),
    ("restore", "sharded"),
    ("apply", "gradients"),
    ("update", "reshard"),
]


def _loss(params: dict, x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean() + params["b"].square().mean()


def _rows(params: dict, x: Tensor) -> Tensor:
    return x @ params["w"]


def _params() -> dict:
    return {"w": torch.ones(6, 3), "b": torch.ones(4)}


def _mesh(seconds: float = 600.0) -> sf.Mesh:
    return sf.make_mesh({"dp": -1}, timeout=seconds, agreement_timeout=seconds)


def _calls(mesh: sf.Mesh, where: pathlib.Path, *, jit: bool = False) -> dict[str, Callable[[], Any]]:
    zero, x = sf.Zero(stage=3, persist_elements=0), torch.ones(2, 6)
    loss = sf.jit(_loss, backend="graph") if jit else _loss
    step = sf.sharded_step(loss, sf.optim.adamw(0.1), mesh=mesh, zero=zero, donate=False)
    rows = sf.sharded(_rows, mesh=mesh, zero=zero)
    captured = sf.sharded(sf.jit(_rows, backend="graph"), mesh=mesh, zero=zero)
    state, params = step.init(_params()), rows.init(_params())
    bound = captured.bind(params, x)
    grads, _ = step.gradients(state, x)
    checkpoint.save(where / "read", state, replace=True)
    return {
        "step": lambda: step(state, x),
        "evaluate": lambda: step.evaluate(state, [x]),
        "apply": lambda: step.apply(_rows, state, x),
        "save": lambda: checkpoint.save(where / "written", state, replace=True),
        "restore": lambda: checkpoint.restore(where / "read", state, donate=False),
        "sharded": lambda: rows(params, x),
        "bound": lambda: bound(params, x),
        "reshard": lambda: sf.reshard(params, sf.P(None)),
        "gradients": lambda: step.gradients(state, x),
        "update": lambda: step.update(state, grads),
    }


# A part of each call's name in errors.
_SHOWN = {
    "step": "step 0",
    "evaluate": "step.evaluate",
    "apply": "apply",
    "save": "checkpoint.save, step 0",
    "restore": "checkpoint.restore",
    "sharded": "sharded",
    "bound": "of the bound",
    "reshard": "reshard",
    "gradients": "the gradients of step 0",
    "update": "the update of step 0",
}


def _check(error: str, calls: Sequence[str]) -> None:
    lines = error.splitlines()
    assert lines[0] == "ranks disagree on what to run:", error
    for rank, call in enumerate(calls):
        assert any(line.startswith(f"  - rank {rank}: ") and _SHOWN[call] in line for line in lines), (call, error)
    assert lines[-1].startswith("All ranks of a mesh make the same calls in the same order"), error


def _differ(calls: dict[str, Callable[[], Any]], names: Sequence[str], *, all_named: bool = True) -> None:
    """Ranks make different calls; then all make a step, twice."""
    with pytest.raises(sf.RankError) as caught:
        calls[names[dist.get_rank()]]()
    if all_named:
        _check(str(caught.value), names)
    else:
        assert "ranks disagree on what to run:" in str(caught.value)
    for _ in range(2):
        calls["step"]()


@distributed(world=2, timeout=60)
def _pairs(pairs: Sequence[tuple[str, str]], channel: str, where: pathlib.Path, *, jit: bool = False) -> None:
    os.environ["SHARDFN_CHANNEL"] = channel
    try:
        mesh = _mesh()
        calls = _calls(mesh, where, jit=jit)
        for pair in pairs:
            _differ(calls, pair)
    finally:
        del os.environ["SHARDFN_CHANNEL"]


@pytest.mark.nightly
@pytest.mark.parametrize("channel", ["memory", "gloo"])
def test_after_calls_that_differ_the_next_step_runs(channel: str, tmp_path: pathlib.Path) -> None:
    _pairs(BY_DAY[:2], channel, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("channel", ["memory", "gloo"])
@pytest.mark.parametrize("first", NAMES)
def test_after_any_pair_of_calls_the_next_step_runs(first: str, channel: str, tmp_path: pathlib.Path) -> None:
    _pairs([pair for pair in PAIRS if pair[0] == first], channel, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("channel", ["memory", "gloo"])
def test_after_a_captured_step_and_another_call_the_next_step_runs(channel: str, tmp_path: pathlib.Path) -> None:
    _pairs([("step", name) for name in NAMES[1:]], channel, tmp_path, jit=True)


@distributed(world=3, timeout=60)
def _one_of_three(odd: int, pairs: Sequence[tuple[str, str]], channel: str, where: pathlib.Path) -> None:
    os.environ["SHARDFN_CHANNEL"] = channel
    try:
        calls = _calls(_mesh(), where)
        for one, others in pairs:
            names = [one if rank == odd else others for rank in range(3)]
            _differ(calls, names, all_named="bound" not in names)
    finally:
        del os.environ["SHARDFN_CHANNEL"]


@pytest.mark.nightly
@pytest.mark.parametrize("channel", ["memory", "gloo"])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_rank_of_three_makes_another_call(odd: int, channel: str, tmp_path: pathlib.Path) -> None:
    pairs = [*BY_DAY, ("step", "bound"), ("bound", "step"), ("save", "step"), ("evaluate", "restore")]
    _one_of_three(odd, pairs, channel, tmp_path)


class _Boom(Exception):
    pass


@distributed(world=2, timeout=60)
def test_a_loss_that_would_raise_against_evaluate() -> None:
    mesh, x, raises = _mesh(), torch.ones(2, 6), False

    def loss(params: dict, x: Tensor) -> Tensor:
        if raises and mesh.rank == 0:
            raise _Boom
        return _loss(params, x)

    step = sf.sharded_step(loss, sf.optim.adamw(0.1), mesh=mesh, zero=3, donate=False)
    state = step.init(_params())
    raises = True
    with pytest.raises(sf.RankError, match=r"rank 0: step 0\n  - rank 1: step.evaluate"):
        step(state, x) if mesh.rank == 0 else step.evaluate(state, [x])
    with pytest.raises(
        _Boom if mesh.rank == 0 else sf.RankError, match=None if mesh.rank == 0 else "rank 0 raised _Boom"
    ):
        step.evaluate(state, [x])
    raises = False
    step(state, x)


@distributed(world=2, timeout=60)
def test_two_steps_against_evaluate_and_a_step() -> None:
    mesh, x = _mesh(), torch.ones(2, 6)
    step = sf.sharded_step(_loss, sf.optim.adamw(0.1), mesh=mesh, zero=3, donate=False)
    state = step.init(_params())
    calls = [lambda: step(state, x), lambda: step.evaluate(state, [x])]
    for first in calls if mesh.rank == 0 else calls[::-1]:
        with pytest.raises(sf.RankError, match="ranks disagree on what to run"):
            first()
    made = []
    for call in (calls[0], calls[0]) if mesh.rank == 0 else (calls[1], calls[0]):
        try:
            made.append(call())
        except sf.RankError as error:
            assert "ranks disagree on what to run" in str(error)
    assert len(made) == 1
    step(state, x)


@distributed(world=2, timeout=60)
def test_a_step_within_the_batches_of_evaluate_of_one_rank() -> None:
    mesh, x = _mesh(), torch.ones(2, 6)
    step = sf.sharded_step(_loss, sf.optim.adamw(0.1), mesh=mesh, zero=3, donate=False)
    state = step.init(_params())

    def batches():
        yield x
        if mesh.rank == 0:
            step(state, x)
        yield x

    with pytest.raises(sf.RankError, match=r"rank 0: step 0\n  - rank 1: evaluate"):
        step.evaluate(state, batches())
    step(state, x)


@distributed(world=2, timeout=60)
def test_profile_of_one_rank() -> None:
    # Its first message was of another kind than that of a step: one rank kept its communicators, the other did not.
    mesh, x = _mesh(), torch.ones(2, 6)
    step = sf.sharded_step(_loss, sf.optim.adamw(0.1), mesh=mesh, zero=3, donate=False)
    state = step.init(_params())
    with pytest.raises(sf.RankError, match=r"rank 0: step.profile\(steps=1\)\n  - rank 1: step 0"):
        step.profile(state, x, steps=1) if mesh.rank == 0 else step(state, x)
    step(state, x)


@distributed(world=2, timeout=60)
def _while_saving(where: pathlib.Path) -> None:
    mesh, x = _mesh(), torch.ones(2, 6)
    step = sf.sharded_step(_loss, sf.optim.adamw(0.1), mesh=mesh, zero=3, donate=False)
    state = step.init(_params())
    with checkpoint.Manager(where, mesh=mesh) as manager:
        manager.save(state)
        with pytest.raises(sf.RankError, match=r"rank 0: step.evaluate\n  - rank 1: step 0"):
            step.evaluate(state, [x]) if mesh.rank == 0 else step(state, x)
        with pytest.raises(sf.RankError, match="ranks disagree on what to run"):
            manager.save(step(state, x)[0]) if mesh.rank == 0 else step.evaluate(state, [x])
        state, _ = step(state, x)
        manager.save(state)
        manager.wait()
        assert manager.steps() == [0, 1]


def test_calls_that_differ_while_a_checkpoint_is_written(tmp_path: pathlib.Path) -> None:
    _while_saving(tmp_path)


@pytest.mark.nightly
@distributed(world=2, timeout=60)
def test_a_rank_that_does_not_come_to_a_call_is_named_after_the_limit_of_agreements() -> None:
    mesh = sf.make_mesh({"dp": -1}, agreement_timeout=0.5)
    assert mesh.agreement_timeout.total_seconds() == 0.5
    step = sf.sharded_step(_loss, sf.optim.adamw(0.1), mesh=mesh, zero=3, donate=False)
    state = step.init(_params())
    if mesh.rank == 0:
        with pytest.raises(sf.RankError, match=r"rank 1 did not reach step 0; .*make_mesh\(agreement_timeout=0.5\)"):
            step(state, torch.ones(2, 6))
        # Alone, it makes no group; when the other rank has come, both make theirs.
        with pytest.raises(sf.RankError, match=r"ranks 1 did not arrive within 0.5 s"):
            step(state, torch.ones(2, 6))
    dist.barrier()
    if mesh.rank == 1:
        with pytest.raises(sf.RankError, match="have given up waiting for this one"):
            step(state, torch.ones(2, 6))
    dist.barrier()
    step(state, torch.ones(2, 6))


def test_the_limit_of_agreements_is_two_minutes_or_that_of_transfers() -> None:
    make = functools.partial(sf.make_mesh, {"dp": 1}, device="cpu")
    seconds = [m.agreement_timeout.total_seconds() for m in (make(), make(timeout=5), make(timeout=500))]
    assert seconds == [120, 5, 120]
    assert make(timeout=5, agreement_timeout=50).agreement_timeout.total_seconds() == 50
