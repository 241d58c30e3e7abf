"""Covers parameters that arrive late: `Pace(refresh="use")` gives the bits of waiting at once, whoever reads when."""

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn import Pace, Travel, Zero, optim
from shardfn.collectives import Arrival
from shardfn.core import tree_leaves
from shardfn.testing import distributed

NUM = 4


def _params() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    return {f"w{i}": torch.randn(7, 7, generator=draw) / 2 for i in range(NUM)} | {"b": torch.randn(5, generator=draw)}


def _rows(seed: int) -> Tensor:
    whole = torch.randn(12, 7, generator=torch.Generator().manual_seed(seed))
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def _loss(p: dict[str, Any], x: Tensor) -> Tensor:
    for i in range(NUM):
        x = torch.tanh(x @ p[f"w{i}"])
    return (x[:, :5] + p["b"]).square().mean()


def _made(refresh: str, loss: Any = _loss, stage: int = 2, bucket: int = 0, **how: Any) -> Any:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    zero = Zero(stage, persist_elements=0, travel=Travel(bucket_bytes=bucket), pace=Pace(refresh=refresh))
    return sf.sharded_step(loss, how.pop("optimizer", optim.adamw(0.1)), mesh=mesh, zero=zero, **how)


def _bits(tree: Any) -> list[bytes]:
    return [x.full_tensor().contiguous().view(torch.uint8).numpy().tobytes() for x in tree_leaves(tree)]


def _under_way(state: Any) -> int:
    return sum(bool(x.coming) for x in tree_leaves(state.params))


@distributed(world=[2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("bucket", [pytest.param(0, marks=pytest.mark.nightly), 1 << 20])
def test_it_has_the_bits_of_waiting_after_the_update(bucket: int) -> None:
    policy = sf.Policy(compute=torch.bfloat16)
    half: Any = sf.mixed_precision(_loss, policy)
    for stage, loss in ((1, _loss), (2, _loss), (2, sf.accumulate(_loss, 2)), (1, half)):
        steps = [_made(refresh, loss, stage, bucket) for refresh in ("update", "use")]
        states = [step.init(_params()) for step in steps]
        for turn in range(3):
            metrics = []
            for i, step in enumerate(steps):
                states[i], found = step(states[i], _rows(turn))
                metrics.append({k: float(v) for k, v in found.items()})
            assert metrics[0] == metrics[1]
            assert not _under_way(states[0]) and _under_way(states[1])
        assert _bits(states[0].params) == _bits(states[1].params)
        assert not _under_way(states[1])  # it has been read


@pytest.mark.nightly
@distributed(world=2)
def test_stacked_leaves_come_layer_by_layer() -> None:
    def loss(p: Tensor, x: Tensor) -> Tensor:
        for layer in range(3):
            x = torch.tanh(x @ p[layer])
        return x.square().mean()

    params = torch.randn(3, 7, 7, generator=torch.Generator().manual_seed(0))
    spec = sf.Sharding(sf.P(), stacked=True)
    steps = [_made(refresh, loss, specs=spec) for refresh in ("update", "use")]
    states = [step.init(params) for step in steps]
    for turn in range(3):
        states = [step(state, _rows(turn))[0] for step, state in zip(steps, states, strict=True)]
    assert len(states[1].params.coming) == 3
    assert _bits(states[0].params) == _bits(states[1].params)


@contextlib.contextmanager
def _told(told: list[str], leaves: list[Any]) -> Iterator[None]:
    """Notes which leaf's arrival is waited for."""
    names = {id(a): leaf for leaf, x in leaves for a in x.coming}
    real = Arrival.wait

    def wait(self: Arrival) -> None:
        told.append(f"waited {names.get(id(self))}")
        real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arrival, "wait", wait)
        yield


@distributed(world=2)
def test_each_leaf_is_waited_for_at_its_first_use() -> None:
    told: list[str] = []

    def loss(p: dict[str, Any], x: Tensor) -> Tensor:
        told.append("begins")
        for i in range(NUM):
            x = torch.tanh(x @ p[f"w{i}"])
            told.append(f"used w{i}")
        return x.square().mean()

    step = _made("use", loss)
    state = step.init({name: x for name, x in _params().items() if name != "b"})
    for _ in range(2):
        state, _ = step(state, _rows(0))
    told.clear()
    with _told(told, list(state.params.items())):
        state, _ = step(state, _rows(0))
    pairs = [word for i in range(NUM) for word in (f"waited w{i}", f"used w{i}")]
    assert told[: 1 + len(pairs)] == ["begins", *pairs], told


@distributed(world=2)
def test_reading_waits_and_a_state_may_be_used_twice_or_dropped(tmp_path: pathlib.Path) -> None:
    step, plain = _made("use", donate=False), _made("update", donate=False)
    state, wanted = step.init(_params()), plain.init(_params())
    for turn in range(2):
        state, wanted = step(state, _rows(turn))[0], plain(wanted, _rows(turn))[0]
    assert (
        _under_way(state) and "float32" in repr(state.params["w0"]) and _under_way(state)
    )  # its shape says nothing new
    once, again = step(state, _rows(2))[0], step(state, _rows(2))[0]
    dropped, _ = step(state, _rows(3))
    del dropped
    evaluated = step.evaluate(once, [_rows(4)])
    after = plain(wanted, _rows(2))[0]
    assert evaluated == plain.evaluate(after, [_rows(4)])
    assert _bits(once.params) == _bits(again.params) == _bits(after.params)
    assert _bits(state.params) == _bits(wanted.params)
    place = dist.get_world_size() and tmp_path  # of rank 0
    places: list[Any] = [str(place)]
    dist.broadcast_object_list(places)
    late, _ = step(again, _rows(5))
    sf.checkpoint.save(places[0], late)
    found = sf.checkpoint.restore(places[0], step.init(_params()))
    assert _bits(found.tree.params) == _bits(plain(after, _rows(5))[0].params)
    mesh = step.mesh
    late, _ = step(late, _rows(6))
    mesh.close()  # waits for what the state still wants
    assert all(torch.isfinite(x.local).all() for x in late.params.values())


@distributed(world=3)
def test_a_step_that_raises_leaves_the_state_whole() -> None:
    failing = [False]

    def loss(p: dict[str, Any], x: Tensor) -> Tensor:
        if failing[0] and dist.get_rank() == 1:
            raise ZeroDivisionError("before anything is used")
        return _loss(p, x)

    steps = [_made(refresh, loss, donate=False) for refresh in ("update", "use")]
    states = [step.init(_params()) for step in steps]
    for turn in range(2):
        states = [step(state, _rows(turn))[0] for step, state in zip(steps, states, strict=True)]
    failing[0] = True
    with pytest.raises((ZeroDivisionError, sf.RankError), match="before anything is used"):
        steps[1](states[1], _rows(2))
    failing[0] = False
    states = [step(state, _rows(2))[0] for step, state in zip(steps, states, strict=True)]
    assert _bits(states[0].params) == _bits(states[1].params)


def test_a_rank_that_dies_before_its_part_has_left_is_told_to_whoever_reads() -> None:
    with pytest.raises(sf.RankError) as caught:
        _dies()
    assert "killed" in str(caught.value) or "SIGKILL" in str(caught.value), caught.value
    assert "read: RankError" in "\n".join(caught.value.__notes__), caught.value.__notes__


@distributed(world=2, timeout=60)
def _dies() -> None:
    step = _made("use")
    state = step.init(_params())
    state, _ = step(state, _rows(0))
    if dist.get_rank() == 1:  # what it has to send does not leave it
        with pytest.MonkeyPatch.context() as patch:
            from shardfn.collectives import Channel

            patch.setattr(Channel, "all_gather", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            step(state, _rows(1))
    state, _ = step(state, _rows(1))
    try:
        tree_leaves(state.params)[0].local.sum()
    except sf.RankError as error:
        raise RuntimeError(f"read: RankError {error}") from error


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"refresh='used'.: use 'update' or 'use'"):
        Pace(refresh="used")


@distributed(world=2)
def test_where_nothing_is_gathered_after_an_update_it_is_refused() -> None:
    for stage in (0, 3):
        with pytest.raises(ValueError, match=r"Pace\(refresh='use'\)\) has no effect"):
            _made("use", stage=stage).init(_params())


@distributed(world=2)
def test_a_captured_step_takes_a_state_that_is_under_way_and_leaves_none() -> None:
    eager, captured = _made("use"), _made("use", sf.jit(_loss, backend="graph"))
    plain = _made("update")
    state, wanted = eager.init(_params()), plain.init(_params())
    for turn in range(4):
        state, _ = (captured if turn % 2 else eager)(state, _rows(turn))
        assert bool(_under_way(state)) == (turn % 2 == 0)
        wanted, _ = plain(wanted, _rows(turn))
    assert _bits(state.params) == _bits(wanted.params)
