"""Covers ranks that disagree, raise or die: every rank raises, names the culprit, and nothing hangs."""

import os
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.engine.agreement import comms_of, losing_no_peer
from shardfn.testing import distributed


def _loss(params: dict, batch: dict) -> Tensor:
    return ((batch["x"] @ params["w"] + params["b"]) ** 2).mean()


def _params(rows: int = 3) -> dict:
    return {"w": torch.ones(rows), "b": torch.zeros(())}


def _batch(rows: int = 4) -> dict:
    return {"x": torch.ones(rows, 3)}


def _step(stage: int = 3, loss=_loss, **options):
    zero = sf.Zero(stage=stage, persist_elements=0)
    return sf.sharded_step(loss, sf.optim.adamw(0.1), mesh=sf.make_mesh({"dp": -1}), zero=zero, **options)


@distributed(world=2)
def test_ranks_that_disagree_all_raise() -> None:
    rank = torch.distributed.get_rank()
    with pytest.raises(sf.RankError, match=r"(?s)rank 0: params\['w'\]: \(3,\).*rank 1: params\['w'\]: \(4,\)"):
        _step().init(_params(3 + rank))
    with pytest.raises(sf.RankError, match=r"(?s)rank 0: Zero\(stage=0.*rank 1: Zero\(stage=1"):
        _step(stage=rank).init(_params())
    with pytest.raises(
        sf.RankError, match=r"different values.*manual_seed.*\n.*params\['w'\]: .* 0.0 on rank 0, 3.0 on rank 1$"
    ):
        _step().init({"w": torch.full((3,), float(rank)), "b": torch.zeros(())})
    with pytest.raises(sf.RankError, match=r"params\['w'\]: .* is .* on rank 0, .* on rank 1$"):
        _step().init(lambda key: {"w": sf.core.normal(key, (3,)), "b": torch.zeros(())}, sf.key(rank))
    step = _step(donate=False)
    state = step.init(_params())
    later, _ = step(state, _batch())
    with pytest.raises(
        sf.RankError, match=r"(?s)rank 0: step 0\n.*rank 1: step 1\nAll ranks of a mesh make the same calls"
    ):
        step(later if rank else state, _batch())
    with pytest.raises(sf.RankError, match=r"(?s)batch\['x'\]: torch.float32.*batch\['x'\]: torch.float64"):
        step(state, {"x": torch.ones(4, 3, dtype=torch.float64 if rank else torch.float32)})
    # The rank that is first leaves word of it, for one that still waits for a leaf.
    with pytest.raises((ValueError, sf.RankError), match=r"ranks hold batches of different sizes.*WeightedMean"):
        step(state, _batch(4 + rank))
    _, metrics = step(state, _batch())
    assert metrics["finite"]


@distributed(world=2)
def test_a_state_that_one_rank_may_not_pass_is_named_on_all_ranks() -> None:
    rank = torch.distributed.get_rank()
    step = _step()
    consumed = step.init(_params())
    state, _ = step(consumed, _batch())
    with pytest.raises(
        sf.DonatedError if rank else sf.RankError, match="already consumed" if rank else "rank 1: raised DonatedError"
    ):
        step(consumed if rank else state, _batch())

    passed: Any = () if rank else state

    def loss(x: Tensor) -> Tensor:
        return step(passed, {"x": x})[1]["loss"]

    # In a transform ranks exchange nothing before the first transfer, and hear of it there.
    with pytest.raises(TypeError if rank else sf.RankError, match=None if rank else "rank 1 raised TypeError"):
        torch.func.grad(loss)(torch.ones(4, 3))
    _, metrics = step(state, _batch())
    assert metrics["finite"]


@distributed(world=2)
def _pass_a_damaged_block(place: pathlib.Path) -> None:
    rank, kinds = torch.distributed.get_rank(), dict.fromkeys(("params", "grads", "optimizer"), "disk")
    zero = sf.Zero(stage=3, persist_elements=0, disk=sf.Disk(str(place), checksum=True), **kinds)  # type: ignore[arg-type]
    step = sf.sharded_step(_loss, sf.optim.adamw(0.1), mesh=sf.make_mesh({"dp": -1}), zero=zero)
    state, _ = step(step.init(_params()), _batch())
    file = state.params["w"].held.slot.path
    whole = file.read_bytes()
    if rank:
        file.write_bytes(whole[:2])
    told = r"params\['w'\]" if rank else "rank 1 raised DamagedError.*slot"
    with pytest.raises(sf.memory.DamagedError if rank else sf.RankError, match=told):
        step(state, _batch())
    if rank:
        file.write_bytes(whole)
    _, metrics = step(state, _batch())
    assert metrics["finite"]
    step.close()


def test_a_damaged_block_of_one_rank_is_named_on_all_ranks_and_leaves_the_state(tmp_path: pathlib.Path) -> None:
    _pass_a_damaged_block(tmp_path)


class _Boom(Exception):
    pass


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        raise _Boom("in the backward")


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_a_rank_that_raises_is_named_by_the_others_at_once(world: int) -> None:
    # At once: a rank that waits in vain waits for 30 minutes, the limit of a mesh, and this test has three.
    rank = torch.distributed.get_rank()
    fail = {"where": ""}

    def loss(params: dict, batch: dict) -> Tensor:
        if fail["where"] == "before" and rank == 1:
            raise _Boom("before any leaf")
        y = batch["x"] @ params["w"]
        if fail["where"] == "middle" and rank == 1:
            raise _Boom("between two leaves")
        y = y + params["b"]
        if fail["where"] == "backward" and rank == 1:
            y = _FailingBackward.apply(y)
        return (y**2).mean()

    for stage in (0, 2, 3):
        step = _step(stage, loss)
        state = step.init(_params())
        for where in ("before", "middle", "backward"):
            for warm in (False, True):  # in a step that learns the order of use, and in one that knows it
                if warm:
                    fail["where"] = ""
                    state, _ = step(state, _batch())
                fail["where"] = where
                expected = _Boom if rank == 1 else sf.RankError
                with pytest.raises(expected, match=None if rank == 1 else "rank 1 raised _Boom"):
                    step(state, _batch())
                fail["where"] = ""
                state, metrics = step(state, _batch())  # the state lives on
                assert metrics["finite"]


@distributed(world=3, timeout=60)
def _die_in_mid_step(stage: int, out: pathlib.Path) -> None:
    rank = torch.distributed.get_rank()
    step = _step(stage, lambda p, b: _loss(p, b) if rank != 1 or alive else os._exit(7))
    alive = True
    state = step.init(_params())
    state, _ = step(state, _batch())
    alive = False
    try:
        step(state, _batch())
    except sf.RankError as error:
        (out / f"rank{rank}").write_text(str(error))
        raise


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_dies_is_named(stage: int, tmp_path: pathlib.Path) -> None:
    with pytest.raises(sf.RankError, match="rank 1"):
        _die_in_mid_step(stage, tmp_path)
    told = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert told and all("rank 1 died" in text for text in told.values()), told


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_branches_that_only_some_ranks_take_neither_hang_nor_err(world: int) -> None:
    """Facts of the matter: rank-dependent leaves, a branch by call counter, a different number of calls."""
    rank = torch.distributed.get_rank()
    calls = {"n": 0}

    def loss(params: dict, batch: dict) -> Tensor:
        x = batch["x"]
        branch = int(batch["branch"][0])
        if branch == 0:
            x = x @ params["a"]
        for _ in range(branch):
            x = x @ params["b"]
        if calls["n"] % 3 == 2:
            x = x @ params["c"]
        return (x**2).mean()

    g = torch.Generator().manual_seed(0)
    params = {k: torch.randn(5, 5, generator=g) / 2 for k in "abc"}
    for stage in (0, 2, 3):
        mesh = sf.make_mesh({"dp": -1})
        step = sf.sharded_step(
            loss,
            sf.optim.sgd(0.1),
            mesh=mesh,
            zero=sf.Zero(stage=stage, persist_elements=0, travel=sf.Travel(bucket_bytes=0)),
        )
        state = step.init(params)
        want = {k: v.clone() for k, v in params.items()}
        for n in range(6):
            calls["n"] = n
            xs = [torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * n + r)) for r in range(world)]
            branches = [(n // 2 + r) % 3 for r in range(world)]
            batch = {"x": xs[rank], "branch": torch.full((4,), branches[rank])}
            state, _ = step(state, batch)
            handles = {k: v.clone().requires_grad_() for k, v in want.items()}
            rows = [{"x": x, "branch": torch.full((4,), b)} for x, b in zip(xs, branches, strict=True)]
            torch.stack([loss(handles, row) for row in rows]).mean().backward()
            want = {k: (v - 0.1 * (v.grad if v.grad is not None else 0)).detach() for k, v in handles.items()}
        for k in want:
            torch.testing.assert_close(state.params[k].full_tensor(), want[k], rtol=1e-5, atol=1e-6)


@distributed(world=2, timeout=60)
def test_ranks_that_fail_with_other_channels_go_on_together() -> None:
    """As where a rank fails while others, along another axis, still make a channel."""
    rank = torch.distributed.get_rank()
    with sf.make_mesh({"dp": 2}, device="cpu", agreement_timeout=600) as mesh:
        step = sf.sharded_step(_loss, sf.optim.sgd(0.1), mesh=mesh, batch=sf.P("dp"), donate=False)
        state = step.init(_params())
        comms = comms_of(mesh)
        made: Any = getattr(comms.channels, "_made")  # noqa: B009
        if rank == 1:
            made["relay", ("dp",)] = next(iter(made.values()))
        with pytest.raises(_Boom), losing_no_peer(comms):
            raise _Boom("on all ranks")
        assert step(state, _batch())[1]["finite"]


@pytest.mark.nightly
@distributed(world=2)
def test_a_rank_that_raises_in_any_microbatch_or_before_is_named() -> None:
    rank = torch.distributed.get_rank()
    calls = {"n": 0, "fail": -1}

    def loss(params: dict, batch: dict) -> Tensor:
        calls["n"] += 1
        if rank == 1 and calls["n"] - 1 == calls["fail"]:
            raise RuntimeError("feature store: connection refused")
        return _loss(params, batch)

    for stage in (0, 1, 3):
        step = _step(stage, sf.accumulate(loss, 2))
        state = step.init(_params())
        for fail in (0, 1):
            calls.update(n=0, fail=fail)
            with pytest.raises(RuntimeError if rank else sf.RankError, match="feature store"):
                step(state, _batch())
        calls.update(n=0, fail=-1)
        with pytest.raises(TypeError if rank else sf.RankError, match=r"batch\['x'\] is a float"):
            step(state, {"x": 1.0} if rank else _batch())
        refused = "cuts the batch unevenly" + "|different sizes" * (rank == 0)  # rank 0's own, or the report of rank 1
        with pytest.raises(ValueError if rank else (ValueError, sf.RankError), match=refused):
            step(state, _batch(4 - rank))
        state, metrics = step(state, _batch())
        assert metrics["finite"]
