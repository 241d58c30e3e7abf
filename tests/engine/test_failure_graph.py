"""Covers an error of one rank while a step runs, captured or eager: the others raise at once, and all go on."""

import contextlib

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.collectives import Control
from shardfn.engine import comms_of
from shardfn.testing import distributed

_FAIL: dict = {"where": "", "error": None}


class _Boom(Exception):
    pass


@torch.library.custom_op("shardfn_test::passing", mutates_args=())
def _passing(x: Tensor, where: str) -> Tensor:
    """A user's op: the identity, which fails at the place in `_FAIL`."""
    if _FAIL["where"] == where:
        raise _FAIL["error"]
    return x.clone()


_passing.register_fake(lambda x, where: torch.empty_like(x))
_passing.register_autograd(
    lambda ctx, g: (_passing(g, "backward"), None), setup_context=lambda ctx, inputs, output: None
)


def _loss(params: dict, batch: Tensor) -> Tensor:
    h = torch.tanh(torch.nn.functional.embedding(batch, params["table"]) @ params["w"])
    h = _passing(h, "forward")
    # A collective of the loss's own: where the others wait when a rank has failed in the forward.
    return (h @ params["v"] / sf.pmean(h.detach().square().mean(), "dp")).square().mean()


def _failing_update() -> sf.optim.GradientTransformation:
    def update(updates, state, params=None, **extra):
        return sf.core.tree_map(lambda u: _passing(u, "update"), updates), state

    return sf.optim.chain(sf.optim.GradientTransformation(lambda params: (), update), sf.optim.sgd(0.1))


def _params() -> dict:
    g = torch.Generator().manual_seed(0)
    shapes = {"table": (8, 6), "w": (6, 6), "v": (6, 3)}
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def _batch(last: int = 5) -> Tensor:
    return torch.tensor([[0, 1, 2, 3], [4, 5, 6, last]])


def _step(mesh: sf.Mesh, stage: int, mode: str) -> sf.transforms.ShardedStep:
    loss = sf.jit(_loss, backend="graph") if mode == "graph" else _loss
    return sf.sharded_step(loss, _failing_update(), mesh=mesh, zero=sf.Zero(stage=stage, persist_elements=0))


@contextlib.contextmanager
def _told(culprit: int, error: type[BaseException], text: str):
    """The culprit raises its own error, the others one that quotes it; at once: a mesh waits longer than a test may."""
    here = torch.distributed.get_rank() == culprit
    with pytest.raises(error if here else sf.RankError) as caught:
        yield
    assert text in str(caught.value) or isinstance(caught.value, KeyboardInterrupt)
    if not here:
        assert f"rank {culprit} raised {error.__name__}" in str(caught.value), caught.value
    _FAIL["where"] = ""


def _params_of(state: sf.TrainState) -> list[Tensor]:
    return [x.local.clone() for x in sf.core.tree_leaves(state.params)]


@distributed(world=[2, pytest.param(3, marks=pytest.mark.nightly)], timeout=120)
@pytest.mark.parametrize("mode", [pytest.param("graph", marks=pytest.mark.nightly), "eager"])
def test_an_error_of_one_rank_raises_on_all_and_the_next_step_runs(mode: str, world: int) -> None:
    mesh, rank = sf.make_mesh({"dp": -1}), torch.distributed.get_rank()
    step, culprit = _step(mesh, 1, mode), world - 1
    state, _ = step(step.init(_params()), _batch())
    after, _ = step(step(step.init(_params()), _batch())[0], _batch())
    want = _params_of(after)
    for where, error in (
        ("index", IndexError("index out of range")),
        ("forward", _Boom("in the forward")),
        ("backward", KeyboardInterrupt()),
        ("backward", _Boom("in the backward")),
    ):
        with _told(culprit, type(error), str(error)):
            if rank == culprit and where != "index":
                _FAIL.update(where=where, error=error)
            step(state, _batch(99 if rank == culprit and where == "index" else 5))
    state, _ = step(state, _batch())  # nothing was overwritten, and the graph is still good
    assert all(torch.equal(a, b) for a, b in zip(_params_of(state), want, strict=True))
    with _told(culprit, _Boom, "in the update"):
        if rank == culprit:
            _FAIL.update(where="update", error=_Boom("in the update"))
        step(state, _batch())
    with contextlib.suppress(sf.core.DonatedError, sf.RankError):  # as far as it got on each rank
        step(state, _batch())
    other = _step(mesh, 1, "eager" if mode == "graph" else "graph")
    for again in (step, other):
        after, _ = again(again(again.init(_params()), _batch())[0], _batch())
        assert all(torch.equal(a, b) for a, b in zip(_params_of(after), want, strict=True))
    assert mode == "eager" or step.cache_info().misses == 1
    ones = torch.ones(())
    torch.distributed.all_reduce(ones)  # the program's own group was left alone
    assert ones == world


@pytest.mark.nightly
@distributed(world=3, timeout=120)
def test_ranks_that_need_nothing_more_of_a_failed_one_raise_at_the_next_step() -> None:
    mesh, rank = sf.make_mesh({"dp": -1}), torch.distributed.get_rank()
    step = _step(mesh, 3, "graph")
    state, _ = step(step.init(_params()), _batch())
    with _told(1, _Boom, "in the backward"):  # they wait at a channel
        if rank == 1:
            _FAIL.update(where="backward", error=_Boom("in the backward"))
        step(state, _batch())
    with _told(1, _Boom, "in the update"):  # stage 3 sends no message after the update
        if rank == 1:
            _FAIL.update(where="update", error=_Boom("in the update"))
        state, _ = step(state, _batch())
        step(state, _batch())
    state, metrics = step(step.init(_params()), _batch())
    assert metrics["finite"]


@distributed(world=2, timeout=60)
def test_where_connections_cannot_be_closed_eager_ranks_meet() -> None:
    mesh, rank = sf.make_mesh({"dp": -1}), torch.distributed.get_rank()
    step = sf.sharded_step(
        lambda p, x: _passing(x @ p, "forward").square().mean(), sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage=3)
    )
    state = step.init(torch.ones(3, 2))
    comms_of(mesh).meets = True
    with _told(1, _Boom, "in the loss"):
        if rank == 1:
            _FAIL.update(where="forward", error=_Boom("in the loss"))
        step(state, torch.ones(4, 3))
    _, metrics = step(state, torch.ones(4, 3))
    assert metrics["finite"]


@distributed(world=3, timeout=60)
def test_a_rank_that_waits_for_one_that_waits_is_woken_too() -> None:
    """Rank 0 fails; rank 1 learns of it, and its own word must reach rank 2, which waits for rank 1 alone."""
    mesh, rank = sf.make_mesh({"dp": -1}), torch.distributed.get_rank()
    first, second = Control(mesh), Control(mesh)
    group = second._group
    assert group is not None
    if rank == 0:
        first.tell("raised Boom: over")
        first.close()
        return
    waits_for = {1: first._group, 2: group}[rank]
    assert waits_for is not None
    with pytest.raises(RuntimeError) as caught:
        waits_for.recv([torch.zeros(1)], rank - 1, 5).wait()
    assert first.is_theirs(caught.value)
    assert "rank 0 raised Boom: over" in str(first.failure(caught.value))
    second.close()
