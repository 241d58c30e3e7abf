"""Covers replayed choices of experts in models of transformers: equality, gradients, tokens left out, refusals."""

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.nn import moe
from tests.modules.test_experts import BATCHES, KINDS, captured, model_of

TOKENS = BATCHES[0]["tokens"]
SHAPE = (*TOKENS.shape, 1, 2)


def choices(model: Any, apply: Any, params: Any) -> torch.Tensor:
    """The experts [B, T, m, k] that reach the experts' modules in a forward."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: found.append(args[1]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        apply(params, input_ids=TOKENS)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).unflatten(0, TOKENS.shape)


def others(chosen: torch.Tensor, num: int = 3) -> torch.Tensor:
    """Of three experts, one of the two that were chosen and the one that was not."""
    return torch.stack([chosen[..., 1], num - chosen.sum(-1)], -1).to(torch.int16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_of_the_own_choices_has_the_bits_of_the_forward(kind: str) -> None:
    model = model_of(kind).eval()
    params, apply = sf.from_module(model)
    chosen, own = choices(model, apply, params), apply(params, input_ids=TOKENS).logits
    assert chosen.shape == SHAPE
    for given in (chosen, torch.full(SHAPE, -1), torch.where(torch.arange(7)[:, None, None] < 3, chosen, -1)):
        assert torch.equal(apply.replaying(given)(params, input_ids=TOKENS).logits, own)


@pytest.mark.parametrize("kind", KINDS)
def test_other_choices_reach_the_experts(kind: str) -> None:
    model = model_of(kind).eval()
    params, apply = sf.from_module(model)
    given = others(choices(model, apply, params))
    replaying = apply.replaying(given)
    assert torch.equal(choices(model, replaying, params), given.long())
    some = torch.where(torch.arange(7)[:, None, None] < 3, given, -1)
    mixed = choices(model, apply.replaying(some), params)
    assert torch.equal(mixed[:, :3], given[:, :3].long())
    assert not torch.equal(choices(model, apply, params), given.long())  # the function itself is as before


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("gpt-oss", marks=pytest.mark.nightly)])
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    # Routers and norms of transformers compute in float32, and so do differences over a step of this size.
    model = model_of(kind).eval()
    params, apply = sf.from_module(model)
    replaying = apply.replaying(others(choices(model, apply, params)))
    draw = torch.Generator().manual_seed(1)
    gate = next(name for name in params if name.endswith(("gate.weight", "router.weight")))
    for name in (gate, next(name for name in params if name.endswith("down_proj"))):
        along = torch.randn(params[name].shape, generator=draw, dtype=torch.float64)

        def total(scale: Any, name: str = name, along: torch.Tensor = along) -> torch.Tensor:
            moved = {**params, name: params[name] + scale * along}
            return replaying(moved, input_ids=TOKENS).logits.double().sin().sum()

        scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
        [exact] = torch.autograd.grad(total(scale), scale)
        with torch.no_grad():
            measured = (total(1e-3) - total(-1e-3)) / 2e-3
        torch.testing.assert_close(exact, measured, rtol=2e-3, atol=1e-3)
        assert abs(float(exact)) > 0.01


@pytest.mark.parametrize("wrap", [lambda f: f, pytest.param(captured, marks=pytest.mark.nightly)])
def test_steps_replay_in_microbatches_and_layers_that_run_again(wrap: Any) -> None:
    model = model_of("mixtral")
    params, apply = sf.from_module(model, experts=moe.Local())  # graphs hold these; the model's own need values
    given = others(choices(model, sf.from_module(model)[1], params))

    def loss(params: Any, batch: Any) -> torch.Tensor:
        tokens, routes = batch
        logits = apply.replaying(routes)(params, input_ids=tokens).logits
        return logits.log_softmax(-1).square().mean()

    found = []
    for again in (False, True):
        if again:
            model.train().activation_checkpointing_enable()
        step = sf.sharded_step(wrap(sf.accumulate(loss, 2)), sf.optim.sgd(0.1), donate=False)
        state = step.init(params)
        found.append(sf.unshard(step(state, (TOKENS, given))[0].params))
    for name, x in found[0].items():
        assert torch.equal(x, found[1][name]), name
    # The mean over two microbatches is that of all rows.
    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    loss(leaves, (TOKENS, given)).backward()
    for name, x in leaves.items():
        assert x.grad is not None
        torch.testing.assert_close(found[0][name], x.detach() - 0.1 * x.grad, rtol=1e-6, atol=1e-8)


class Argmax(torch.nn.Module):
    """A router that finds its best experts by other functions."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.weight = gate.weight

    def forward(self, x: torch.Tensor) -> Any:
        """Logits, weights, experts."""
        logits = x @ self.weight.T
        best = logits.argsort(-1, descending=True)[:, :2]
        return logits, logits.gather(1, best).softmax(-1), best


def test_choices_that_do_not_fit_are_refused() -> None:
    model = model_of("mixtral").eval()
    params, apply = sf.from_module(model)
    given = torch.zeros(SHAPE, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"shape \(4, 7, 2, 2\), and 1 layers.*Pass \[B, T, 1, k\]"):
        apply.replaying(given.expand(4, 7, 2, 2))
    with pytest.raises(TypeError, match=r"chosen must be numbers of experts.*got torch.float32"):
        apply.replaying(given.float())
    with pytest.raises(ValueError, match=r"mlp.experts: 28 numbers in chosen are not experts: there are 3"):
        apply.replaying(torch.stack([given[..., 0], given[..., 0] + 3], -1))
    with pytest.raises(ValueError, match=r"mlp.experts has 28 tokens with 2 choices each, and chosen has 14.*cut over"):
        apply.replaying(given[:2])(params, input_ids=TOKENS)
    with pytest.raises(ValueError, match=r"28 tokens with 2 choices each, and chosen has 28 tokens with 1"):
        apply.replaying(given[..., :1])(params, input_ids=TOKENS)
    _, dense = sf.from_module(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"got a Linear without.*Call the function itself"):
        dense.replaying(given)
    model.model.layers[0].mlp.gate = Argmax(model.model.layers[0].mlp.gate)
    params, apply = sf.from_module(model)
    with pytest.raises(ValueError, match=r"beside model.layers.0.mlp.experts 0 calls of topk choose among 3 experts"):
        apply.replaying(given)(params, input_ids=TOKENS)
