"""Covers torch.func and torch.autograd.grad inside a loss whose leaves are gathered: steps equal one device."""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev, jvp, vmap

import shardfn as sf
from shardfn import P, Sharding, Zero
from shardfn.testing import assert_parity, distributed

NIGHTLY = pytest.mark.nightly
F64 = torch.float64


def params() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"w": (7, 5), "blocks": (3, 5, 5), "out": (5, 3)}
    return {name: torch.randn(shape, generator=g, dtype=F64) / 2 for name, shape in shapes.items()}


def model(p: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x @ p["w"])
    for i in range(2):  # of three
        h = torch.tanh(h @ p["blocks"][i])
    return h @ p["out"]


def squares(p: Any, x: Tensor) -> Tensor:
    return model(p, x).square().sum()


def by_vmap(p: Any, x: Tensor) -> Tensor:
    return vmap(lambda r: squares(p, r))(x).mean()


def over_a_leaf(p: Any, x: Tensor) -> Tensor:
    return vmap(lambda column: torch.tanh(x @ column), in_dims=1)(p["w"]).square().sum(0).mean()


def by_jacrev(p: Any, x: Tensor) -> Tensor:
    return vmap(jacrev(lambda r: model(p, r)))(x).square().sum((1, 2)).mean()


def by_jvp(p: Any, x: Tensor) -> Tensor:
    return jvp(lambda r: model(p, r), (x,), (torch.ones_like(x),))[1].square().sum(1).mean()


def by_hessian(p: Any, x: Tensor) -> Tensor:
    return vmap(hessian(lambda r: squares(p, r)))(x).square().sum((1, 2)).mean()


def of_params(p: Any, x: Tensor) -> Tensor:
    one = lambda r: sum(g.square().sum() for g in grad(squares)(dict(p), r).values())  # noqa: E731
    return torch.stack([one(r) for r in x]).mean()  # pyright: ignore[reportArgumentType]


def penalty(p: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(squares(p, x), x, create_graph=True)[0].square().sum(1).mean()


def maml(p: Any, x: Tensor, *, second_order: bool = True) -> Tensor:
    losses, names = [], list(p)
    for row in x:
        grads = torch.autograd.grad(squares(p, row), [p[k] for k in names], create_graph=second_order)
        losses.append(squares({k: p[k] - 0.1 * g for k, g in zip(names, grads, strict=True)}, row + 1))
    return torch.stack(losses).mean()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "vmap": by_vmap,
    "vmap over a leaf": over_a_leaf,
    "jacrev": by_jacrev,
    "jvp": by_jvp,
    "hessian": by_hessian,
    "grad of params": of_params,
    "penalty": penalty,
    "maml": maml,
    "first-order maml": functools.partial(maml, second_order=False),
}
DAILY = ("vmap", "vmap over a leaf", "jacrev", "grad of params", "maml")


def check(name: str, world: int, *, stage: int = 3, stacked: bool = True, wrap: Any = lambda f: f) -> None:
    g = torch.Generator().manual_seed(1)
    assert_parity(
        wrap(LOSSES[name]),
        sf.optim.sgd(0.1),
        params(),
        [torch.randn(12, 7, generator=g, dtype=F64) for _ in range(2)],
        mesh=sf.make_mesh({"dp": world}, device="cpu"),
        reference=LOSSES[name],
        specs={"w": P(), "blocks": Sharding(P(), stacked=stacked), "out": P()},
        batch=P("dp"),
        zero=Zero(stage=stage, persist_elements=0),
    )


@pytest.mark.day("vmap")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(DAILY)]
)
@distributed(world=2)
def test_derivatives_inside_a_loss_of_gathered_leaves(name: str) -> None:
    check(name, 2, stacked=name in ("grad of params", "maml"))


@NIGHTLY
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", LOSSES)
@distributed(world=[1, 2, 3])
def test_derivatives_inside_a_loss_at_every_stage(world: int, name: str, stacked: bool) -> None:
    with warnings.catch_warnings():  # torch warns of its own code when it loads forward mode
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")
    for stage in range(4):
        for m in (1, 2):
            check(name, world, stage=stage, stacked=stacked, wrap=functools.partial(sf.accumulate, num_microbatches=m))
    if name != "hessian":  # in a capture torch warns that its own code reads the .grad of tensors that are not leaves
        check(name, world, stacked=stacked, wrap=functools.partial(sf.jit, backend="graph"))


@distributed(world=2)
def test_gradients_per_row_of_a_module() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2)).double()
    whole, apply = sf.from_module(module)

    def loss(p: Any, x: Tensor) -> Tensor:
        slopes = vmap(jacrev(lambda r: apply(p, r)))(x)
        return vmap(lambda r: apply(p, r).square().sum())(x).mean() + slopes.square().sum((1, 2)).mean()

    batch = [torch.randn(4, 5, dtype=F64)]
    mesh, zero = sf.make_mesh({"dp": 2}, device="cpu"), Zero(stage=3, persist_elements=0)
    assert_parity(loss, sf.optim.sgd(0.1), whole, batch, mesh=mesh, zero=zero)


@distributed(world=2)
def test_derivatives_that_one_device_refuses_are_refused() -> None:
    mesh, zero = sf.make_mesh({"dp": 2}, device="cpu"), Zero(stage=3, persist_elements=0)

    def step(loss: Any) -> None:
        made = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, specs={"w": P(), "b": P()}, zero=zero)
        made(made.init({"w": torch.ones(4, 4), "b": torch.ones(4)}), torch.ones(2, 4))

    def unused(p: Any, x: Tensor) -> Tensor:
        return torch.autograd.grad((x @ p["w"]).sum(), [p["w"], p["b"]], create_graph=True)[0].sum()

    def written(p: Any, x: Tensor) -> Tensor:
        return grad(lambda w: (x @ w.mul_(2)).sum())(p["w"]).sum()

    with pytest.raises(RuntimeError, match="tensor at index 1 appears to not have been used in the graph"):
        step(unused)
    with pytest.raises(ValueError, match="parameters are written to inside the loss"):
        step(written)
