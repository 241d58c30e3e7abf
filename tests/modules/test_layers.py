"""Covers modules with a named list of layers: forwards around them, and refusals of stages."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn import P, optim
from shardfn.modules import from_module
from shardfn.testing import distributed


class _Dropped(nn.Module):
    """A dropout in each layer and one after it; records the masks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64)) for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.masks: list[Tensor] = []
        for layer in self.layers:
            layer[0].register_forward_hook(lambda module, args, out: self.masks.append(out != 0))  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer(torch.ones_like(x))
            self.masks.append(self.drop(torch.ones_like(x)) != 0)
        return x


def test_no_two_dropouts_of_a_forward_share_a_mask() -> None:
    module = _Dropped().train()
    params, apply = from_module(module, layers="layers")
    apply.keyed(sf.key(0), torch.arange(4))(params, torch.ones(4, 64))
    assert len(module.masks) == 6
    for i, mask in enumerate(module.masks):
        assert not any(torch.equal(mask, other) for other in module.masks[:i])


class _Lists(nn.Module):
    """Dropout around and in two lists; the first runs twice."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again, self.drop = again, nn.Dropout(0.5)
        self.others = nn.ModuleList(self._layer() for _ in range(2))
        self.layers = nn.ModuleList(self._layer() for _ in range(3))

    def _layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.others, *self.others]:
            x = self.drop(layer(self.drop(x)))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)  # pyright: ignore
        return self.drop(self.drop(x))


@pytest.mark.parametrize("again", [False, True])
def test_a_named_list_draws_the_masks_of_the_module(again: bool) -> None:
    x, keyed = torch.ones(4, 6), (sf.key(0), torch.arange(4))
    found = []
    options: Any
    for options in ({}, {"layers": "layers"}):
        params, apply = from_module(_Lists(again), **options)
        loss: Any = lambda p, apply=apply: apply.keyed(*keyed)(p, x).square().sum()  # noqa: E731
        found.append(sf.value_and_grad(loss)(params))
    (a, left), (b, right) = found
    assert torch.equal(a, b)
    for i in range(3):
        assert torch.equal(left[f"layers.{i}.0.weight"], right["layers"]["0.weight"][i])


def test_a_layer_that_runs_twice_draws_two_masks() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([layer(x) for layer in (*self.layers, *self.layers)])

    _, apply = from_module(Twice())
    masks = apply.keyed(sf.key(0), torch.arange(4))({}, torch.ones(4, 64)).unbind()
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class _Checkpointed(_Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))  # pyright: ignore
        return x


class _Reentrant(_Checkpointed):
    reentrant = True


class _Gain(nn.Linear):
    gain = 1.0

    def forward(self, mask: Any = None, hidden: Any = None) -> Tensor:  # pyright: ignore
        return super().forward(hidden) * self.gain


class _Told(_Net):
    """Sets an attribute of a layer, and calls it by a keyword that is not its first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Gain(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            layer.gain = float(i + 1)  # pyright: ignore
            x = torch.tanh(layer(hidden=x))
        return x


@pytest.mark.parametrize(
    "kind",
    [
        _Net,
        pytest.param(_Checkpointed, marks=pytest.mark.nightly),
        pytest.param(_Reentrant, marks=pytest.mark.nightly),
        _Told,
    ],
)
def test_a_named_list_changes_nothing_on_one_device(kind: type[nn.Module]) -> None:
    found = []
    x = torch.linspace(-1, 1, 6).view(2, 3)
    for layers in (None, "layers"):
        torch.manual_seed(1)
        options: Any = {} if layers is None else {"layers": layers}
        params, apply = from_module(kind(), **options)
        torch.manual_seed(2)
        loss, grads = sf.value_and_grad(lambda p, x, apply=apply: apply(p, x.clone().requires_grad_()).square().mean())(
            params, x
        )
        flat = (
            grads
            if layers is None
            else {f"layers.{i}.{n}": g[i] for n, g in grads["layers"].items() for i in range(len(g))}
        )
        found.append((loss, flat))
    (a, left), (b, right) = found
    torch.testing.assert_close(b, a)
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(right[name], left[name], msg=name)


class _Reads(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.layers[0].bias  # pyright: ignore


def _extra(p: Any) -> Tensor:
    return 0.1 * p["blocks"].square().sum()


SPECS = {"layers": P("pp")}


@distributed(world=2)
def test_layers_that_are_elsewhere_are_not_used_outside_of_their_calls() -> None:
    mesh, x = sf.make_mesh({"pp": 2}), torch.ones(4, 3)
    params, apply = from_module(_Reads(), layers="layers")
    loss = sf.pipeline_module(lambda p, x: apply(p, x).square().mean(), apply, num_microbatches=2)
    step = sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, specs=SPECS, batch=P())
    with pytest.raises((ValueError, sf.RankError)):
        step(step.init(params), x)


@pytest.mark.nightly
@distributed(world=2)
def test_a_loss_that_uses_the_stack_outside_of_its_layers_is_refused() -> None:
    mesh, x = sf.make_mesh({"pp": 2}), torch.ones(4, 3)
    params, apply = from_module(_Net(), layers="layers")

    def penalty(p: Any, x: Tensor) -> Tensor:
        return apply(p, x).square().mean() + 0.1 * sum(w.square().sum() for w in p["layers"].values())

    def cast(p: Any, x: Tensor) -> Tensor:
        return apply({"layers": dict(p["layers"], weight=torch.zeros(2, 3, 3))}, x).square().mean()

    for loss in (penalty, cast):
        made = sf.pipeline_module(loss, apply, num_microbatches=2)
        step = sf.sharded_step(made, optim.sgd(0.1), mesh=mesh, specs=SPECS, batch=P())
        with pytest.raises((ValueError, sf.RankError), match="on several ranks"):
            step(step.init(params), x)
    stack = {"blocks": torch.arange(1.0, 5.0)}
    for where in ("first", "last"):
        of = sf.pipeline(
            lambda p, x, on=where == "first": x + (_extra(p) if on else 0.0),
            lambda w, h: h * w,
            lambda p, h, x, on=where == "last": h.mean() + (_extra(p) if on else 0.0),
        )
        step = sf.sharded_step(of, optim.sgd(0.1), mesh=mesh, specs={"blocks": P("pp")}, batch=P())
        with pytest.raises((ValueError, sf.RankError), match="uses the stacked layers outside of them"):
            step(step.init(stack), x)
        with pytest.raises((ValueError, sf.RankError), match="uses the stacked layers outside of them"):
            step.loss(step.init(stack).params, x)


def test_a_stack_that_is_not_padded_is_refused_on_one_device_too() -> None:
    loss = sf.pipeline(lambda p, x: x, lambda w, h: h + w, lambda p, h, x: h.sum(), layers_per_stage=(2, 1))
    with pytest.raises(ValueError, match="wants stacks of 4 rows"):
        loss({"blocks": torch.arange(1.0, 7.0)}, torch.zeros(1))
