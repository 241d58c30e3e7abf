"""Covers tools for experts of a trained state: pruning by use, aggregation and upcycling, also over a mesh."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers
from shardfn.testing import distributed

NIGHTLY = pytest.mark.nightly
TINY: dict[str, Any] = {"vocab_size": 31, "num_layers": 4, "d_model": 12, "num_heads": 2, "d_ff": 10, "max_len": 16}
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False}
AFTER = functools.partial(layers.top_k, softmax="after")
GROUPS = functools.partial(layers.sigmoid_groups, groups=1, groups_kept=1)


def config(changes: Any = None, **experts: Any) -> gpt.Config:
    given: dict[str, Any] = {"num": 6, "every": 2, "top_k": 2, "route": AFTER, "balance": 0.1}
    return gpt.Config(**TINY, **(changes or {}), experts=moe.Experts(**{**given, **experts}))


def params(c: gpt.Config, seed: int = 0) -> Any:
    draw = torch.Generator().manual_seed(seed)
    return sf.core.tree_map(lambda x: x.double() + 0.2 * torch.randn(x.shape, generator=draw), gpt.init(c, sf.key(0)))


def tokens(rows: int = 4, length: int = 9) -> torch.Tensor:
    return torch.randint(31, (rows, length), generator=torch.Generator().manual_seed(1))


def leaves_equal(found: Any, want: Any, **tolerance: Any) -> None:
    a, b = (sf.core.tree_leaves(sf.unshard(x)) for x in (found, want))
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


@pytest.mark.parametrize("style", [{}, LLAMA], ids=["gpt", "llama"])
def test_experts_that_no_token_chose_change_no_bit(style: Any) -> None:
    c = dataclasses.replace(config(style, num=12), batch_invariant=True)
    leaves, ids = params(c), tokens(1, 3)
    counts = moe.count_choices(gpt.choices(c, leaves, ids), c.num_experts)
    assert [int(x.sum()) for x in counts] == [6, 6]
    kept = [[e for e, n in enumerate(x.tolist()) if n] for x in counts]
    kept = [[*x, *[e for e in range(12) if e not in x][: 7 - len(x)]] for x in kept]  # some unused ones may stay
    small, own = moe.prune_experts(c, leaves, [sorted(x) for x in kept])
    assert small.num_experts == [7, 7] and small.experts and small.experts.num == 7
    assert torch.equal(gpt.apply(small, own, ids), gpt.apply(c, leaves, ids))
    pyramid, own = moe.prune_experts(c, leaves, [kept[0][:2], [0, 5, 11]])
    assert pyramid.num_experts == [2, 3] and gpt.num_params(pyramid) == sum(x.numel() for x in sf.core.tree_leaves(own))


def test_the_most_used_experts() -> None:
    counts = [torch.tensor([3, 0, 7, 3]), torch.tensor([0, 0, 0, 1])]
    assert moe.most_used(counts, 2) == [[0, 2], [0, 3]] and moe.most_used(counts, [1, 3]) == [[2], [0, 1, 3]]
    routes = torch.tensor([[[[0, -1], [1, 1]]]])
    assert [x.tolist() for x in moe.count_choices(routes, [2, 2])] == [[1, 0], [0, 2]]


def test_an_aggregate_with_itself_is_the_model() -> None:
    """The two copies of a token's expert share its weight."""
    for route, top_k in ((AFTER, 1), (functools.partial(layers.top_k, renormalise=False), 1)):
        c = config(top_k=top_k, route=route)
        leaves = params(c)
        made, own = moe.aggregate_experts(c, leaves, c, leaves)
        assert made.num_experts == [12, 12] and made.experts
        two = dataclasses.replace(made, experts=dataclasses.replace(made.experts, top_k=2))
        want = gpt.apply(c, leaves, tokens())
        torch.testing.assert_close(gpt.apply(two, own, tokens()), want, rtol=1e-12, atol=1e-13)
    c, other = config(num=(2, 3)), config(num=(3, 4))
    made, own = moe.aggregate_experts(c, params(c), other, params(other, 1))
    assert made.num_experts == [5, 7]
    a, b = params(c), params(other, 1)
    torch.testing.assert_close(own["blocks"][0]["wq"], (a["blocks"][0]["wq"] + b["blocks"][0]["wq"]) / 2)
    assert torch.equal(own["blocks"][3]["router"][3:], b["blocks"][3]["router"])


@pytest.mark.parametrize("style", [{}, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("residual", [False, True])
def test_an_upcycled_model_begins_as_the_dense_one(style: Any, residual: bool) -> None:
    dense = gpt.Config(**TINY, **style)
    leaves, experts = params(dense), moe.Experts(num=3, every=2, top_k=2, residual=residual)
    made, own = moe.upcycle_experts(dense, leaves, experts, sf.key(1))
    want = gpt.init(made, sf.key(0))
    assert sf.core.tree_structure(own) == sf.core.tree_structure(want)
    assert [x.shape for x in sf.core.tree_leaves(own)] == [x.shape for x in sf.core.tree_leaves(want)]
    torch.testing.assert_close(
        gpt.apply(made, own, tokens()), gpt.apply(dense, leaves, tokens()), rtol=1e-11, atol=1e-12
    )
    _, noisy = moe.upcycle_experts(dense, leaves, experts, sf.key(1), noise=0.1)
    spread = (noisy["blocks"][1]["e_down"] - own["blocks"][1]["e_down"]).std()
    assert 0.08 < float(spread) < 0.12


@pytest.mark.parametrize("tool", ["prune", "aggregate"])
def test_stacked_layers_are_as_unstacked(tool: str) -> None:
    c, stacked = config(), config({"stacked": True})
    leaves = params(c)
    blocks = [{f"{j}.{n}": x for j in range(2) for n, x in leaves["blocks"][2 * i + j].items()} for i in range(2)]
    joined = {**leaves, "blocks": {n: torch.stack([b[n] for b in blocks]) for n in blocks[0]}}
    how = lambda c, p: moe.prune_experts(c, p, [[0, 2], [1, 5]])  # noqa: E731
    if tool == "aggregate":
        how = lambda c, p: moe.aggregate_experts(c, p, c, p)  # noqa: E731
    one, two = how(c, leaves), how(stacked, joined)
    assert torch.equal(gpt.apply(*one, tokens()), gpt.apply(*two, tokens()))


@distributed(world=2)
@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=NIGHTLY) for n in range(3)), 3])
@pytest.mark.parametrize("tool", ["prune", *(pytest.param(x, marks=NIGHTLY) for x in ("aggregate", "upcycle"))])
def test_states_over_a_mesh_are_those_of_one_device(tool: str, stage: int) -> None:
    """Moments and biases of routers, too: what goes on from the result equals what goes on without a cut.

    Pruned layers have 3 and 2 experts on 2 ranks, and the step that goes on has its experts whole.
    """
    mesh, ends = sf.make_mesh({"ep": 2}, device="cpu"), []
    tx: Any = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.sgd(0.1, momentum=0.9))
    for exchange, zero in ((layers.AllToAll("ep"), stage), (layers.Local(), 0)):
        biased = {"route": GROUPS, "bias_rate": 0.01, "axes": "ep"}
        first = config(exchange=exchange, **biased)
        if tool == "upcycle":
            first = gpt.Config(**TINY)
        step = make_step(first, tx, mesh, zero)
        state = run(step, step.init(params(first), model_state=biases(first)))
        if tool == "prune":
            made, state = moe.prune_experts(first, state, [[0, 2, 5], [1, 4]])
        elif tool == "aggregate":
            other = run(step, step.init(params(first, 1), model_state=biases(first)))
            made, state = moe.aggregate_experts(first, state, first, other)
        else:
            rule = moe.Experts(num=3, every=2, exchange=exchange, **biased)
            made, state = moe.upcycle_experts(first, state, rule, sf.key(3), noise=0.1)
        for swapped in (exchange, layers.Local()):
            assert made.experts
            made = dataclasses.replace(made, experts=dataclasses.replace(made.experts, exchange=swapped))
            step = make_step(made, tx, mesh, zero)
            state = run(step, step.adopt(state))
        assert int(state.step) == 3
        ends.append(state)
    leaves_equal(ends[0].params, ends[1].params, rtol=1e-12, atol=1e-13)
    leaves_equal(ends[0].opt_state, ends[1].opt_state, rtol=1e-11, atol=1e-12)
    leaves_equal(ends[0].model_state, ends[1].model_state, rtol=0, atol=0)


def make_step(c: gpt.Config, tx: Any, mesh: Any, stage: int) -> Any:
    loss: Any = functools.partial(gpt.loss, c)
    more: dict[str, Any] = {}
    if c.experts:
        loss = functools.partial(moe.loss, c, axes="ep")
        more = {"has_aux": True, "has_state": True, "finish": functools.partial(moe.finish, c)}
    zero = sf.Zero(stage=stage, axis="ep", persist_elements=0)
    return sf.sharded_step(loss, tx, mesh=mesh, specs=gpt.specs(c), batch=sf.P("ep"), zero=zero, **more)


def biases(c: gpt.Config) -> Any:
    return moe.init_state(c) if c.experts else ()


def run(step: Any, state: Any) -> Any:
    return step(state, {"tokens": tokens()[step.rows(4)]})[0]


@pytest.mark.parametrize(
    "kept, said",
    [
        ([[0, 1], [3]], r"layer 1 must keep top_k=2 experts or more, got \[3\]"),
        ([[1, 0], [2, 6]], r"(?s)layer 0 must keep ascending .*got \[1, 0\].*from 0 to 5, got \[2, 6\]"),
        ([[0, 1]], "kept must have the experts of 2 layers, got 1 lists"),
    ],
)
def test_experts_that_cannot_stay_are_refused(kept: Any, said: str) -> None:
    c = config()
    with pytest.raises(ValueError, match=said):
        moe.prune_experts(c, params(c), kept)


def test_models_that_do_not_fit_are_refused() -> None:
    c, dense = config(), gpt.Config(**TINY)
    with pytest.raises(ValueError, match=r"stacked layers must keep equally many experts, got \[2, 3\]"):
        moe.prune_experts(config({"stacked": True}), {}, [[0, 1], [0, 1, 2]])
    with pytest.raises(ValueError, match="prune_experts: the model must have experts, got experts=None"):
        moe.prune_experts(dense, {}, [])
    wide = dataclasses.replace(config(route=layers.top_k), d_model=16)
    with pytest.raises(ValueError, match=r"(?s)d_model must be equal, got 12 and 16.*experts.route must be equal"):
        moe.aggregate_experts(c, params(c), wide, params(wide))
    stacked, rule = dataclasses.replace(dense, stacked=True), moe.Experts(num=6, every=2)
    cases: list[tuple[gpt.Config, moe.Experts, float, str]] = [
        (c, rule, 0.0, "the model must be dense, got Experts"),
        (stacked, rule, 0.0, "layers must be unstacked, got stacked=True"),
        (dense, dataclasses.replace(rule, d_ff=7), 0.0, "experts must have the model's F, 10, got d_ff=7"),
        (dense, rule, -1.0, "noise must be 0 or more and finite, got -1.0"),
    ]
    for model, experts, noise, said in cases:
        with pytest.raises(ValueError, match=said):
            moe.upcycle_experts(model, {}, experts, sf.key(0), noise=noise)


def test_factored_moments_are_refused() -> None:
    c = config()
    step = sf.sharded_step(functools.partial(gpt.loss, c), sf.optim.adafactor(0.1, min_dim_size_to_factor=2))
    state = step.init(sf.core.tree_map(torch.Tensor.float, params(c)))
    with pytest.raises(ValueError, match="the optimizer keeps states of other shapes than the parameters"):
        moe.prune_experts(c, state, [[0, 1], [2, 3]])
    small, own = moe.prune_experts(c, state.params, [[0, 1], [2, 3]])
    assert gpt.apply(small, sf.unshard(own), tokens()).isfinite().all()
