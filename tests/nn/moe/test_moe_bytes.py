"""Covers the bytes of a layer's exchanges: as counted, by the formula of the numbers of rows, and within the plan's.

Tokens of padding are in no number.
"""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.nn import moe
from shardfn.testing import distributed

D, F, E, K, S = 6, 5, 4, 2, 8
AXES = ("ep",)


def loss(params: Any, batch: dict[str, Tensor], *, exchange: Any) -> Tensor:
    x = batch["x"] * params["scale"]  # so that rows have a gradient, which goes back
    routing = moe.top_k(x @ params["router"].t() + batch["push"], K, mask=batch["mask"])
    return moe.apply(moe.swiglu_experts, params["experts"], x, routing, exchange=exchange).square().mean()


def problem(push: float, padding: int) -> tuple[Any, list[dict[str, Tensor]]]:
    """Parameters, and a batch for each rank, whose last tokens are padding: on each rank one more."""
    made = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=made, dtype=torch.float64)
    params = {"router": draw(E, D), "experts": {"w_gate_up": draw(E, 2, F, D), "w_down": draw(E, D, F)}}
    params["scale"] = torch.ones(D, dtype=torch.float64)
    toward = torch.zeros(S, E, dtype=torch.float64)
    toward[:, :2] = push
    tokens = [S - padding - i if padding else S for i in range(4)]
    return params, [{"x": draw(S, D), "push": toward, "mask": torch.arange(S) < num} for num in tokens]


def rows_between(params: Any, batches: list[dict[str, Tensor]], n: int) -> Tensor:
    """The rows from each rank to each, by a loop over choices."""
    table = torch.zeros(n, n, dtype=torch.int64)
    owner = torch.arange(E).div(-(-E // n), rounding_mode="floor")
    for i, batch in enumerate(batches[:n]):
        logits = (batch["x"] * params["scale"]) @ params["router"].t() + batch["push"]
        for e in logits[batch["mask"]].topk(K).indices.flatten().tolist():
            table[i, owner[e]] += 1
    return table


def expected(table: Tensor, r: int) -> int:
    """Two exchanges forward and two backward: rows that leave this rank, and those of others that go back."""
    leaving, others = table[r].sum() - table[r, r], table[:, r].sum() - table[r, r]
    return 2 * int(leaving + others) * D * 8


@pytest.mark.day("False-0.0-3-2")
@distributed(world=[2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("push", "padding"), [(0.0, 0), (50.0, 0), (-50.0, 0), (0.0, 3), (0.0, S)])
@pytest.mark.parametrize("jit", [False, True])
def test_counted_bytes_are_those_of_the_counts_and_under_the_bound(
    world: int, push: float, padding: int, jit: bool
) -> None:
    """Padding sends nothing, and a batch of padding alone no row at all."""
    exchange, (params, batches) = moe.AllToAll("ep"), problem(push, padding)
    cut = dict.fromkeys(params["experts"], exchange.spec)
    f: Any = functools.partial(loss, exchange=exchange)
    with sf.make_mesh({"ep": world}, device="cpu") as mesh:
        step = sf.sharded_step(
            sf.jit(f, backend="graph") if jit else f,
            sf.optim.sgd(0.1),
            mesh=mesh,
            specs={"router": sf.P(), "experts": cut, "scale": sf.P()},
            batch=sf.P("ep"),
        )
        state, own = step.init(params), batches[dist.get_rank()]
        state, _ = step(state, own)  # first calls compare the ranks' programs
        table = rows_between(sf.core.tree_map(sf.unshard, state.params), batches, world)
        with sf.count_traffic() as traffic:
            planned = step.lower(state, own).cost_analysis().traffic if jit else None
            step(state, own)
        calls, sent = traffic.by_op["ragged_all_to_all", AXES]
        assert (calls, sent) == (4, expected(table, dist.get_rank()))
        assert traffic.by_op["all_gather", AXES][1] >= 8 * (E + 1) * (world - 1)
        if planned is not None:
            count, most = planned.by_op["ragged_all_to_all", AXES]
            # All rows of the operands: those of the choices, and those for which there is room.
            room = world * S * min(K, E // world)
            assert count == 4 and most == 2 * (S * K + room) * D * 8 >= sent
