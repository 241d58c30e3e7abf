"""Covers writes to parameters inside a loss: each is named, in every memory of its leaf, and no message is false."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import assert_same, distributed, on_mesh, one_device

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
Write = Callable[[Tensor], object]


def _detached(w: Tensor) -> None:
    w.detach().mul_(0.5)


def _in_no_grad(w: Tensor) -> None:
    with torch.no_grad():
        w[0].mul_(0.5)


def _data(w: Tensor) -> None:
    w.data.add_(1)


def _in_backward(w: Tensor) -> None:
    w.register_hook(lambda g: w.detach().mul_(0.5) * 0 + g)


COUNTED: dict[str, Write] = {"detach": _detached, "no_grad": _in_no_grad}
WRITES: dict[str, Write] = COUNTED | {"data": _data}


def _params() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {k: torch.randn(6, 6, generator=draw) for k in ("a", "b")}


def _mean(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (torch.tanh(x @ params["a"]) @ params["b"]).square().mean()


def _loss_that(write: Write) -> Callable[..., Tensor]:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        write(params["a"])
        return _mean(params, x)

    return loss


def _to_a_clone(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """The message's remedy; `.data` can be read."""
    a = params["a"].data.clone()
    a.mul_(0.5)
    return _mean(params, x) + a.sum()


def _said(step: Any, x: Tensor) -> tuple[str, bool]:
    """The message of a step's error, and whether the state is unchanged."""
    state = step.init(_params())
    try:
        step(state, x)
    except (ValueError, TypeError, sf.RankError) as error:
        return str(error), torch.equal(state.params["a"].full_tensor(), _params()["a"])
    return "", True


def _check(step: Any, x: Tensor, how: Any) -> None:
    said, same = _said(step, x)
    assert "params['a'] is written to inside" in said and "params['b']" not in said, (how, said)
    assert "clone()" in said, (how, said)
    assert same == ("The state passed in has changed" not in said), (how, said)
    assert not same or "is unchanged" in said or "(by " in said or "through a view" in said, (how, said)


@pytest.mark.parametrize("donate", [True, False])
def test_a_write_to_a_leaf_that_is_there_is_named(donate: bool) -> None:
    for name, write in {**WRITES, "numpy": lambda w: w.detach().numpy().fill(1), "backward": _in_backward}.items():
        step = sf.sharded_step(_loss_that(write), sf.optim.sgd(0.1), donate=donate)
        _check(step, X, name)
        assert "has changed with it" in _said(step, X)[0]


def test_functions_that_are_applied_do_not_write_either() -> None:
    step = sf.sharded_step(_mean, sf.optim.sgd(0.1))
    state = step.init(_params())
    with pytest.raises(ValueError, match=r"params\['a'\] is written to inside the function"):
        step.apply(lambda p: _detached(p["a"]), state)


@pytest.mark.nightly
@distributed(world=2)
def test_writes_are_named_wherever_a_leaf_lives(tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": 2})
    kinds: dict[str, Any] = {"params": "disk", "optimizer": "disk"}
    places = {
        "whole": sf.Zero(stage=2),
        "small": sf.Zero(stage=3, persist_elements=100),
        "gathered": sf.Zero(stage=3, persist_elements=0),
        "far ahead": sf.Zero(
            stage=3, persist_elements=0, travel=sf.Travel(bucket_bytes=0), pace=sf.Pace(prefetch_bytes=0)
        ),
        "host": sf.Zero(stage=3, persist_elements=0, params="host"),
        "disk": sf.Zero.flat(stage=3, persist_elements=0, directory=str(tmp_path / "a"), **kinds),
    }
    for place, zero in places.items():
        for name, write in WRITES.items():
            step = sf.sharded_step(_loss_that(write), sf.optim.sgd(0.1), mesh=mesh, zero=zero)
            if place == "disk" and name != "data":
                continue  # one state a directory
            _check(step, X.chunk(2)[mesh.rank], (place, name))
            step.close()
    loss = sf.mixed_precision(_loss_that(_detached), sf.Policy.bf16())
    _check(sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh), X.chunk(2)[mesh.rank], "a cast")


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 3])
@distributed(world=2)
def test_a_captured_write_is_named_with_its_line(stage: int) -> None:
    mesh = sf.make_mesh({"dp": 2})
    for name, write in WRITES.items():
        loss = sf.jit(_loss_that(write), backend="graph")
        step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage=stage, persist_elements=0))
        said, same = _said(step, X.chunk(2)[mesh.rank])
        assert "params['a'] is written to inside the loss" in said and same, (name, said)
        assert "test_writes.py:" in said or "through a view" in said or "(by " in said, (name, said)


@pytest.mark.day("0")
@pytest.mark.parametrize("stage", [0, 3])
@distributed(world=2)
def test_a_write_to_a_stack_is_named(stage: int) -> None:
    mesh, zero = sf.make_mesh({"dp": 2}), sf.Zero(stage=stage, persist_elements=0)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        w.detach()[1].mul_(0.5)
        return sf.scan(lambda h, w: (torch.tanh(h @ w), None), x, w)[0].square().mean()

    specs = sf.Sharding(sf.P(), stacked=True)
    step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, zero=zero, specs=specs)
    with pytest.raises(ValueError, match=r"params is written to inside the loss"):
        step(step.init(torch.randn(3, 6, 6) / 3), X.chunk(2)[mesh.rank])


@distributed(world=2)
def test_a_clone_may_be_written_to_and_data_read() -> None:
    mesh = sf.make_mesh({"dp": 2})
    want = one_device(_to_a_clone, sf.optim.sgd(0.1), _params(), [X, X])
    for stage in (0, 3):
        for wrap in (lambda f: f, lambda f: sf.jit(f, backend="graph")):
            zero = sf.Zero(stage=stage, persist_elements=0)
            assert_same(on_mesh(wrap(_to_a_clone), sf.optim.sgd(0.1), _params(), [X, X], mesh=mesh, zero=zero), want)


@pytest.mark.day("False")
@pytest.mark.parametrize("graph", [False, True])
def test_other_memory_for_a_leaf_is_named(graph: bool) -> None:
    loss = _loss_that(lambda w: setattr(w, "data", w.data * 0.5))
    step = sf.sharded_step(sf.jit(loss, backend="graph") if graph else loss, sf.optim.sgd(0.1))
    _check(step, X, "data =")


def _augmented(w: Tensor) -> None:
    w *= 2


IN_PLACE = [lambda w: w.mul_(2), _augmented, lambda w: w.__setitem__(0, 1.0), lambda w: torch.relu_(w)]


@pytest.mark.nightly
@distributed(world=[1, 2])
def test_writes_in_place_are_one_error_at_all_stages(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    for stage in (0, 3):
        for write in IN_PLACE:

            def loss(params: Any, x: Tensor, write: Any = write) -> Tensor:
                write(params["weight"])
                return (params["weight"] * x + params["bias"]).sum()

            step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage=stage, persist_elements=0))
            state = step.init({"weight": torch.ones(4), "bias": torch.zeros(4)})
            with pytest.raises(ValueError, match=r"inside the loss.*write to a clone") as told:
                step(state, torch.ones(4))
            assert "params['weight']" in str(told.value)
            assert torch.equal(state.params["weight"].full_tensor(), torch.ones(4))
