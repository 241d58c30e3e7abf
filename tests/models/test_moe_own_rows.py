"""Covers balance and metrics of own rows (`Experts(axes=None)`): each rank's tokens apart, however a mesh cuts them."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import nn
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers
from shardfn.testing import assert_parity, distributed, shard_rows

NIGHT = pytest.mark.nightly
SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "num_layers": 2,
    "d_model": 8,
    "num_heads": 2,
    "num_kv_heads": 2,
    "d_ff": 6,
    "max_len": 8,
}
BATCH = sf.P(("dp", "ep"), "sp")
TOKENS = 7  # which two ranks cut as 4 and 3


def config(mesh: dict[str, int], *, alone: bool, stacked: bool = False, **changes: Any) -> gpt.Config:
    exchange = layers.AllToAll("ep") if "ep" in mesh and not alone else layers.Local()
    options: dict[str, Any] = {"num": 3, "balance": 0.5, "z": 0.05, "exchange": exchange, **changes}
    body = nn.Ulysses("sp", TOKENS) if "sp" in mesh and not alone else nn.Dense()
    return moe.mixtral_like(**SIZES, stacked=stacked, experts=moe.Experts(**options), attention=body)


def params(c: gpt.Config) -> Any:
    return sf.core.tree_map(lambda x: x.double() * 3, gpt.init(c, sf.key(0)))


def batch_of(rows: int, seed: int) -> dict[str, Tensor]:
    """Rows with unequal numbers of targets that count."""
    drawn = torch.Generator().manual_seed(seed)
    batch = gpt.shifted({"tokens": torch.randint(13, (rows, TOKENS + 1), generator=drawn)})
    skipped = torch.arange(TOKENS)[None] < torch.arange(rows)[:, None] % 4
    return {**batch, "targets": batch["targets"].masked_fill(skipped, sf.data.IGNORED)}


def pieces(x_BT: Tensor, groups: int, cuts: int) -> list[Tensor]:
    """The tokens of each group of rows and part of their sequence."""
    return [piece.flatten() for rows in x_BT.chunk(groups) for piece in rows.chunk(cuts, 1)]


def each_apart(f: Any, groups: int, cuts: int, targets_BT: Tensor) -> Any:
    """A loss of a router over the tokens of each rank and microbatch, weighted by their targets."""
    weights = torch.stack([(t != sf.data.IGNORED).sum().double() for t in pieces(targets_BT, groups, cuts)])
    at = pieces(torch.arange(targets_BT.numel()).view(targets_BT.shape), groups, cuts)

    def loss(routing: layers.Routing, **rest: Any) -> Tensor:
        del rest
        values = torch.stack([f(layers.Routing(*(x[i] for x in routing))) for i in at])
        return (values * weights).sum() / weights.sum()

    return loss


def reference(mesh: dict[str, int], groups: int) -> Any:
    """The loss on one device, whose balance is that of each rank's own rows."""
    cuts = mesh.get("sp", 1)

    def loss(params: Any, batch: dict[str, Tensor]) -> Any:
        both = each_apart(
            lambda r: 0.5 * layers.balance.switch(r) + 0.05 * layers.balance.z(r), groups, cuts, batch["targets"]
        )
        c = config(mesh, alone=True, stacked="pp" in mesh, balance=1.0, z=0.0, balance_loss=both)
        return gpt.loss(c, params, batch)

    return loss


MESHES: list[Any] = [
    pytest.param({"ep": 2}, {}, marks=NIGHT),
    ({"sp": 2}, {}),
    pytest.param({"tp": 2}, {}, marks=NIGHT),
    ({"tp": 2}, {"sequence": True}),
    ({"pp": 2}, {}),
]
LARGER = [
    ({"dp": 2, "sp": 2}, {}),
    ({"ep": 2, "tp": 2}, {"sequence": True}),
    ({"sp": 2, "tp": 2}, {"sequence": True}),
    ({"pp": 2, "ep": 2}, {}),
    ({"pp": 2, "sp": 2}, {}),
    ({"ep": 2, "sp": 2}, {}),
]


def made(mesh: dict[str, int]) -> Any:
    return sf.make_mesh({"pp": 1, "dp": 1, "ep": 1, "sp": 1, "tp": 1, **mesh}, device="cpu")


def check(mesh: dict[str, int], how: dict[str, Any], jit: bool) -> None:
    """Two steps of two microbatches."""
    c, groups, num = config(mesh, alone=False, stacked="pp" in mesh), 2 * mesh.get("dp", 1) * mesh.get("ep", 1), 2
    if "pp" in mesh:
        loss: Any = sf.pipeline(*gpt.stages(c, axis="tp", **how), axis="pp", num_microbatches=num)
    else:
        loss = sf.accumulate(functools.partial(gpt.loss, c, axis="tp", **how), num)
    with made(mesh) as whole:
        assert_parity(
            sf.jit(loss, backend="graph") if jit else loss,
            sf.optim.sgd(0.1, momentum=0.9),
            params(c),
            [batch_of(2 * groups, seed) for seed in range(2)],
            reference=reference(mesh, groups),
            mesh=whole,
            specs=gpt.specs(c, tp="tp", pp="pp" if "pp" in mesh else None),
            batch=BATCH,
        )


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("mesh, how", MESHES, ids=str)
@pytest.mark.parametrize("jit", [False, True])
def test_balance_of_own_rows_is_that_of_each_rank_apart(mesh: Any, how: Any, jit: bool) -> None:
    check(mesh, how, jit)


@NIGHT
@distributed(world=4, timeout=300)
@pytest.mark.parametrize("mesh, how", LARGER, ids=str)
@pytest.mark.parametrize("jit", [False, True])
def test_balance_of_own_rows_where_two_axes_cut(mesh: Any, how: Any, jit: bool) -> None:
    check(mesh, how, jit)


@pytest.mark.day("{'sp': 2}-{}")
@distributed(world=2)
@pytest.mark.parametrize("mesh, how", MESHES[:-1], ids=str)
def test_metrics_of_own_rows_are_means_over_the_ranks(mesh: Any, how: Any) -> None:
    c, groups, seen = config(mesh, alone=False), mesh.get("ep", 1), list[layers.Routing]()

    def noted(routing: layers.Routing, **rest: Any) -> Tensor:
        seen.append(routing)
        return layers.balance.switch(routing, **rest)

    batch = batch_of(4, 0)
    gpt.loss(config(mesh, alone=True, balance_loss=noted), params(c), batch)
    at = pieces(torch.arange(4 * TOKENS).view(4, TOKENS), groups, mesh.get("sp", 1))
    apart = [[layers.Routing(*(x[i] for x in routing)) for i in at] for routing in seen]
    loads = [layers.load(r) for of_layer in apart for r in of_layer]
    want = {name: sum(x[name][0] for x in loads) / sum(x[name][1] for x in loads) for name in loads[0]}
    terms = [0.5 * layers.balance.switch(r) + 0.05 * layers.balance.z(r) for of_layer in apart for r in of_layer]
    # As the loss: by the targets of each rank.
    targets = pieces(batch["targets"], groups, mesh.get("sp", 1))
    weights = torch.stack([(t != sf.data.IGNORED).sum().double() for t in targets])
    want["balance"] = (torch.stack(terms).view(len(seen), -1).mean(0) * weights).sum() / weights.sum()
    with made(mesh) as whole:
        step = sf.sharded_step(
            functools.partial(moe.loss, c, axis="tp", **how),
            sf.optim.sgd(0.1),
            mesh=whole,
            specs=gpt.specs(c, tp="tp"),
            batch=BATCH,
            has_aux=True,
        )
        _, metrics = step(step.init(params(c)), shard_rows(batch, BATCH, whole))
    assert len(seen) == 2 and len(at) == groups * mesh.get("sp", 1)
    for name, value in want.items():
        torch.testing.assert_close(metrics[name].double(), value, rtol=1e-6, atol=1e-9)
