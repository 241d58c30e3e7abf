"""Covers experts on ranks with unequal numbers of rows, or none: capacities and balance losses of the whole batch."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers
from shardfn.testing import distributed

ROWS = [(3, 3), (4, 2), (5, 1), (6, 0), (0, 6)]
EXPERTS: dict[str, dict[str, Any]] = {
    "capacity": {"capacity": 0.7},
    "z": {"z": 0.1, "balance": 0.5},
    "sequence": {"balance": 0.5, "balance_loss": layers.balance.sequence},
    "gathered weights": {"capacity": 0.7, "exchange": layers.GatherExperts("dp")},
    "sent tokens": {"capacity": 0.7, "exchange": layers.AllToAll("dp")},
}


def config(name: str, axes: sf.core.Axes) -> gpt.Config:
    options: dict[str, Any] = {"num": 3, "top_k": 2, **EXPERTS[name], "axes": axes}
    options |= {} if axes else {"exchange": layers.Local()}
    sizes: dict[str, Any] = {"vocab_size": 11, "num_layers": 2, "d_model": 8, "num_heads": 2, "d_ff": 6, "max_len": 16}
    return gpt.Config(**sizes, experts=moe.Experts(**options))


def params_of(c: gpt.Config) -> Any:
    g = torch.Generator().manual_seed(0)
    return sf.tree_map(lambda x: torch.randn(x.shape, generator=g, dtype=torch.float64) * 0.5, gpt.init(c, sf.key(0)))


def batch_of(*, padded: bool) -> dict[str, Tensor]:
    """Six rows; padding gives them unequal numbers of targets."""
    tokens = torch.randint(11, (6, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) < torch.tensor([[9], [3], [9], [5], [2], [7]])
    return gpt.shifted({"tokens": tokens} | ({"mask": mask} if padded else {}))


def check(name: str, rows: tuple[int, int], mesh: sf.Mesh, *, padded: bool, jit: bool) -> None:
    params, batch = params_of(config(name, None)), batch_of(padded=padded)
    at = sum(rows[: mesh.coords["dp"]])
    own = {k: x[at : at + rows[mesh.coords["dp"]]] for k, x in batch.items()}
    c = config(name, "dp")
    loss: Any = functools.partial(gpt.loss, c, axis="tp")
    step = sf.sharded_step(
        sf.jit(loss, backend="graph") if jit else loss, sf.optim.sgd(1.0), mesh=mesh, specs=gpt.specs(c, tp="tp")
    )
    state, metrics = step(step.init(params), own)

    def whole(p: Any, b: Any) -> Tensor:
        found = gpt.loss(config(name, None), p, b)
        return found.total / found.weight

    value, grads = sf.value_and_grad(whole)(params, batch)
    torch.testing.assert_close(metrics["loss"], value, rtol=1e-12, atol=1e-12)
    want = sf.tree_map(lambda x, g: x - g, params, grads)
    for path, a, b in zip(
        sf.core.tree_paths(want, "params"),
        sf.core.tree_leaves(sf.unshard(state.params)),
        sf.core.tree_leaves(want),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.day("eager-capacity", "eager-sequence", "eager-sent tokens")
@distributed(world=2)
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("how", ["eager", "jit", "padded"])
def test_ranks_with_unequal_rows_equal_one_device(name: str, how: str) -> None:
    with sf.make_mesh({"dp": 2, "tp": 1}, device="cpu") as mesh:
        for rows in ROWS if how == "eager" else [(4, 2), (6, 0)]:
            check(name, rows, mesh, padded=how == "padded", jit=how == "jit")


@pytest.mark.nightly
@distributed(world=4, timeout=300)
@pytest.mark.parametrize("rows", [(4, 2), (6, 0)], ids=str)
@pytest.mark.parametrize("jit", [False, True])
def test_a_pipeline_of_ranks_with_unequal_rows_equals_one_device(rows: tuple[int, int], jit: bool) -> None:
    with sf.make_mesh({"pp": 2, "dp": 2}, device="cpu") as mesh:
        batch, c = batch_of(padded=False), config("capacity", "dp")
        at = sum(rows[: mesh.coords["dp"]])
        own = {k: x[at : at + rows[mesh.coords["dp"]]] for k, x in batch.items()}
        first, layer, last = gpt.stages(c)
        loss: Any = sf.pipeline(first, [layer] * c.num_layers, last, num_microbatches=1)
        step = sf.sharded_step(sf.jit(loss, backend="graph") if jit else loss, sf.optim.sgd(1.0), mesh=mesh)
        _, metrics = step(step.init(params_of(c)), own)
        want = gpt.loss(config("capacity", None), params_of(c), batch)
        torch.testing.assert_close(metrics["loss"], want.total / want.weight, rtol=1e-12, atol=1e-12)


@distributed(world=4)
@pytest.mark.parametrize(
    "change",
    [{"exchange": layers.AllToAll("tp")}, {"balance_loss": layers.balance.sequence}],
    ids=["sequence", "balance"],
)
def test_a_rank_without_rows_under_tensor_parallelism_equals_one_device(change: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"vocab_size": 11, "num_layers": 1, "d_model": 8, "num_heads": 2, "d_ff": 6, "max_len": 16}
    c = gpt.Config(**sizes, experts=moe.Experts(num=4, **change))
    params, batch = params_of(c), batch_of(padded=False)
    with sf.make_mesh({"dp": 2, "tp": 2}, device="cpu") as mesh:
        own = {k: x[:0] if mesh.coords["dp"] else x for k, x in batch.items()}
        loss = functools.partial(gpt.loss, c, axis="tp", sequence="exchange" in change)
        step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, specs=gpt.specs(c, tp="tp"))
        _, metrics = step(step.init(params), own)
    want = gpt.loss(c, params, batch)
    torch.testing.assert_close(metrics["loss"], want.total / want.weight, rtol=1e-12, atol=1e-12)


def test_a_rank_without_tokens_is_not_in_the_means_of_a_router() -> None:
    routing = layers.top_k(torch.tensor([[2.0, 1, 0], [0, 0, 4]]), 1)
    none = layers.load(layers.Routing(*(x[:0] for x in routing)))
    assert [none[name][1].item() for name in ("max_load", "dead")] == [0.0, 0.0]
    assert [layers.load(routing)[name][1].item() for name in ("max_load", "dead")] == [1.0, 1.0]
