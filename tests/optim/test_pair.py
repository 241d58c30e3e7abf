"""Covers pairs `(init, update)` that know no ranks: sharded equals one device, for all kinds of rules."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, optim
from shardfn.collectives import bind_mesh
from shardfn.core import tree_leaves, tree_map
from shardfn.optim import GradientTransformation, Needs
from shardfn.testing import assert_same, distributed, on_mesh, one_device


class Optax(NamedTuple):
    """The two fields of optax's GradientTransformation."""

    init: Any
    update: Any


def by_element() -> Optax:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        state = tree_map(lambda m, u: 0.9 * m + u, state, updates)
        return tree_map(lambda m, p: -0.1 * (m + 0.01 * p), state, params), state

    return Optax(lambda params: tree_map(torch.zeros_like, params), update)


class Norms(NamedTuple):
    steps: Tensor
    first: Tensor
    factors: Any
    mu: Any
    flat: list[Tensor]


def norm_of(tree: Any) -> Tensor:
    return torch.stack([x.square().sum() for x in tree_leaves(tree)]).sum().sqrt()


def by_norm() -> Optax:
    """Norms of the tree and of leaves, a factored moment, state that starts from parameters or has paths of its own."""

    def init(params: Any) -> Norms:
        first = norm_of(params)
        factors = tree_map(lambda p: p.new_zeros(p.shape[:1] if p.ndim > 1 else (1,)), params)
        mu, flat = tree_map(torch.clone, params), [torch.zeros_like(p) for p in tree_leaves(params)]
        return Norms(torch.zeros((), dtype=torch.int32), first, factors, mu, flat)

    def update(updates: Any, state: Norms, params: Any = None) -> Any:
        norm = norm_of(updates) + state.first
        factors = tree_map(
            lambda f, u: 0.9 * f + u.square().reshape(len(f), -1).mean(1), state.factors, updates
        )  # fmt: skip
        mu = tree_map(lambda m, u: 0.5 * m + u / norm, state.mu, updates)
        flat = [f + m.mean() for f, m in zip(state.flat, tree_leaves(mu), strict=True)]
        out = tree_map(lambda m, p, f: -0.1 * m * p.norm() / (1 + f.sum()), mu, params, factors)
        return out, Norms(state.steps + 1, state.first, factors, mu, flat)

    return Optax(init, update)


def params() -> Any:
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (5, 6), "v": (7, 5), "b": (6,), "s": ()}
    return {k: torch.randn(shape, generator=draw) for k, shape in shapes.items()}


def loss(p: Any, x: Tensor) -> Tensor:
    return (torch.tanh(x @ p["v"] @ p["w"] + p["b"]) - p["s"]).square().mean()


def batches(num: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(12, 7, generator=draw) for _ in range(num)]


RULES: dict[str, Any] = {
    "norm": by_norm,
    "element": by_element,
    "named": lambda: GradientTransformation(*by_norm()),
    "chain": lambda: optim.chain(optim.clip_by_global_norm(0.5), by_norm(), optim.scale_by_learning_rate(0.3)),
    "multi": lambda: optim.multi_transform(
        {"a": by_norm(), "b": optim.adam(0.1)}, lambda p: {k: "a" if x.ndim else "b" for k, x in p.items()}
    ),
    "delayed": lambda: optim.delayed(by_norm(), 1),
    "masters": lambda: optim.master_weights(by_norm()),
    "masked": lambda: optim.chain(
        optim.masked(by_norm(), {"w": True, "v": True, "b": False, "s": False}),
        optim.masked(optim.sgd(0.1), {"w": False, "v": False, "b": True, "s": True}),
    ),
}


def check(make: Any, stage: int, world: int, f: Any = loss, **more: Any) -> None:
    mesh = sf.make_mesh({"dp": world})
    run = on_mesh(f, make(), params(), batches(), mesh=mesh, zero=sf.Zero.flat(stage=stage, persist_elements=0, **more))
    assert_same(run, one_device(loss, optim.as_transformation(make()), params(), batches()))


@pytest.mark.nightly
@distributed(world=2)
def test_a_pair_in_a_step_equals_one_device() -> None:
    for stage in (0, 3):
        for name in ("norm", "element"):
            check(RULES[name], stage, 2)


@pytest.mark.nightly
@distributed(world=2)
def test_pairs_nest_and_are_captured() -> None:
    for name in ("chain", "multi"):
        check(RULES[name], 3, 2)
    check(RULES["norm"], 1, 2, sf.jit(loss, backend="graph"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", RULES)
@distributed(world=[1, 2, 3])
def test_pairs_at_every_stage(world: int, name: str) -> None:
    for stage in range(4):
        check(RULES[name], stage, world)
    check(RULES[name], 3, world, sf.jit(loss, backend="graph"))


@pytest.mark.nightly
@distributed(world=2)
def test_an_elementwise_rule_is_shown_blocks_and_sends_nothing() -> None:
    mesh, seen = sf.make_mesh({"dp": 2}), []
    init, update = by_element()

    def watched(updates: Any, state: Any, params: Any = None) -> Any:
        seen.append(tuple(updates["w"].shape))
        return update(updates, state, params)

    for rule, shape in (
        (GradientTransformation(init, watched, needs=Needs("element")), (5, 3)),
        (Optax(init, watched), (5, 6)),
    ):
        seen.clear()
        on_mesh(loss, rule, params(), batches(1), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))
        assert seen == [shape]


@distributed(world=2)
def test_a_state_is_kept_in_pieces_where_it_has_its_parameters_shape() -> None:
    mesh = sf.make_mesh({"dp": 2})
    step = sf.sharded_step(loss, by_norm(), mesh=mesh, zero=sf.Zero(stage=1, persist_elements=0))
    state = step.init(params()).opt_state
    assert {k: x.spec for k, x in state.mu.items()} == {"w": P(None, "dp"), "v": P("dp"), "b": P("dp"), "s": P()}
    assert state.mu["v"].shape == (7, 5) and state.mu["v"].local.shape == ((4, 5) if mesh.rank == 0 else (3, 5))
    assert [x.spec for x in (*state.factors.values(), *state.flat)] == [P()] * 8


@distributed(world=2)
def test_blocks_of_leaves_that_are_not_known_are_refused() -> None:
    rule = optim.as_transformation(by_norm())
    with bind_mesh(sf.make_mesh({"dp": 2})):
        block, specs = {"w": torch.ones(2, 3)}, {"w": P("dp")}
        with pytest.raises(ValueError, match=r"decide the rule first, by optim\.resolve_masks\(tx, whole\)"):
            rule.update(block, rule.init(block), block, specs=specs)
        fixed = optim.resolve_masks(rule, {"w": torch.empty(4, 3, device="meta")})
        with pytest.raises(ValueError, match=r"params\['w'\] has shape \(2, 3\), but the leaf has \(4, 3\)"):
            fixed.init(block)


@pytest.mark.nightly
@distributed(world=2)
def test_states_that_cannot_be_kept_are_refused() -> None:
    mesh = sf.make_mesh({"dp": 2})
    counts = Optax(lambda p: {"count": 0}, lambda u, s, p=None: (u, s))
    like_rows = Optax(lambda p: {"v": torch.zeros(5, 3)}, lambda u, s, p=None: (u, s))
    for rule, error, message in (
        (counts, TypeError, r"opt_state\['count'\] is of type int"),
        (like_rows, ValueError, r"the shape of its rows, but not its own[^$]*opt_state\['v'\]"),
    ):
        step = sf.sharded_step(lambda p, x: p["v"].sum(), rule, mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))
        with pytest.raises(error, match=message):
            step.init({"v": torch.ones(5, 6)})


def test_before_a_rule_that_averages_a_pair_is_refused() -> None:
    own = optim.onebit_adam(0.1, freeze_step=1)
    for pair in (by_norm(), optim.chain(by_norm())):
        with pytest.raises(
            ValueError, match=r"rules \[0\] of a chain have an update without `specs`.*granularity=\"element\""
        ):
            optim.chain(pair, own)
    optim.chain(GradientTransformation(*by_element(), needs=Needs("element")), own)


def test_arguments_that_count_as_specs() -> None:
    named, bare = (lambda u, s, p=None, *, specs=None: (u, s)), (lambda u, s, p=None: (u, s))
    extra = lambda u, s, p=None, **more: (u, s)  # noqa: E731
    init: Any = lambda p: ()  # noqa: E731
    told = [(pair, optim.as_transformation(pair).needs.whole) for pair in ((init, named), (init, bare), (init, extra))]
    assert [whole for _, whole in told] == [False, True, True]
    rules = [GradientTransformation(init, f) for f in (named, bare, extra)]
    assert [optim.as_transformation(rule).needs.whole for rule in rules] == [False, True, False]
    assert optim.as_transformation(rules[0]) is rules[0]


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        pytest.param(torch.optim.SGD, marks=pytest.mark.nightly),
        pytest.param((torch.zeros_like,), marks=pytest.mark.nightly),
        [len, len],
        pytest.param((len, 1), marks=pytest.mark.nightly),
    ],
)
def test_a_value_that_is_no_optimizer_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"an optimizer is a pair of functions \(init, update\), but this is "):
        optim.as_transformation(wrong)


@distributed(world=2)
def test_a_pair_whose_state_is_on_the_host() -> None:
    rule = GradientTransformation(*by_element(), needs=Needs("element"))
    check(lambda: rule, 1, 2, optimizer="host", grads="host", chunk_bytes=64)
    mesh, zero = sf.make_mesh({"dp": 2}), sf.Zero(stage=1, persist_elements=0, optimizer="host")
    with pytest.raises(ValueError, match="keep its state on the device, or declare that it treats every element alike"):
        sf.sharded_step(loss, by_element(), mesh=mesh, zero=zero).init(params())
