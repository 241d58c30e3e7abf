"""Covers where tokens meet their experts: every exchange equals one device, in values and gradients of every leaf."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.collectives import bind_mesh
from shardfn.nn import moe
from shardfn.testing import distributed

_D, _F = 6, 5


def _params(E: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(0)
    shapes = {"w_gate_up": (E, 2, _F, _D), "w_down": (E, _D, _F)}
    experts = {k: torch.randn(s, generator=made, dtype=torch.float64) / 3 for k, s in shapes.items()}
    return {"router": torch.randn(E, _D, generator=made, dtype=torch.float64), "experts": experts}


def _loss(params: Any, batch: dict[str, Tensor], *, k: int, exchange: Any) -> sf.WeightedMean:
    x = batch["x"]
    routing = moe.top_k(x @ params["router"].t() + batch["push"], k)
    y = moe.apply(moe.swiglu_experts, params["experts"], x, routing, exchange=exchange)
    return sf.WeightedMean((y * batch["c"]).sum(), torch.tensor(float(len(x)), dtype=torch.float64))


def _batch(lengths: list[int], E: int, push: str) -> list[dict[str, Tensor]]:
    made, out = torch.Generator().manual_seed(1), []
    for n in lengths:
        x, c = torch.randn(2, n, _D, generator=made, dtype=torch.float64).unbind(0)
        extra = torch.zeros(n, E, dtype=torch.float64)
        extra[:, 0] += 50.0 * (push == "all on the first")
        extra[:, E - 1] -= 50.0 * (push == "none on the last")
        out.append({"x": x, "c": c, "push": extra})
    return out


def _wanted(params: Any, batches: list[dict[str, Tensor]], k: int) -> tuple[Tensor, Any]:
    """Loss and gradients by a loop over tokens and their choices."""
    params = sf.core.tree_map(lambda x: x.clone().requires_grad_(), params)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        for x, c, push in zip(batch["x"], batch["c"], batch["push"], strict=True):
            probs = (params["router"] @ x + push).softmax(0)
            chosen = probs.topk(k)
            for p, e in zip(chosen.values / chosen.values.sum(), chosen.indices.tolist(), strict=True):
                gate, up = (w @ x for w in params["experts"]["w_gate_up"][e])
                total = total + (p * params["experts"]["w_down"][e] @ (gate.sigmoid() * gate * up) * c).sum()
    loss = total / sum(len(b["x"]) for b in batches)
    leaves, tree = sf.core.tree_flatten(params)
    return loss.detach(), sf.core.tree_unflatten(tree, list(torch.autograd.grad(loss, leaves)))


def _check(
    mesh: sf.Mesh, exchange: Any, lengths: list[int], E: int, k: int, push: str, jit: bool | str = False, **options: Any
) -> None:
    params, batches = _params(E), _batch(lengths, E, push)
    loss, grads = _wanted(params, batches, k)
    cut = {"w_gate_up": exchange.spec, "w_down": exchange.spec}
    f: Any = lambda p, b: _loss(p, b, k=k, exchange=exchange)  # noqa: E731
    f = sf.remat(f) if options.pop("remat", False) else f
    step = sf.sharded_step(
        sf.jit(f, backend="graph" if jit is True else jit) if jit else f,
        sf.optim.sgd(1.0),
        mesh=mesh,
        specs={"router": sf.P(), "experts": cut},
        batch=sf.P("ep"),
        **options,
    )
    state, metrics = step(step.init(params), batches[mesh.rank])
    torch.testing.assert_close(metrics["loss"].double(), loss, rtol=1e-6, atol=1e-7)
    moved = sf.core.tree_map(lambda a, b: a - b.full_tensor(), params, state.params)
    torch.testing.assert_close(moved, grads, rtol=1e-12, atol=1e-12)


@pytest.mark.day(1)
@distributed(world=2)
@pytest.mark.parametrize("exchange", [moe.AllToAll("ep"), moe.GatherExperts("ep"), moe.Local()], ids=repr)
@pytest.mark.parametrize("push", ["", "all on the first", "none on the last"])
def test_two_ranks_equal_a_loop_over_tokens(exchange: Any, push: str) -> None:
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        _check(mesh, exchange, [5, 3], 3, 2, push)


@pytest.mark.day("lengths0")
@distributed(world=2)
@pytest.mark.parametrize("lengths", [[0, 4], [7, 0], [1, 9]])
def test_ranks_without_tokens_take_part(lengths: list[int]) -> None:
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        _check(mesh, moe.AllToAll("ep"), lengths, 4, 2, "")


@pytest.mark.day("0-1", "1-1", "2-1")
@distributed(world=[1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_of_experts_and_stages_equal_a_loop_over_tokens(world: int, stage: int) -> None:
    """Five experts, and none on the last of four ranks; one rank has no token, and another one few."""
    zero = sf.Zero(stage=stage, axis="ep", persist_elements=0)
    lengths = [7, 0, 1, 4][:world]
    with sf.make_mesh({"ep": world}, device="cpu") as mesh:
        for remat in (False, True):
            _check(mesh, moe.AllToAll("ep"), lengths, 5, 2, "", remat=remat, zero=zero)
        _check(mesh, moe.AllToAll("ep"), lengths, 5, 2, "all on the first", zero=zero)


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("lengths", [[0, 1000], [1000, 0]])
def test_a_rank_with_all_tokens(lengths: list[int]) -> None:
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        _check(mesh, moe.AllToAll("ep"), lengths, 4, 2, "none on the last", remat=True)


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("jit", [False, True])
def test_two_runs_have_the_same_bits(jit: bool) -> None:
    """Rows are added in a fixed order: forward, and in the gradients of tokens, weights and experts."""
    params = _params(5)
    found = []
    for _ in range(2):
        f: Any = lambda p, b: _loss(p, b, k=3, exchange=moe.AllToAll("ep"))  # noqa: E731
        with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
            step = sf.sharded_step(
                sf.jit(f, backend="graph") if jit else f,
                sf.optim.adamw(0.1),
                mesh=mesh,
                specs={"router": sf.P(), "experts": dict.fromkeys(params["experts"], sf.P("ep"))},
                batch=sf.P("ep"),
            )
            state = step.init(sf.core.tree_map(torch.clone, params))
            for n in (9, 9):
                state, metrics = step(state, _batch([n, n], 5, "")[dist.get_rank()])
            found.append(sf.core.tree_leaves((sf.unshard(state.params), metrics["loss"])))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.day("all on the first")
@distributed(world=2)
@pytest.mark.parametrize("push", ["", "all on the first"])
def test_a_captured_step_takes_any_routing(push: str) -> None:
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        _check(mesh, moe.AllToAll("ep"), [4, 4], 3, 2, push, jit=True)


@pytest.mark.nightly
@distributed(world=2, timeout=600)
@pytest.mark.parametrize("push", ["", "all on the first"])
def test_a_compiled_step_takes_any_routing(push: str) -> None:
    """Enough rows that arithmetic on them would be compiled."""
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        _check(mesh, moe.AllToAll("ep"), [900, 900], 3, 2, push, jit="inductor")


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("lengths", [[7, 1], [1, 7]])
def test_a_captured_step_has_room_for_the_tokens_of_unequal_ranks(lengths: list[int]) -> None:
    """All experts of the first rank come to it, whose own tokens are few or many."""
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        _check(mesh, moe.AllToAll("ep", tokens=8), lengths, 4, 2, "all on the first", jit=True)
        if lengths[0] == 1:
            for exchange, remedy in (
                (moe.AllToAll("ep"), "takes ranks to have equal numbers of tokens: give AllToAll"),
                (moe.AllToAll("ep", tokens=3), "room for 6; give AllToAll"),
            ):
                with pytest.raises(ValueError, match=rf"rows come to rank 0 of 'ep'.*{remedy}\(tokens=\) the most"):
                    _check(mesh, exchange, lengths, 4, 2, "all on the first", jit=True)


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("graph", [False, True])
def test_more_rows_than_room_end_the_step_on_all_ranks_and_not_the_next(graph: bool) -> None:
    exchange, params = moe.AllToAll("ep", rows=6), _params(4)
    f: Any = lambda p, b: _loss(p, b, k=1, exchange=exchange)  # noqa: E731
    specs = {"router": sf.P(), "experts": dict.fromkeys(params["experts"], exchange.spec)}
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        loss = sf.jit(f, backend="graph") if graph else f
        step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, specs=specs, batch=sf.P("ep"))
        state = step.init(params)
        full = _batch([4, 4], 4, "all on the first")[dist.get_rank()]
        with pytest.raises(ValueError, match="moe: 8 rows come to rank 0 of 'ep', which has room for 6"):
            step(state, full)
        full["push"][:, 3] += 100.0 * dist.get_rank()
        state, metrics = step(state, full)
        assert metrics["loss"].isfinite()


@pytest.mark.day("3", "5")
@distributed(world=2)
@pytest.mark.parametrize("room", [0, 1, 2, 3, 5, 6, 7, 8])
def test_overflow_drops_the_last_choices_of_each_expert_in_the_order_of_all_tokens(room: int) -> None:
    chosen = torch.tensor([[0], [1], [1], [0], [2], [1], [1], [0], [3], [1], [2], [2]])
    made = torch.Generator().manual_seed(2)
    params = {k: torch.randn(s, generator=made) for k, s in (("w_up", (4, 3, 2)), ("w_down", (4, 2, 3)))}
    x = torch.randn(12, 2, generator=made)

    def run(exchange: Any, experts: Tensor, x: Tensor, own: Any) -> Tensor:
        routing = moe.Routing(experts, torch.ones(experts.shape), torch.ones(len(x), 4), torch.ones(len(x), 4))
        return moe.apply(moe.gelu_experts, own, x, routing, exchange=exchange)

    left = dict[int, int]()
    for experts in ((0, 1), (2, 3)):  # of each rank
        totals = {e: int((chosen == e).sum()) for e in experts}
        capacity = max(c for c in range(9) if sum(min(t, c) for t in totals.values()) <= room)
        left |= {e: min(t, capacity) for e, t in totals.items()}
    kept = chosen.clone()
    for i, e in enumerate(chosen[:, 0].tolist()):
        kept[i] = e if left[e] > 0 else -1
        left[e] -= 1
    wanted = run(moe.Local(), kept, x, params)
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh, bind_mesh(mesh):
        own = {k: v.chunk(2)[dist.get_rank()] for k, v in params.items()}
        rows = slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
        got = run(moe.AllToAll("ep", rows=room, overflow="drop"), chosen[rows], x[rows], own)
        torch.testing.assert_close(got, wanted[rows])
