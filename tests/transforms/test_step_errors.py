"""Covers bad input to a step on one device: every failing leaf is named, with both values and the remedy."""

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.core import DonatedError


def _loss(params: dict, batch: dict) -> Tensor:
    return ((batch["x"] @ params["w"] + params["b"]) ** 2).mean()


def _params() -> dict:
    return {"w": torch.ones(3), "b": torch.zeros(())}


BATCH = {"x": torch.ones(4, 3)}


def _step(loss=_loss, **options):
    return sf.sharded_step(loss, sf.optim.adamw(0.1), **options)


def test_unknown_axis_is_named_with_the_near_miss() -> None:
    with pytest.raises(ValueError, match=r"specs\['w'\] = P\('data'\): axis 'data' is not in the mesh"):
        _step(specs={"w": sf.P("data"), "b": sf.P()})
    with pytest.raises(ValueError, match=r"axis 'dpp' is not in the mesh.*Did you mean 'dp'"):
        _step(mesh=sf.make_mesh({"dp": 1}), batch=sf.P("dpp"))
    with pytest.raises(ValueError, match="axis 'fsdp' is not in the mesh"):
        _step(zero=sf.Zero(stage=3, axis="fsdp"))


def test_spec_longer_than_the_leaf() -> None:
    with pytest.raises(ValueError, match=r"params\['b'\] of shape \(\) has spec P\('tp'\)"):
        _step(specs={"w": sf.P(), "b": sf.P("tp")}).init(_params())


def test_leaf_without_spec_and_spec_without_leaf_are_both_listed() -> None:
    with pytest.raises(ValueError) as error:
        _step(specs={"w": sf.P(), "bb": sf.P()}).init(_params())
    text = str(error.value)
    assert "params['b'] has no entry in specs." in text and "mean 'bb'" not in text
    assert "specs['bb'] has no leaf in params. Did you mean 'b'?" in text


def test_none_and_strings_are_no_specs() -> None:
    with pytest.raises(ValueError, match=r"Instead of `None`, did you mean `P\(\)`"):
        _step(specs={"w": None, "b": sf.P()}).init(_params())
    with pytest.raises(ValueError, match=r"specs\['w'\] is 'dp', not a P. Did you mean P\('dp'\)"):
        _step(specs={"w": "dp", "b": sf.P()})


def test_params_must_be_tensors() -> None:
    with pytest.raises(TypeError, match=r"params\['b'\] is a float"):
        _step().init({"w": torch.ones(3), "b": 0.0})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": [1.0, 2.0]}, r"batch\['x'\]\[0\] is a float"),
        pytest.param({}, "it is empty", marks=pytest.mark.nightly),
        pytest.param(
            {"x": torch.ones(())}, r"batch\['x'\] of shape \(\) has spec P\('dp'\)", marks=pytest.mark.nightly
        ),
    ],
)
def test_batch_that_does_not_fit(batch: dict, message: str) -> None:
    step = _step()
    state = step.init(_params())
    with pytest.raises((TypeError, ValueError), match=message):
        step(state, batch)


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (lambda p, b: b["x"] @ p["w"], {}, r"must be a 0-d tensor, got shape \(4,\)"),
        pytest.param(lambda p, b: (p["w"].sum(), {}), {}, "did you mean has_aux=True", marks=pytest.mark.nightly),
        pytest.param(
            lambda p, b: 1.0, {}, "must return a 0-d tensor or a WeightedMean, got float", marks=pytest.mark.nightly
        ),
        (lambda p, b: p["w"].sum(), {"has_aux": True}, r"must return \(loss, aux\)"),
        pytest.param(
            lambda p, b: (p["w"].sum(), 3), {"has_aux": True}, "aux must be a dict", marks=pytest.mark.nightly
        ),
        pytest.param(
            lambda p, b: (p["w"].sum(), {"x": b["x"]}),
            {"has_aux": True},
            r"aux\['x'\] must be 0-d, got shape \(4, 3\)",
            marks=pytest.mark.nightly,
        ),
        (lambda p, b: (p["w"].sum(), {"loss": 1.0}), {"has_aux": True}, r"aux\['loss'\] has the name of a metric"),
    ],
)
def test_loss_that_is_none(loss, options: dict, message: str) -> None:
    step = _step(loss, **options)
    state = step.init(_params())
    with pytest.raises((TypeError, ValueError), match=message):
        step(state, BATCH)
    assert not state.params["w"].donated


def test_donated_state_is_refused_and_its_leaves_too() -> None:
    step = _step()
    old = step.init(_params())
    step(old, BATCH)
    with pytest.raises(DonatedError, match=r"state.params\['b'\], state.params\['w'\]"):
        step(old, BATCH)
    with pytest.raises(DonatedError, match=r"leaf of shape \(3,\) was donated"):
        old.params["w"].full_tensor()


def test_without_donation_the_old_state_lives() -> None:
    step = _step(donate=False)
    old = step.init(_params())
    new, _ = step(old, BATCH)
    again, _ = step(old, BATCH)
    assert torch.equal(old.params["w"].local, torch.ones(3))
    assert torch.equal(new.params["w"].local, again.params["w"].local)
    assert not torch.equal(new.params["w"].local, old.params["w"].local)


def test_the_callers_tensors_are_never_written() -> None:
    step, params = _step(), _params()
    state = step.init(params)
    step(state, BATCH)
    assert torch.equal(params["w"], torch.ones(3))


def test_nonfinite_loss_is_told_and_skipped_bit_identically() -> None:
    bad = {"x": torch.full((4, 3), float("nan"))}
    step = _step()
    _, metrics = step(step.init(_params()), bad)
    assert torch.isnan(metrics["loss"]) and not metrics["finite"] and not metrics["skipped"]
    step = _step(skip_nonfinite=True)
    state, _ = step(step.init(_params()), BATCH)
    before = [x.clone() for x in sf.core.tree_leaves(sf.unshard(tuple(state)))]
    state, metrics = step(state, bad)
    assert metrics["skipped"] and not metrics["finite"]
    assert all(torch.equal(a, b) for a, b in zip(before, sf.core.tree_leaves(sf.unshard(tuple(state))), strict=True))
    state, metrics = step(state, BATCH)
    assert metrics["finite"] and not metrics["skipped"]


def test_state_of_another_tree_or_kind() -> None:
    step = _step()
    state = step.init(_params())
    other = sf.sharded_step(lambda p, b: p["v"].sum(), sf.optim.adamw(0.1)).init({"v": torch.ones(2)})
    with pytest.raises(ValueError, match=r"\['v'\]"):
        step(state._replace(opt_state=other.opt_state), BATCH)
    with pytest.raises(TypeError, match=r"params\['w'\] is a Tensor"):
        step(state._replace(params=_params()), BATCH)


def test_transforms_in_an_order_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match=r"use accumulate\(remat\(f\), n\)"):
        sf.remat(sf.accumulate(_loss, 2))
    with pytest.raises(ValueError, match=r"accumulate\(3\) cuts the batch unevenly.*batch\['x'\] has 2 rows"):
        step = _step(sf.accumulate(_loss, 3))
        step(step.init(_params()), BATCH)
    with pytest.raises(ValueError, match="positive number of microbatches, got 0"):
        sf.accumulate(_loss, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"stage": 4},
        pytest.param({"accumulate": "eech"}, marks=pytest.mark.nightly),
        pytest.param({"prefetch_bytes": -1}, marks=pytest.mark.nightly),
    ],
)
def test_zero_refuses_bad_fields(fields: dict) -> None:
    with pytest.raises(ValueError, match=str(next(iter(fields)))):
        sf.Zero.flat(**fields)


def test_specs_refuse_an_axis_used_twice() -> None:
    with pytest.raises(ValueError, match="axis 'dp' twice"):
        sf.P("dp", "dp")
    with pytest.raises(TypeError, match="P entry 3"):
        sf.P(3)
