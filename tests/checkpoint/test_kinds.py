"""Covers shardfn/checkpoint/_restore.py: states of an optimizer that continue where it has other rules around them."""

import logging
import pathlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.core import named_leaves
from shardfn.testing import distributed

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def _params(scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"w.a": scale * torch.randn(6, 4, generator=generator), "b": scale * torch.randn(4, generator=generator)}


def _loss(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w.a"] + p["b"]).square().mean()


def _step(tx: Any, mesh: Any = None, policy: Any = None) -> Any:
    loss = _loss if policy is None else sf.mixed_precision(_loss, policy)
    zero = sf.Zero(stage=0 if mesh is None else 3, persist_elements=0)
    return sf.sharded_step(loss, tx, mesh=sf.make_mesh({"dp": 1}) if mesh is None else mesh, zero=zero)


def _saved(tx: Any, place: Any) -> Any:
    step = _step(tx)
    state = step.init(_params())
    for _ in range(3):
        state, _ = step(state, X)
    sf.checkpoint.save(place, state, step=3)
    return state


def _by_torch(steps: int) -> dict[str, Tensor]:
    """AdamW whose rate, decay and clip change after three steps."""
    params = {k: v.requires_grad_() for k, v in _params().items()}
    rule = torch.optim.AdamW(params.values(), 1e-2, weight_decay=0.0)
    for n in range(steps):
        rule.zero_grad()
        _loss(params, X).backward()
        if n >= 3:
            rule.param_groups[0].update(lr=3e-2, weight_decay=0.2)
            torch.nn.utils.clip_grad_norm_(params.values(), 1e-2)
        rule.step()
    return {k: v.detach() for k, v in params.items()}


@distributed(world=[1, 2])
def test_moments_go_on_behind_a_new_clip(world: int, tmp_path: pathlib.Path) -> None:
    del world
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    first = _step(optim.adamw(1e-2, weight_decay=0.0), mesh)
    state = first.init(_params())
    for _ in range(3):
        state, _ = first(state, X[first.rows(8)])
    sf.checkpoint.save(tmp_path, state, step=3)
    clipped = optim.chain(optim.clip_by_global_norm(1e-2), optim.adamw(optim.constant_schedule(3e-2), weight_decay=0.2))
    step = _step(clipped, mesh)
    told = r"opt_state\[1\]\[0\] continues with opt_state\[0\], opt_state\[1\]\[2\] \(count\) begins anew"
    with pytest.raises(
        ValueError, match=rf"rename=checkpoint\.ByKind\(\) reads the states that both sides have: {told}"
    ):
        sf.checkpoint.restore(tmp_path, step.init(_params(0.0)))
    state = sf.checkpoint.restore(tmp_path, step.init(_params(0.0)), rename=sf.checkpoint.ByKind()).tree
    for _ in range(3):
        state, _ = step(state, X[step.rows(8)])
    for name, want in _by_torch(6).items():
        torch.testing.assert_close(state.params[name].full_tensor(), want, rtol=1e-5, atol=1e-6)


ADAM = optim.adamw(1e-2)
WRAPPED: dict[str, tuple[Any, Any, str]] = {
    "a wrapper is new": (ADAM, optim.apply_if_finite(ADAM, 3), r"last_finite, notfinite_count, .*begins anew"),
    "a wrapper is gone": (optim.apply_if_finite(ADAM, 3), ADAM, r"opt_state \(last_finite, .* is left out"),
    "an average is new": (ADAM, optim.average_params(ADAM, 0.9), r"opt_state \(average, count\) begins anew"),
    "an average is gone": (optim.average_params(ADAM, 0.9), ADAM, r"opt_state \(average, count\) of the .* left out"),
    "rules are in another order": (
        optim.chain(optim.trace(0.9), ADAM),
        optim.chain(optim.scale_by_adam(), optim.trace(0.9), optim.scale_by_learning_rate(0.1)),
        r"opt_state\[0\] continues with opt_state\[1\]\[0\], opt_state\[1\] continues with opt_state\[0\]",
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_states_are_found_by_kind(name: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    before, after, told = WRAPPED[name]
    old = _saved(before, tmp_path)
    with caplog.at_level(logging.INFO, "shardfn.checkpoint"):
        state = sf.checkpoint.restore(tmp_path, _step(after).init(_params(7.0)), rename=sf.checkpoint.ByKind()).tree
    assert any(re.search(told, record.message) for record in caplog.records)
    both = [{path: x.full_tensor() for path, x in named_leaves(s.opt_state)} for s in (old, state)]
    for field in (".mu['w.a']", ".nu['b']", ".mu['b']"):
        want, found = (next(x for path, x in leaves.items() if path.endswith(field)) for leaves in both)
        assert torch.equal(want, found) and want.any()


@pytest.mark.parametrize(
    "how",
    [{"rename": sf.checkpoint.ByKind()}, {"keep": "opt_state"}, {"partial": True}],
    ids=lambda how: next(iter(how)),
)
@pytest.mark.parametrize("name", ["average", "slow", "z", "master"])
def test_new_copies_of_parameters_are_those_of_the_checkpoint(name: str, how: Any, tmp_path: pathlib.Path) -> None:
    old = _saved(ADAM, tmp_path)
    rules = {"average": optim.average_params(ADAM, 0.9), "slow": optim.lookahead(ADAM, 5, 0.5), "master": ADAM}
    tx = rules.get(name) or optim.schedule_free(optim.sgd(0.1), 0.1)
    step = _step(tx, policy=sf.Policy.bf16() if name == "master" else None)
    state = sf.checkpoint.restore(tmp_path, step.init(_params(7.0)), cast=True, **how).tree
    for param, want in old.params.items():
        assert torch.equal(getattr(state.opt_state, name)[param].full_tensor(), want.full_tensor())


def test_master_copies_stay_wide_beside_a_new_optimizer(tmp_path: pathlib.Path) -> None:
    step = _step(ADAM, policy=sf.Policy.bf16())
    state, _ = step(step.init(_params()), X)
    sf.checkpoint.save(tmp_path, state, step=1)
    other = _step(optim.sgd(0.1), policy=sf.Policy.bf16())
    found = sf.checkpoint.restore(tmp_path, other.init(_params(7.0)), keep="opt_state").tree
    for param, want in state.opt_state.master.items():
        assert torch.equal(found.opt_state.master[param].full_tensor(), want.full_tensor())


def test_states_of_one_kind_in_other_numbers_are_named(tmp_path: pathlib.Path) -> None:
    _saved(optim.chain(optim.trace(0.9), optim.sgd(0.1)), tmp_path)
    like = _step(optim.chain(optim.trace(0.9), optim.trace(0.5), optim.sgd(0.1))).init(_params())
    told = r"states with trace: here opt_state\[0\], opt_state\[1\], in the checkpoint opt_state\[0\]"
    with pytest.raises(ValueError, match=rf"(?s)rename=.*{told}"):
        sf.checkpoint.restore(tmp_path, like, rename=sf.checkpoint.ByKind())
