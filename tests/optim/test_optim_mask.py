"""Covers rules for some leaves, chains, and the identity."""

import math
from typing import Any

import pytest
import torch

from shardfn import optim
from shardfn.core import tree_leaves, tree_map


def make_params() -> Any:
    return {"w": torch.ones(2, 2), "norm": {"scale": torch.ones(2), "bias": torch.ones(2)}, "frozen": None}


MASK = {"w": True, "norm": False, "frozen": True}


def step(tx: optim.GradientTransformation, grads: Any, params: Any, in_place: bool) -> tuple[Any, Any]:
    state = tx.init(params)
    if in_place:
        return optim.inplace(tx)(grads, state, params)
    updates, state = tx.update(grads, state, params)
    return optim.apply_updates(params, updates), state


both = pytest.mark.parametrize("in_place", [False, True])


@both
@pytest.mark.parametrize("mask", [MASK, lambda p: MASK, lambda p: tree_map(lambda x: x.ndim > 1, p)])
def test_decay_where_the_mask_is_true(mask: Any, in_place: bool) -> None:
    params = make_params()
    zeros = tree_map(torch.zeros_like, params)
    for tx in (optim.adamw(0.1, weight_decay=0.5, mask=mask), optim.lion(0.1, weight_decay=0.5, mask=mask)):
        new, _ = step(tx, zeros, make_params(), in_place)
        torch.testing.assert_close(new["w"], torch.full((2, 2), 0.95))
        assert torch.equal(new["norm"]["scale"], torch.ones(2)) and torch.equal(new["norm"]["bias"], torch.ones(2))


@both
def test_masked_passes_the_rest_unchanged(in_place: bool) -> None:
    tx = optim.masked(optim.sgd(0.5), MASK)
    new, _ = step(tx, make_params(), make_params(), in_place)
    assert torch.equal(new["w"], torch.full((2, 2), 0.5))
    assert torch.equal(new["norm"]["bias"], torch.full((2,), 2.0))


def test_masked_keeps_no_state_for_the_rest() -> None:
    state = optim.masked(optim.scale_by_adam(), MASK).init(make_params())
    assert sorted(tuple(x.shape) for x in tree_leaves(state)) == [(), (2, 2), (2, 2)]


@both
def test_freeze_holds_still_even_against_nan(in_place: bool) -> None:
    grads = make_params()
    grads["w"] = torch.full((2, 2), math.nan)
    tx = optim.chain(optim.adamw(0.1), optim.freeze(MASK))
    new, _ = step(tx, grads, make_params(), in_place)
    assert torch.equal(new["w"], torch.ones(2, 2))
    assert (new["norm"]["bias"] < 1).all()


@both
def test_multi_transform_runs_each_rule_on_its_leaves(in_place: bool) -> None:
    rules = {"fast": optim.sgd(0.5, momentum=0.9), "slow": optim.sgd(0.1), "off": optim.set_to_zero()}
    labels = {"w": "fast", "norm": {"scale": "slow", "bias": "off"}, "frozen": "off"}
    for form in (labels, lambda p: labels):
        new, state = step(optim.multi_transform(rules, form), make_params(), make_params(), in_place)
        assert [float(x.flatten()[0]) for x in (new["w"], new["norm"]["scale"], new["norm"]["bias"])] == pytest.approx(
            [0.5, 0.9, 1.0]
        )
        assert [tuple(x.shape) for x in tree_leaves(state)] == [(2, 2)]


def test_labels_without_a_rule_are_listed() -> None:
    tx = optim.multi_transform({"fast": optim.sgd(0.1)}, {"w": "fsat", "norm": "fast", "frozen": "fast"})
    with pytest.raises(ValueError, match=r"params\['w'\] is labelled 'fsat'. Did you mean 'fast'"):
        tx.init(make_params())


@pytest.mark.parametrize(
    "make",
    [
        lambda m: optim.adamw(1.0, mask=m),
        pytest.param(lambda m: optim.lamb(1.0, mask=m), marks=pytest.mark.nightly),
        pytest.param(lambda m: optim.masked(optim.sgd(1.0), m), marks=pytest.mark.nightly),
    ],
)
def test_a_mask_of_another_tree_is_refused(make: Any) -> None:
    params = make_params()
    with pytest.raises(ValueError, match=r"mask\['nrom'\] has no leaf in params. Did you mean 'norm'"):
        step(make({"w": True, "nrom": False}), params, params, False)
    with pytest.raises(ValueError, match=r"mask\['w'\] is 1, a int, which is not a leaf of mask"):
        step(make({"w": 1, "norm": False}), params, params, False)


def test_a_callable_mask_follows_shapes() -> None:
    tx = optim.adamw(0.1, weight_decay=1.0, mask=lambda p: tree_map(lambda x: x.ndim > 1, p))
    for shape, want in (((2, 2), 0.9), ((4,), 1.0), ((2, 2), 0.9)):
        new, _ = step(tx, [torch.zeros(shape)], [torch.ones(shape)], True)
        torch.testing.assert_close(new[0], torch.full(shape, want))


@both
def test_chain_is_a_composition(in_place: bool) -> None:
    grads = [torch.tensor([4.0, -0.5])]
    tx = optim.chain(optim.clip(1.0), optim.identity(), optim.chain(optim.scale_by_learning_rate(0.5)))
    new, state = step(tx, grads, [torch.zeros(2)], in_place)
    assert torch.equal(new[0], torch.tensor([-0.5, 0.25]))
    assert state == (optim.EmptyState(), optim.EmptyState(), (optim.EmptyState(),))


@both
def test_the_empty_chain_is_the_identity(in_place: bool) -> None:
    new, _ = step(optim.chain(), [torch.ones(2)], [torch.ones(2)], in_place)
    assert torch.equal(new[0], torch.full((2,), 2.0))


def test_chain_refuses_the_state_of_another_chain() -> None:
    tx = optim.chain(optim.clip(1.0), optim.sgd(0.1))
    with pytest.raises(ValueError, match="expected a tuple of 2 states, got a tuple of 3"):
        tx.update([torch.ones(1)], (optim.EmptyState(),) * 3, [torch.ones(1)])
    with pytest.raises(ValueError, match="got a EmptyState"):
        optim.inplace(tx)([torch.ones(1)], optim.EmptyState(), [torch.ones(1)])


def test_apply_updates_keeps_dtypes_and_refuses_other_trees() -> None:
    new = optim.apply_updates([torch.ones(2, dtype=torch.bfloat16)], [torch.ones(2)])
    assert new[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"params\[0\] has no leaf in updates"):
        optim.apply_updates([torch.ones(2)], [None])
    with pytest.raises(ValueError, match=r"updates\[0\] has shape \(3,\)"):
        optim.apply_updates([torch.ones(2)], [torch.ones(3)])
