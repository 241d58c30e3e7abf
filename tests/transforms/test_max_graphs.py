"""Covers jit(max_graphs=): steps, their halves and sharded functions that have more shapes than graphs."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.core import tree_leaves
from shardfn.testing import distributed

# Rows of calls: with two graphs 4 evicts 3, 3 evicts 2 and the last 2 evicts 4.
ROWS = (2, 3, 2, 4, 3, 2, 2)


def _loss(params: dict, x: Tensor) -> Tensor:
    return (torch.tanh(x @ params["w"]) + params["b"]).square().mean()


def _params() -> dict:
    g = torch.Generator().manual_seed(0)
    return {"w": torch.randn(5, 3, generator=g), "b": torch.zeros(3)}


def _weighted(params: dict, x: Tensor) -> sf.WeightedMean:
    return sf.WeightedMean(_loss(params, x) * len(x), torch.tensor(float(len(x))))


def _batch(mesh: sf.Mesh, call: int, rows: int) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(7 * call + mesh.rank))


def _counts(info: Any) -> tuple[int, int, int, int, int]:
    return info.hits, info.misses, info.currsize, info.evictions, info.maxsize


def _assert_same(got: Any, want: Any) -> None:
    """Asserts that parameters and the state of the optimizer have the same bits on this rank."""
    pairs = zip(*(tree_leaves(sf.unshard((x.params, x.opt_state))) for x in (got, want)), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


def _step(loss: Any, mesh: sf.Mesh) -> Any:
    return sf.sharded_step(loss, optim.adam(0.1), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))


@pytest.mark.nightly
@distributed(world=2)
def test_three_shapes_in_two_graphs_have_the_bits_of_eager() -> None:
    mesh = sf.make_mesh({"dp": 2})
    eager, jitted = (_step(f, mesh) for f in (_loss, sf.jit(_loss, backend="graph", max_graphs=2)))
    want, state = eager.init(_params()), jitted.init(_params())
    for call, rows in enumerate(ROWS):
        batch = _batch(mesh, call, rows)
        want, metrics = eager(want, batch)
        state, found = jitted(state, batch)
        _assert_same(state, want)
        assert all(torch.equal(found[name], x) for name, x in metrics.items())
    assert _counts(jitted.cache_info()) == (2, 5, 2, 3, 2)


@pytest.mark.nightly
@distributed(world=2)
def test_a_rank_that_evicts_more_than_others_captures_with_them() -> None:
    mesh = sf.make_mesh({"dp": 2})
    eager, jitted = (_step(f, mesh) for f in (_weighted, sf.jit(_weighted, backend="graph", max_graphs=2)))
    want, state = eager.init(_params()), jitted.init(_params())
    for call, rows in enumerate(ROWS):
        batch = _batch(mesh, call, rows if mesh.rank else 5)  # rank 0 needs one graph
        want, _ = eager(want, batch)
        state, _ = jitted(state, batch)
        _assert_same(state, want)
    assert _counts(jitted.cache_info()) == ((2, 5, 2, 3, 2) if mesh.rank else (2, 5, 1, 0, 2))


@distributed(world=2)
def test_ranks_with_other_numbers_of_graphs_are_refused() -> None:
    mesh = sf.make_mesh({"dp": 2})
    step = _step(sf.jit(_loss, backend="graph", max_graphs=2 + mesh.rank), mesh)
    with pytest.raises(sf.RankError, match=r"(?s)rank 0: .*max_graphs 2.*rank 1: .*max_graphs 3"):
        step.init(_params())


@pytest.mark.nightly
def test_the_halves_of_a_step_share_its_graphs() -> None:
    step = sf.sharded_step(sf.jit(_loss, backend="graph", max_graphs=3), optim.sgd(0.1))
    eager = sf.sharded_step(_loss, optim.sgd(0.1))
    state, want = step.init(_params()), eager.init(_params())
    for call, rows in enumerate((2, 3, 2, 4, 3)):  # and the update, which is used at every call
        batch = _batch(step.mesh, call, rows)
        grads, _ = step.gradients(state, batch)
        state, _ = step.update(state, grads)
        want, _ = eager(want, batch)
        _assert_same(state, want)
    assert _counts(step.cache_info()) == (5, 5, 3, 2, 3)


@pytest.mark.nightly
def test_a_sharded_function_has_the_limit_of_graphs_of_its_jit() -> None:
    f = sf.sharded(sf.jit(lambda w, x, by: w * x * by, backend="graph", max_graphs=1))
    w = f.init(torch.ones(3))
    for rows, by in ((2, 2), (2, 2), (4, 2), (4, 3)):
        assert torch.equal(f(w, torch.ones(rows, 3), by), torch.full((rows, 3), float(by)))
    assert _counts(f.cache_info()) == (1, 3, 1, 2, 1)
