"""Covers the mistakes that `gradients` and `update` refuse, on all ranks, before anything is written."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.testing import distributed


def _loss(params: Any, x: Tensor) -> Tensor:
    return ((x @ params["w"]).sum(1) * params["b"] + params["frozen"]).square().mean()


def _params() -> dict[str, Tensor]:
    return {"w": torch.ones(4, 2), "b": torch.ones(1), "frozen": torch.ones(1)}


MASK = {"w": True, "b": True, "frozen": False}


def _step(**options: Any) -> Any:
    return sf.sharded_step(_loss, optim.adamw(0.1), **{"trainable": MASK, **options})


def _one() -> tuple[Any, Any, Any]:
    step = _step()
    state = step.init(_params())
    return step, state, step.gradients(state, torch.ones(2, 4))[0]


def test_a_frozen_leaf_becomes_a_none() -> None:
    _, _, grads = _one()
    assert grads["frozen"] is None
    assert grads["w"].shape == (4, 2)


def test_gradients_read_the_state_alone() -> None:
    step, state, grads = _one()
    again, metrics = step.gradients(state, torch.ones(2, 4))
    assert torch.equal(again["w"].full_tensor(), grads["w"].full_tensor())
    assert set(metrics) == {"loss", "grad_norm", "finite"}
    assert int(state.step) == 0
    state, metrics = step.update(state, grads)
    assert set(metrics) == {"grad_norm", "finite", "skipped"}
    assert int(state.step) == 1


def test_missing_and_additional_leaves() -> None:
    step, state, grads = _one()
    with pytest.raises(ValueError, match=r"grads\['b'\] is missing; pass zeros"):
        step.update(state, grads | {"b": None})
    with pytest.raises(ValueError, match=r"grads\['frozen'\] is of a leaf that the step does not train; leave None"):
        step.update(state, grads | {"frozen": grads["b"]})
    with pytest.raises(ValueError, match=r"grads\['other'\] is not a leaf of the parameters"):
        step.update(state, grads | {"other": grads["b"]})
    step.update(state, grads)


def test_the_pair_that_gradients_returns() -> None:
    step, state, _ = _one()
    with pytest.raises(TypeError, match=r"Unpack it: grads, metrics = step\.gradients"):
        step.update(state, step.gradients(state, torch.ones(2, 4)))


def test_plain_tensors() -> None:
    step, state, grads = _one()
    with pytest.raises(TypeError, match=r"with_block\(block\):\n.*grads\['w'\] is a Tensor"):
        step.update(state, grads | {"w": grads["w"].full_tensor()})


def test_other_shapes_and_dtypes() -> None:
    step, state, grads = _one()
    with pytest.raises(ValueError, match=r"grads\['w'\] is torch.float64; here it is torch.float32"):
        step.update(state, grads | {"w": grads["w"].with_block(grads["w"].local.double())})
    with pytest.raises(ValueError, match=r"grads\['w'\] has a block of shape \(4,\) on rank 0; here it is \(4, 2\)"):
        step.update(state, grads | {"w": grads["w"].with_block(torch.ones(4))})
    with pytest.raises(ValueError, match=r"grads\['w'\] has shape \(1,\); here it is \(4, 2\)"):
        step.update(state, grads | {"w": grads["b"]})


@pytest.mark.parametrize("donate", [True, False])
def test_gradients_that_an_update_has_consumed(donate: bool) -> None:
    step = _step(donate=donate)
    state = step.init(_params())
    grads, _ = step.gradients(state, torch.ones(2, 4))
    new, _ = step.update(state, grads)
    if donate:
        with pytest.raises(sf.DonatedError, match=r"consumed by an update \(grads\['b'\], grads\['w'\]\)"):
            step.update(new, grads)
        with pytest.raises(sf.DonatedError, match="this state was already consumed"):
            step.gradients(state, torch.ones(2, 4))
    else:
        other, _ = step.update(state, grads)
        assert torch.equal(other.params["w"].full_tensor(), new.params["w"].full_tensor())


def test_a_skipped_update_consumes_the_gradients_and_keeps_the_state() -> None:
    step = _step(skip_nonfinite=True)
    state = step.init(_params())
    grads, _ = step.gradients(state, torch.full((2, 4), float("nan")))
    same, metrics = step.update(state, grads)
    assert bool(metrics["skipped"])
    assert not same.params["w"].donated
    with pytest.raises(sf.DonatedError, match="these gradients"):
        step.update(same, grads)


def test_the_loss_that_was_not_finite_is_passed_on() -> None:
    step = _step(skip_nonfinite=True)
    state = step.init(_params())
    grads, _ = step.gradients(state, torch.ones(2, 4))
    same, metrics = step.update(state, grads, finite=torch.tensor(False))
    assert bool(metrics["skipped"])
    assert not bool(metrics["finite"])
    assert int(same.step) == 0


def test_an_unexpected_model_state() -> None:
    step, state, grads = _one()
    with pytest.raises(ValueError, match="the state has a model state, but the step was built without"):
        step.update(state, grads, model_state=grads["b"])


@distributed(world=2)
def test_gradients_of_another_layout_or_mesh() -> None:
    mesh = sf.make_mesh({"dp": 2})
    made = {stage: _step(mesh=mesh, zero=sf.Zero(stage=stage, persist_elements=0)) for stage in (0, 2)}
    states = {stage: step.init(_params()) for stage, step in made.items()}
    grads, _ = made[0].gradients(states[0], torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"grads\['w'\] is cut as P\(\); here it is P\('dp'\): sf.reshard"):
        made[2].update(states[2], grads)
    alone = _step(mesh=sf.make_mesh({"dp": 1}, ranks=[mesh.rank]))
    other, _ = alone.gradients(alone.init(_params()), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"grads\['w'\] is on .*; here the mesh is"):
        made[0].update(states[0], other)
    made[0].update(states[0], grads)


@distributed(world=2)
def test_a_mistake_of_one_rank_is_an_error_on_both() -> None:
    mesh = sf.make_mesh({"dp": 2})
    step = _step(mesh=mesh, zero=2)
    state = step.init(_params())
    grads, _ = step.gradients(state, torch.ones(2, 4))
    bad = grads | {"b": None} if mesh.rank else grads
    with pytest.raises((ValueError, sf.RankError), match=r"grads\['b'\] is missing"):
        step.update(state, bad)
    with pytest.raises(sf.RankError, match="finite: False"):
        step.update(state, grads, finite=mesh.rank == 0)
    with pytest.raises(sf.RankError, match=r"the gradients of step 0[\s\S]*the update of step 0|the update of step 0"):
        if mesh.rank:
            step.gradients(state, torch.ones(2, 4))
        else:
            step.update(state, grads)
    state, _ = step.update(state, grads)
    assert int(state.step) == 1


@distributed(world=2)
def test_gradients_that_are_changed_on_one_rank_alone() -> None:
    mesh = sf.make_mesh({"dp": 2})
    step = _step(mesh=mesh, zero=0, skip_nonfinite=True)
    state = step.init(_params())
    grads, _ = step.gradients(state, torch.ones(2, 4))
    if mesh.rank == 1:
        grads["b"] = grads["b"].with_block(grads["b"].local * float("inf"))
    with pytest.raises(sf.RankError, match=r"ranks \[1\] find gradients that are not finite"):
        step.update(state, grads)


@distributed(world=2)
def test_an_optimizer_that_averages_by_itself() -> None:
    mesh = sf.make_mesh({"dp": 2})
    rule = optim.onebit_adam(1e-2, freeze_step=1)
    step = sf.sharded_step(lambda w, x: (x @ w).square().mean(), rule, mesh=mesh)
    state = step.init(torch.ones(4))
    grads, metrics = step.gradients(state, torch.ones(2, 4))
    state, _ = step.update(state, grads, finite=metrics["finite"])
    while True:  # until its warm-up has ended
        try:
            grads, _ = step.gradients(state, torch.ones(2, 4))
        except ValueError as error:
            assert "the optimizer averages gradients over ('dp',) itself in this step" in str(error)
            break
        state, _ = step.update(state, grads)
        assert int(state.step) < 5
    state, _ = step(state, torch.ones(2, 4))


@pytest.mark.day("eager")
@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: sf.jit(loss, backend="graph")], ids=["eager", "jit"])
def test_a_gradient_that_is_the_batch_is_not_written_over(wrap: Any) -> None:
    """The gradient of a dot product is its other operand, and two leaves may have one gradient."""
    step = sf.sharded_step(
        wrap(lambda p, x: ((p["a"] + p["b"]) * x).sum() + p["c"].sum()), optim.sgd(0.1, momentum=0.9)
    )
    state = step.init({name: torch.ones(3) for name in "abc"})
    x = torch.tensor([1.0, 2.0, 3.0])
    for _ in range(3):
        grads, _ = step.gradients(state, x)
        for g in grads.values():
            g.local.mul_(2)
        assert torch.equal(grads["a"].local, 2 * x)
        assert torch.equal(grads["b"].local, 2 * x)
        assert torch.equal(grads["c"].local, torch.full((3,), 2.0))
        state, _ = step.update(state, grads)
    assert torch.equal(x, torch.tensor([1.0, 2.0, 3.0]))


def test_norms_of_leaves() -> None:
    _, _, grads = _one()
    norms = sf.leaf_norms(grads)
    assert norms["frozen"] is None
    torch.testing.assert_close(norms["w"], grads["w"].full_tensor().norm())
    with pytest.raises(TypeError, match=r"tree\['a'\] is a Tensor"):
        sf.leaf_norms({"a": torch.ones(2)})
