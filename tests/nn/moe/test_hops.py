"""Covers hops of an exchange: two networks, and rows dealt over ranks with the same tokens. Bits, bytes, messages."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.collectives import all_gather_rows, bind_mesh, psum_scatter_rows
from shardfn.nn import moe
from shardfn.testing import distributed

D, F, BOTH = 6, 5, ("node", "gpu")
ONE, TWO = moe.AllToAll(BOTH), moe.AllToAll(BOTH, hierarchical=True)


def problem(E: int, lengths: list[int], push: float) -> tuple[Any, list[dict[str, Tensor]]]:
    """Parameters, and the tokens of each rank. `push` sends all tokens to the first expert."""
    made = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=made, dtype=torch.float64)
    params = {"router": draw(E, D), "experts": {"w_gate_up": draw(E, 2, F, D), "w_down": draw(E, D, F)}}
    toward = torch.zeros(E, dtype=torch.float64)
    toward[0] = push
    return params, [{"x": draw(n, D), "c": draw(n, D), "push": toward.expand(n, E)} for n in lengths]


def loss(params: Any, batch: dict[str, Tensor], *, k: int, exchange: Any) -> sf.WeightedMean:
    routing = moe.top_k(batch["x"] @ params["router"].t() + batch["push"], k)
    y = moe.apply(moe.swiglu_experts, params["experts"], batch["x"], routing, exchange=exchange)
    return sf.WeightedMean((y * batch["c"]).sum(), torch.tensor(float(len(y)), dtype=torch.float64))


def moved(exchange: Any, mesh: sf.Mesh, params: Any, batch: Any, *, jit: bool = False, k: int = 2, **how: Any) -> Any:
    """The loss and new parameters of a step, and its traffic by operation and axes."""
    f: Any = functools.partial(loss, k=k, exchange=exchange)
    f = sf.remat(f) if how.pop("remat", False) else f
    step = sf.sharded_step(
        sf.jit(f, backend="graph") if jit else f,
        sf.optim.sgd(1.0),
        mesh=mesh,
        specs={"router": sf.P(), "experts": exchange.spec},
        batch=sf.P(BOTH),
        **how,
    )
    state, _ = step(step.init(sf.core.tree_map(torch.clone, params)), batch)
    with sf.count_traffic() as traffic:
        state, metrics = step(state, batch)
    sent = {axes: tuple(n) for (op, axes), n in traffic.by_op.items() if op == "ragged_all_to_all"}
    return sf.core.tree_leaves((sf.unshard(state.params), metrics["loss"])), sent


def same(one: Any, two: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@distributed(world=4)
def test_two_hops_have_the_bits_of_one() -> None:
    """Five experts and none on the last rank, ranks without tokens, an expert with all tokens."""
    with sf.make_mesh({"node": 2, "gpu": 2}, device="cpu") as mesh:
        for push, lengths in ((0.0, [7, 0, 1, 4]), (50.0, [1, 6, 2, 0])):
            params, batches = problem(5, lengths, push)
            (one, _), (two, _) = (moved(how, mesh, params, batches[mesh.rank]) for how in (ONE, TWO))
            assert same(one, two), (push, lengths)


@pytest.mark.nightly
@distributed(world=[4, 8], timeout=600)
@pytest.mark.parametrize("jit", [False, True])
def test_two_hops_under_stages_and_recomputation(world: int, jit: bool) -> None:
    """Nodes major or minor in the mesh, and experts that no axis divides."""
    for shape in ({"node": world // 2, "gpu": 2}, {"gpu": world // 2, "node": 2}):
        with sf.make_mesh(shape, device="cpu") as mesh:
            for stage, remat, E in ((0, False, 8), (1, True, 7), (3, True, 11)):
                params, batches = problem(E, [4] * world if jit else list(range(world)), 0.0)
                how: dict[str, Any] = {"zero": sf.Zero(stage=stage, axis=BOTH, persist_elements=0), "remat": remat}
                mine = batches[mesh.coords["node"] * mesh.shape["gpu"] + mesh.coords["gpu"]]
                one, _ = moved(ONE, mesh, params, mine, jit=jit, **how)
                two, _ = moved(TWO, mesh, params, mine, jit=jit, **how)
                assert same(one, two), (shape, stage)


def rows_between(params: Any, batches: list[dict[str, Tensor]], E: int, k: int) -> Tensor:
    """The rows from each of four ranks to each, by a loop over choices."""
    table, owner = torch.zeros(4, 4, dtype=torch.int64), torch.arange(E).div(-(-E // 4), rounding_mode="floor")
    for i, batch in enumerate(batches):
        for e in (batch["x"] @ params["router"].t() + batch["push"]).topk(k).indices.flatten().tolist():
            table[i, owner[e]] += 1
    return table


@distributed(world=4)
def test_rows_cross_between_nodes_once_and_then_inside() -> None:
    """On nodes of two ranks. A transfer of n ranks has n - 1 messages: 1 + 1 in place of 3."""
    params, batches = problem(8, [9, 3, 0, 5], 0.0)
    params = sf.core.tree_map(lambda x: x * 0, params)  # so that the first step changes no choice
    params["router"] = torch.randn(8, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    table, row = rows_between(params, batches, 8, 2).view(2, 2, 2, 2), D * 8
    with sf.make_mesh({"node": 2, "gpu": 2}, device="cpu") as mesh:
        a, b = mesh.coords["node"], mesh.coords["gpu"]
        _, one = moved(ONE, mesh, params, batches[mesh.rank])
        _, two = moved(TWO, mesh, params, batches[mesh.rank])
    far = table[a, b, 1 - a].sum(), table[1 - a, b, a].sum()
    near = table[:, b, a, 1 - b].sum(), table[:, 1 - b, a, b].sum()
    all_ = table[a, b].sum() - table[a, b, a, b], table[:, :, a, b].sum() - table[a, b, a, b]
    # There, back, and there in the backward: the gradient of tokens is not asked for.
    sent = [(3, int(2 * there + back) * row) for there, back in (all_, far, near)]
    assert one == {BOTH: sent[0]}
    assert two == {("node",): sent[1], ("gpu",): sent[2]}


@pytest.mark.nightly
@distributed(world=4)
def test_two_hops_drop_the_choices_of_one() -> None:
    params, batches = problem(4, [6, 2, 4, 3], 0.0)
    with sf.make_mesh({"node": 2, "gpu": 2}, device="cpu") as mesh:
        for room in (0, 5):
            one, two = (
                moved(moe.AllToAll(BOTH, rows=room, overflow="drop", hierarchical=h), mesh, params, batches[mesh.rank])
                for h in (False, True)
            )
            assert same(one[0], two[0]), room


@distributed(world=2)
def test_gathers_and_sums_of_rows_are_transposes() -> None:
    """Rank 0 has two rows, rank 1 three; rows beyond have no part."""
    sizes, made = torch.tensor([2, 3]), torch.Generator().manual_seed(0)
    own, whole = (torch.randn(2, n, 3, generator=made, dtype=torch.float64) for n in (4, 5))
    with sf.make_mesh({"tp": 2}, device="cpu") as mesh, bind_mesh(mesh):
        at = dist.get_rank()
        x, y = own[at].clone().requires_grad_(), whole[at].clone().requires_grad_()
        gathered, summed = all_gather_rows(x, sizes, "tp"), psum_scatter_rows(y, sizes, "tp", rows=4)
        assert torch.equal(gathered, torch.cat([own[0, :2], own[1, :3]]))
        wanted = whole.sum(0).split([2, 3])[at]
        assert torch.equal(summed, torch.cat([wanted, wanted.new_zeros(4 - len(wanted), 3)]))
        (dx,) = torch.autograd.grad(gathered, x, whole[at])
        assert torch.equal(dx, summed.detach())
        (dy,) = torch.autograd.grad(summed, y, own[at])
        assert torch.equal(dy, gathered.detach())


def test_axes_that_two_networks_or_dealt_rows_cannot_have_are_refused() -> None:
    with pytest.raises(ValueError, match="axis must be several mesh axes, nodes first"):
        moe.AllToAll("ep", hierarchical=True)
    with pytest.raises(ValueError, match=r"experts are cut along \['tp'\]"):
        moe.AllToAll(("ep", "tp"), dealt="tp")
