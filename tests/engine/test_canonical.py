"""Covers sums that do not depend on the number of ranks: equal bits on 1 to 8 of them."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.collectives import bind_mesh
from shardfn.core import tree_leaves
from shardfn.engine import Chunks, tree_sum
from shardfn.engine.transfers._canonical import sum_all_squares
from shardfn.models import gpt
from shardfn.testing import distributed

CHUNKS = 8


def _params(dtype: torch.dtype = torch.float32) -> Any:
    g = torch.Generator().manual_seed(1)
    shapes = {"a": (7, 13), "b": (13, 5), "c": (5,), "unused": (3,)}
    return {k: torch.randn(s, generator=g, dtype=torch.float64).to(dtype) / 3 for k, s in shapes.items()}


def _loss(p: Any, batch: Any) -> Any:
    y = torch.tanh(batch["x"] @ p["a"].to(batch["x"].dtype)) @ p["b"] + p["c"]
    return (y - batch["y"]).square().mean() + 0 * p["unused"].sum()


def _weighted(p: Any, batch: Any) -> Any:
    y = torch.tanh(batch["x"] @ p["a"]) @ p["b"] + p["c"]
    w = batch["y"][:, 0] > 0
    return sf.WeightedMean(((y - batch["y"]).square().sum(1) * w).sum(), w.sum())


def _shared(p: Any, batch: Any) -> Any:
    """With a leaf of the batch that all ranks have, and so all chunks."""
    return _loss(p, batch) * (1 + (p["b"].T @ p["b"] * batch["m"].mean(0)).square().mean())


# Each loss gets "m", the same on all ranks; it has one row a chunk, so it could be cut.
SPECS = {"x": sf.P("dp"), "y": sf.P("dp"), "m": sf.P()}


def _batch(n: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(n)
    rows = {"x": 3 * CHUNKS, "y": 3 * CHUNKS, "m": CHUNKS}
    return {k: torch.randn(rows[k], d, generator=g).to(dtype) for k, d in (("x", 7), ("y", 5), ("m", 5))}


RULES: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optim.adamw(1e-2),
    "lamb": lambda: optim.lamb(1e-2),
    "clip": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2)),
    "units": lambda: optim.chain(optim.clip_by_block_rms(0.01), optim.adaptive_grad_clip(0.01), optim.adamw(1e-2)),
}
LOSSES: dict[str, Callable[[], Any]] = {
    "mean": lambda: _loss,
    "weighted": lambda: _weighted,
    "shared": lambda: _shared,
    "bf16": lambda: sf.mixed_precision(_loss, sf.Policy.bf16()),
}


def _own(batch: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    start, stop = Chunks(CHUNKS, ranks, rank).bounds
    return {k: x if SPECS[k] == sf.P() else x[3 * start : 3 * stop] for k, x in batch.items()}


def _trained(rule: str, loss: str, stage: int, steps: int) -> list[Tensor]:
    """Parameters, state and metrics after some steps, on all ranks of the program."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = sf.make_mesh({"dp": ranks}) if ranks > 1 else sf.make_mesh(alone=True)
    zero = sf.Zero(stage=stage, persist_elements=0, reduction="canonical", reduction_chunks=CHUNKS)
    step = sf.sharded_step(LOSSES[loss](), RULES[rule](), mesh=mesh, zero=zero, batch=SPECS)
    state, metrics = step.init(_params()), []
    for n in range(steps):
        batch = _own(_batch(n), rank, ranks)
        assert torch.equal(batch["x"], _batch(n)["x"][step.rows(3 * CHUNKS)])
        state, m = step(state, batch)
        metrics += [m["loss"], m["grad_norm"]]
    leaves = [x.full_tensor() for x in tree_leaves((state.params, state.opt_state)) if hasattr(x, "full_tensor")]
    return [*leaves, torch.stack([x.float() for x in metrics])]


CASES = [("adamw", "mean", 0), ("clip", "weighted", 3), ("lamb", "shared", 1), ("lamb", "bf16", 3), ("clip", "bf16", 2)]
CASES += [("units", "mean", 3)]


def _all(cases: Any = CASES, steps: int = 4) -> list[list[Tensor]]:
    return [_trained(case[0], case[1], case[2], steps) for case in cases]


@distributed(world=1)
def on_1() -> list[list[Tensor]]:
    return _all()


@distributed(world=2)
def on_2() -> list[list[Tensor]]:
    return _all()


@distributed(world=3)
def on_3() -> list[list[Tensor]]:
    return _all()


@distributed(world=4)
def on_4() -> list[list[Tensor]]:
    return _all()


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_ranks_gives_the_same_bits(world: int) -> None:
    (want,) = on_1()
    for rank, found in enumerate({2: on_2, 3: on_3, 4: on_4}[world]()):
        for case, a, b in zip(CASES, want, found, strict=True):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                assert torch.equal(x, y), (case, world, rank, i, (x - y).abs().max())


@pytest.mark.nightly
def test_it_is_the_mean_of_the_global_batch() -> None:
    """Beside the plain step on one device, within rounding."""
    for case in CASES:
        rule, loss, _ = case
        if loss == "bf16":
            continue
        step = sf.sharded_step(LOSSES[loss](), RULES[rule](), mesh=sf.make_mesh(alone=True))
        state = step.init(_params())
        for n in range(4):
            state, _ = step(state, _batch(n))
        got = _trained(rule, loss, case[2], 4)
        for x, y in zip(got, [x.full_tensor() for x in tree_leaves(state.params)], strict=False):
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6)


def test_the_tree() -> None:
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))

    def slow(a: int, b: int) -> Tensor:
        return x[a].clone() if b - a == 1 else slow(a, (a + b) // 2) + slow((a + b) // 2, b)

    for total, ranks in itertools.product((1, 2, 4, 8, 16), range(1, 17)):
        if ranks > total:
            continue
        nodes, at = [], 0
        for rank in range(ranks):
            chunks = Chunks(total, ranks, rank)
            start, stop = chunks.bounds
            assert start == at and stop > start and chunks.most >= chunks.num == stop - start
            at = stop
            own = tree_sum([(k, k + 1, x[k].clone()) for k in range(start, stop)])
            assert [(a, b) for a, b, _ in own] == chunks.nodes(rank)
            nodes += own
        assert at == total
        ((a, b, found),) = tree_sum(nodes)
        assert (a, b) == (0, total) and torch.equal(found, slow(0, total))


def test_exact_sums_of_squares() -> None:
    g = torch.Generator().manual_seed(0)
    for scale in (1e-30, 1.0, 1e30):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = (torch.randn(5000, generator=g, dtype=torch.float64) * scale).to(dtype)
            with optim.sum_exactly():
                (got,) = optim.sum_squares([x.double()])
                parts = [optim.sum_squares([y.double()]) for y in (x.flip(0), x[torch.randperm(5000, generator=g)])]
            torch.testing.assert_close(got, x.double().square().sum(), rtol=1e-14, atol=0)
            assert all(torch.equal(got, y[0]) for y in parts)
    with optim.sum_exactly():
        assert optim.sum_squares([torch.zeros(3), torch.zeros(0)]).tolist() == [0, 0]
        assert not optim.sum_squares([torch.tensor([1.0, torch.inf])]).isfinite().any()
        assert optim.sum_squares([torch.tensor([1.0, torch.nan])]).isnan().all()


@distributed(world=[pytest.param(2, marks=pytest.mark.nightly), 3])
def test_a_nan_on_one_rank_is_in_the_norm(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    for bad in range(world):
        x = torch.full((3,), torch.nan if dist.get_rank() == bad else 1.0)
        with bind_mesh(mesh):
            assert sum_all_squares({("dp",): [x]}).isnan()


def test_unsupported_combinations_are_named() -> None:
    zero = functools.partial(sf.Zero, reduction="canonical")
    with pytest.raises(ValueError, match="a power of two"):
        zero(reduction_chunks=6)
    with pytest.raises(ValueError, match="codes round by rank"):
        zero(stage=2, travel=sf.Travel(reduce="int8"))
    with pytest.raises(ValueError, match="Did you mean 'canonical'"):
        sf.Zero(reduction="canonicl")
    with pytest.raises(ValueError, match="so along dim 0 alone"):
        sf.sharded_step(_loss, optim.sgd(0.1), mesh=sf.make_mesh(alone=True), zero=zero(), batch=sf.P("dp", "sp"))
    for specs in ({"x": sf.P("dp"), "y": sf.P("tp")}, sf.P()):
        with pytest.raises(ValueError, match=r"at least one leaf is cut(.|\n)*P\((.)*\)"):
            sf.sharded_step(_loss, optim.sgd(0.1), mesh=sf.make_mesh(alone=True), zero=zero(), batch=specs)
    step = sf.sharded_step(_loss, optim.sgd(0.1), mesh=sf.make_mesh(alone=True), zero=zero(), batch=SPECS)
    with pytest.raises(ValueError, match=r"runs 8 of the 8 chunks.*multiple:\n  - batch\['x'\] has 7 rows"):
        step(step.init(_params()), {k: x[:7] for k, x in _batch(0).items()})


def test_sums_by_axis_are_refused_before_a_step_is_made() -> None:
    with pytest.raises(
        ValueError, match=r"\(sums go axis by axis\), because the order of a sum would depend.*or the reduction out"
    ):
        sf.Zero(3, axis=("node", "dp"), travel=sf.Travel(secondary_axis="dp"), reduction="canonical")


def test_a_sum_in_an_order_of_its_own_is_refused_at_the_first_step() -> None:
    mesh, zero = sf.make_mesh(alone=True), sf.Zero(reduction="canonical")
    step = sf.sharded_step(_loss, optim.onebit_adam(0.1, freeze_step=2), mesh=mesh, zero=zero, batch=sf.P("dp"))
    batch = {k: x for k, x in _batch(0).items() if k != "m"}
    with pytest.raises(
        ValueError, match=r"leave them out, or the reduction:\n  - an optimizer that averages gradients"
    ):
        step(step.init(_params()), batch)


@distributed(world=2)
def test_more_ranks_than_chunks_are_refused() -> None:
    zero = sf.Zero(reduction="canonical", reduction_chunks=1)
    step = sf.sharded_step(_loss, optim.sgd(0.1), mesh=sf.make_mesh(), zero=zero, batch=sf.P("dp"))
    with pytest.raises((ValueError, sf.RankError), match="2 ranks share 1 chunks; raise reduction_chunks"):
        step(step.init(_params()), _batch(0))


@distributed(world=3, timeout=60)
def test_rows_that_are_no_multiple_on_one_rank_raise_on_all() -> None:
    """Before anything is sent: no rank waits for a step that another has not begun."""
    mesh = sf.make_mesh({"dp": 3}, timeout=600)
    step = sf.sharded_step(_loss, optim.sgd(0.1), mesh=mesh, zero=sf.Zero(reduction="canonical"))
    batch = {k: torch.ones(CHUNKS, d)[step.rows(CHUNKS)] for k, d in (("x", 7), ("y", 5))}
    if mesh.rank == 1:
        batch = {k: torch.cat([x, x[:1]]) for k, x in batch.items()}
    with pytest.raises((ValueError, sf.RankError), match=r"pass a multiple:\n(.|\n)*  - batch\['x'\] has 4 rows"):
        step(step.init(_params()), batch)


@distributed(world=2)
def test_leaves_that_the_specs_cut_along_the_batch_are_refused() -> None:
    zero = sf.Zero(reduction="canonical", axis=())
    step = sf.sharded_step(
        _loss,
        optim.sgd(0.1),
        mesh=sf.make_mesh(),
        zero=zero,
        specs={**dict.fromkeys("bc", sf.P()), "a": sf.P("dp"), "unused": sf.P()},
        batch=sf.P("dp"),
    )
    with pytest.raises(ValueError, match=r"params\['a'\]: the specs cut them along axes that cut the batch"):
        step(step.init(_params()), {k: x[:CHUNKS] for k, x in _batch(0).items()})


def _exchanging(p: dict, x: Tensor) -> Tensor:
    rows = sf.all_to_all(x @ p["dense"], "ep", split_dim=0, concat_dim=1, size=None)
    return sf.psum((rows * p["experts"].sum()).square().mean(), ()) + 0 * x.sum()


@distributed(world=2)
def test_experts_along_an_axis_of_the_batch_are_refused_with_the_reason() -> None:
    mesh = sf.make_mesh({"dp": 1, "ep": 2})
    for stage in (0, 3):
        zero = sf.Zero(stage, axis=("dp", "ep"), persist_elements=0, reduction="canonical")
        step = sf.sharded_step(
            _exchanging,
            optim.sgd(0.1),
            mesh=mesh,
            zero=zero,
            specs={"dense": sf.P(), "experts": sf.P("ep")},
            batch=sf.P(("dp", "ep")),
        )
        said = (
            r"(?s)canonical.*params\['experts'\]: the specs cut them along axes that cut the batch, \('ep',\), so that"
            r" their gradients come added up over the rows of all ranks there.*than \('ep',\).*by_rank"
        )
        with pytest.raises(ValueError, match=said) as found:
            step(step.init({"dense": torch.ones(3, 3), "experts": torch.ones(4, 2)}), torch.ones(4, 3))
        assert "dense" not in str(found.value) and "Zero(axis=" not in str(found.value)


@distributed(world=2)
def test_ranks_with_other_rows_a_chunk_raise() -> None:
    zero = sf.Zero(reduction="canonical", reduction_chunks=4)
    step = sf.sharded_step(_loss, optim.sgd(0.1), mesh=sf.make_mesh(), zero=zero, batch=sf.P("dp"))
    with pytest.raises((ValueError, sf.RankError), match="other ranks pass other numbers"):
        step(step.init(_params()), {k: x[: 4 + 2 * dist.get_rank()] for k, x in _batch(0).items()})


@distributed(world=1, timeout=800)
def long_on_1(number: int) -> list[Tensor]:
    return _trained(*CASES[number], steps=200)


@distributed(world=3, timeout=800)
def long_on_3(number: int) -> list[Tensor]:
    return _trained(*CASES[number], steps=200)


@distributed(world=8, timeout=800)
def long_on_8(number: int) -> list[Tensor]:
    return _trained(*CASES[number], steps=200)


@pytest.mark.nightly
@pytest.mark.parametrize("world, number", [*((3, n) for n in range(len(CASES))), *((8, n) for n in (1, 2, 3))])
def test_two_hundred_steps(world: int, number: int) -> None:
    (want,) = long_on_1(number)
    for found in {3: long_on_3, 8: long_on_8}[world](number):
        assert all(torch.equal(x, y) for x, y in zip(want, found, strict=True)), CASES[number]


GPT = gpt.Config(vocab_size=65, num_layers=1, d_model=16, num_heads=2, max_len=8)


def _gpt() -> list[Tensor]:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = sf.make_mesh({"dp": ranks}) if ranks > 1 else sf.make_mesh(alone=True)
    zero = sf.Zero(stage=3, persist_elements=0, reduction="canonical")
    rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    step = sf.sharded_step(functools.partial(gpt.loss, GPT), rule, mesh=mesh, zero=zero)
    state = step.init(gpt.init(GPT, sf.key(0)))
    start, stop = Chunks(CHUNKS, ranks, rank).bounds
    for n in range(50):
        tokens = torch.randint(65, (CHUNKS * 2, 9), generator=torch.Generator().manual_seed(n))
        state, _ = step(state, {"tokens": tokens[2 * start : 2 * stop]})
    return [x.full_tensor() for x in tree_leaves(state.params)]


@distributed(world=1, timeout=800)
def gpt_on_1() -> list[Tensor]:
    return _gpt()


@distributed(world=3, timeout=800)
def gpt_on_3() -> list[Tensor]:
    return _gpt()


@distributed(world=8, timeout=800)
def gpt_on_8() -> list[Tensor]:
    return _gpt()


@pytest.mark.nightly
@pytest.mark.parametrize("world", [3, 8])
def test_fifty_steps_of_a_gpt(world: int) -> None:
    (want,) = gpt_on_1()
    for found in {3: gpt_on_3, 8: gpt_on_8}[world]():
        assert all(torch.equal(x, y) for x, y in zip(want, found, strict=True))
