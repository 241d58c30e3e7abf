"""Covers step.adopt, optim.per_leaf and restore(keep=): leaves unfrozen in the middle, another optimizer on resume."""

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.core import tree_leaves, tree_map
from shardfn.testing import distributed

HEAD, ALL = {"a": False, "b": True, "c": True}, True


def params() -> Any:
    draw = torch.Generator().manual_seed(0)
    return {k: torch.randn(s, generator=draw) for k, s in {"a": (5, 6), "b": (5, 5), "c": (5,)}.items()}


def loss(p: Any, x: Tensor) -> Tensor:
    return (torch.tanh(x @ p["a"].T) @ p["b"].T + p["c"]).square().mean()


def batches() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(6, 6, generator=draw) for _ in range(5)]


def adam_by_hand(starts: dict[str, int], common: bool) -> Any:
    """Adam, in which each leaf is trained from a step on."""
    p, mu, nu = params(), tree_map(torch.zeros_like, params()), tree_map(torch.zeros_like, params())
    for t, x in enumerate(batches(), 1):
        seen = tree_map(lambda v: v.clone().requires_grad_(), p)
        grads = dict(zip(seen, torch.autograd.grad(loss(seen, x), list(seen.values())), strict=True))
        for k, start in starts.items():
            if t <= start:
                continue
            n = t if common else t - start
            mu[k], nu[k] = 0.9 * mu[k] + 0.1 * grads[k], 0.999 * nu[k] + 0.001 * grads[k] ** 2
            p[k] = p[k] - 0.05 * (mu[k] / (1 - 0.9**n)) / ((nu[k] / (1 - 0.999**n)).sqrt() + 1e-8)
    return p


RATE = optim.constant_schedule(0.05)
RULES: dict[str, Any] = {
    "common": lambda: optim.adam(0.05),
    "own": lambda: optim.per_leaf(optim.adam(0.05)),
    "own inside": lambda: optim.chain(optim.per_leaf(optim.scale_by_adam()), optim.scale_by_learning_rate(RATE)),
}


def train(step: Any, state: Any, some: list[Tensor]) -> Any:
    for x in some:
        state, _ = step(state, x[step.rows(6)])
    return state


def check(name: str, mesh: Any, first: Any, then: Any) -> None:
    want = adam_by_hand({"a": 2, "b": 0, "c": 0}, common=name == "common")
    make = lambda trainable, zero: sf.sharded_step(loss, RULES[name](), mesh=mesh, trainable=trainable, zero=zero)  # noqa: E731
    head, both = make(HEAD, first), make(ALL, then)
    state = train(head, head.init(params()), batches()[:2])
    assert torch.equal(state.params["a"].full_tensor(), params()["a"])
    new = both.adopt(state)
    with pytest.raises(sf.DonatedError):
        train(head, state, batches()[:1])
    assert int(new.step) == 2
    for k, x in train(both, new, batches()[2:]).params.items():
        torch.testing.assert_close(x.full_tensor(), want[k], rtol=2e-5, atol=2e-6)


@pytest.mark.day("common")
@pytest.mark.parametrize("name", ["common", "own"])
@distributed(world=2)
def test_leaves_are_unfrozen_in_the_middle(name: str) -> None:
    mesh = sf.make_mesh({"dp": 2})
    check(name, mesh, sf.Zero(stage=1, persist_elements=0), sf.Zero(stage=3, persist_elements=0))


@pytest.mark.nightly
@pytest.mark.parametrize("name", RULES)
@distributed(world=[1, 2, 3])
def test_leaves_are_unfrozen_at_every_stage(world: int, name: str) -> None:
    mesh = sf.make_mesh({"dp": world})
    for stage in range(4):
        zero = sf.Zero(stage=stage, persist_elements=0)
        check(name, mesh, zero, sf.Zero(stage=3 - stage, persist_elements=0))
        check(name, mesh, zero, sf.Zero(stage=stage, optimizer="host", persist_elements=0) if stage else zero)


@distributed(world=2)
def test_a_checkpoint_is_restored_with_more_leaves_or_another_optimizer(tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": 2})
    make = lambda tx, trainable: sf.sharded_step(loss, tx, mesh=mesh, trainable=trainable, zero=3)  # noqa: E731
    head, both, other = (
        make(optim.adam(0.05), HEAD),
        make(optim.adam(0.05), ALL),
        make(optim.sgd(0.1, momentum=0.9), ALL),
    )
    state = train(head, head.init(params()), batches()[:2])
    sf.checkpoint.save(tmp_path, state)
    with pytest.raises(ValueError, match="opt_state"):
        sf.checkpoint.restore(tmp_path, other.init(params()))
    with pytest.raises(ValueError, match="keep='optimizer' begins no path of the tree"):
        sf.checkpoint.restore(tmp_path, other.init(params()), keep="optimizer")
    new = sf.checkpoint.restore(tmp_path, other.init(params()), keep="opt_state").tree
    assert int(new.step) == 2 and not any(x.full_tensor().any() for x in tree_leaves(new.opt_state))
    for k, x in state.params.items():
        assert torch.equal(new.params[k].full_tensor(), x.full_tensor())
    more = sf.checkpoint.restore(tmp_path, both.init(params()), partial=True).tree
    want = adam_by_hand({"a": 2, "b": 0, "c": 0}, common=True)
    for k, x in train(both, more, batches()[2:]).params.items():
        torch.testing.assert_close(x.full_tensor(), want[k], rtol=2e-5, atol=2e-6)
    one, two = train(other, new, batches()[2:]), train(other, other.adopt(state, opt_state="new"), batches()[2:])
    for k, x in one.params.items():
        assert torch.equal(x.full_tensor(), two.params[k].full_tensor())


def test_freezing_again_drops_the_state() -> None:
    both, head = (sf.sharded_step(loss, optim.adam(0.05), trainable=t) for t in (ALL, HEAD))
    state = train(both, both.init(params()), batches()[:1])
    mu = state.opt_state[0].mu["b"].full_tensor().clone()
    state = head.adopt(state)
    assert state.opt_state[0].mu["a"] is None and torch.equal(state.opt_state[0].mu["b"].full_tensor(), mu)
    train(head, state, batches()[1:])


def test_masters_and_averages_of_new_leaves_begin_at_the_parameters() -> None:
    f = sf.mixed_precision(lambda p, x: loss(p, x).float(), sf.Policy.bf16())
    head, both = (sf.sharded_step(f, optim.average_params(optim.sgd(1e-3)), trainable=t) for t in (HEAD, ALL))
    state = train(head, head.init(params()), batches()[:2])
    old = {k: x.full_tensor().clone() for k, x in sf.master_params(state).items()}
    state = both.adopt(state)
    assert all(torch.equal(x.full_tensor(), old[k]) for k, x in sf.master_params(state).items())
    assert torch.equal(state.opt_state.inner.average["a"].full_tensor(), old["a"].float())


def test_another_optimizer_is_refused_unless_it_begins_anew() -> None:
    first, clipped = (sf.sharded_step(loss, tx) for tx in (optim.adam(0.05), optim.lamb(0.05)))
    state = train(first, first.init(params()), batches()[:1])
    with pytest.raises(ValueError, match=r"opt_state='new'\):[^$]*opt_state\[0\]\.count"):
        clipped.adopt(state)
    with pytest.raises(ValueError, match="it is 'keep' or 'new'"):
        clipped.adopt(state, opt_state="fresh")
    state = clipped.adopt(state, opt_state="new")
    assert int(state.step) == 1
    train(clipped, state, batches()[1:])


def test_lists_of_parameters_are_unfrozen() -> None:
    f = lambda p, x: (x @ p[0].T @ p[1].T).square().mean()  # noqa: E731
    head, both = (sf.sharded_step(f, optim.adam(0.1), trainable=t) for t in ([False, True], True))
    state, _ = head(head.init([torch.ones(3, 6), torch.ones(2, 3)]), batches()[0])
    state = both.adopt(state)
    assert not state.opt_state[0].mu[0].full_tensor().any() and state.opt_state[0].mu[1].full_tensor().any()
    both(state, batches()[1])
