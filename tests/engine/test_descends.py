"""Covers optimizers that would add gradients: `init` names their leaves, and every remedy trains."""

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import optim
from shardfn.testing import distributed

ONLY = {"w": True, "b": False, "n": {"s": False}}
REST = {"w": False, "b": True, "n": {"s": True}}
LABELS = {"w": "a", "b": "b", "n": {"s": "a"}}


def _params() -> Any:
    return {"w": torch.ones(3, 2), "b": torch.ones(2), "n": {"s": torch.ones(())}}


def _loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x @ p["w"] + p["b"]) * p["n"]["s"]).square().mean()


def _by_dims(params: Any) -> Any:
    return {"w": params["w"].ndim == 2, "b": params["b"].ndim == 2, "n": False}


WRONG = {
    "masked": lambda: optim.masked(optim.adamw(0.1), ONLY),
    "by a function": lambda: optim.masked(optim.adamw(0.1), _by_dims),
    "behind a clip": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.masked(optim.adamw(0.1), ONLY)),
    "freeze": lambda: optim.freeze(ONLY),
    "masters": lambda: optim.master_weights(optim.masked(optim.sgd(0.1), ONLY)),
    "delayed": lambda: optim.delayed(optim.masked(optim.sgd(0.1), ONLY)),
}
RIGHT = {
    "frozen": (lambda: optim.chain(optim.masked(optim.adamw(0.1), ONLY), optim.freeze(REST)), {}),
    "not trainable": (lambda: optim.masked(optim.adamw(0.1), ONLY), {"trainable": ONLY}),
    "two rules": (lambda: optim.multi_transform({"a": optim.adamw(0.1), "b": optim.sgd(0.1)}, LABELS), {}),
    "one rate": (
        lambda: optim.chain(optim.masked(optim.scale_by_adam(), ONLY), optim.scale_by_learning_rate(0.1)),
        {},
    ),
}


def _step(optimizer: Any, loss: Any = _loss, **options: Any) -> Any:
    zero = sf.Zero(stage=3, persist_elements=0)
    return sf.sharded_step(loss, optimizer, mesh=sf.make_mesh({"dp": -1}), zero=zero, **options)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(WRONG)]
)
@distributed(world=2)
def test_leaves_whose_gradients_would_be_added_are_listed_on_all_ranks(name: str) -> None:
    with pytest.raises(ValueError, match=r"which raises the loss: masked.*trainable=mask.*multi_transform") as caught:
        _step(WRONG[name]()).init(_params())
    assert str(caught.value).splitlines()[1:] == ["  - params['b']: (2,)", "  - params['n']['s']: ()"]


@distributed(world=2)
def test_a_label_whose_rule_has_no_rate_and_a_policy_with_masters() -> None:
    rules = {"a": optim.sgd(0.1), "b": optim.clip(1.0)}
    with pytest.raises(ValueError, match=r"The leaves:\n  - params\['b'\]: \(2,\)$"):
        _step(optim.multi_transform(rules, LABELS)).init(_params())
    with pytest.raises(ValueError, match=r"The leaves:\n  - params\['b'\]: \(2,\)$"):
        loss = sf.mixed_precision(_loss, sf.Policy.bf16())
        _step(optim.multi_transform(rules, LABELS), loss).init(_params())


@pytest.mark.day("one rate")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(RIGHT)]
)
@distributed(world=2)
def test_the_remedies_of_the_message_train(name: str) -> None:
    make, options = RIGHT[name]
    step = _step(make(), **options)
    state, losses = step.init(_params()), []
    for _ in range(5):
        state, metrics = step(state, torch.ones(2, 3))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    kept = torch.equal(sf.unshard(state.params)["b"], torch.ones(2))
    assert kept == (name in ("frozen", "not trainable"))
