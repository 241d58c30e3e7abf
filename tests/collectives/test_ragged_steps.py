"""Covers `ragged_all_to_all` in a loss: steps equal to one device, remat, types, failures, memory."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.collectives import AxisTypeError
from shardfn.collectives.transport._channel import LOSS_CHANNELS
from shardfn.collectives.transport._memory import RINGS
from shardfn.collectives.transport._sharing import wished
from shardfn.memory import ledger
from shardfn.testing import distributed

_D, _E = 3, 4


def _params() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = {"router": (_D, _E), "in": (_D, _D), "experts": (_E, _D, _D)}
    return {k: torch.randn(shape, generator=made, dtype=torch.float64) for k, shape in shapes.items()}


def _loss(params: dict[str, Tensor], x_TD: Tensor) -> Tensor:
    """Each token goes to its best expert, on the rank that holds it, and comes back scaled by its probability."""
    n, t = sf.axis_size("ep"), len(x_TD)
    h_TD = x_TD @ params["in"]
    gate_T, chosen_T = torch.softmax(h_TD @ params["router"], 1).max(1)
    order_T = chosen_T.argsort(stable=True)
    sizes = torch.zeros(n, dtype=torch.int64).scatter_add(0, chosen_T // (_E // n), torch.ones_like(chosen_T))
    starts = sizes.cumsum(0) - sizes
    coming, back = sf.all_to_all(torch.stack([sizes, starts], 1), "ep", split_dim=0, concat_dim=0).unbind(1)
    here = sf.axis_index("ep") * t + torch.zeros_like(sizes)
    room = x_TD.new_zeros(n * t, _D)
    rows_CD = sf.ragged_all_to_all(h_TD[order_T], room, starts, sizes, here, coming, "ep")
    experts_C = sf.ragged_all_to_all(
        chosen_T[order_T] % (_E // n), torch.zeros(n * t, dtype=torch.int64), starts, sizes, here, coming, "ep"
    )
    rows_CD = torch.tanh(torch.einsum("cd,cdf->cf", rows_CD, params["experts"][experts_C]))
    places = torch.arange(n) * t, coming, back, sizes
    y_TD = sf.ragged_all_to_all(rows_CD, torch.zeros_like(x_TD), *places, axis="ep") * gate_T[order_T, None]
    return (y_TD - x_TD[order_T]).square().mean()


def _batches(world: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(4 * world, _D, generator=made, dtype=torch.float64) for _ in range(3)]


def _step(mesh: sf.Mesh, loss: Any, stage: int = 0) -> Any:
    zero = sf.Zero(stage=stage, axis="ep", persist_elements=0)
    specs = {"router": sf.P(), "in": sf.P(), "experts": sf.P("ep")}
    return sf.sharded_step(loss, sf.optim.sgd(0.3), mesh=mesh, specs=specs, batch=sf.P("ep"), zero=zero)


@pytest.mark.day("plain")
@distributed(world=2)
@pytest.mark.parametrize(
    "wrap",
    [
        "plain",
        pytest.param("graph", marks=pytest.mark.nightly),
        pytest.param("inductor", marks=pytest.mark.nightly),
        "remat",
        pytest.param("remat in a graph", marks=pytest.mark.nightly),
    ],
)
def test_a_step_with_experts_is_that_of_one_device(wrap: str) -> None:
    batches, params = _batches(2), _params()
    wanted = []
    for x in batches:
        leaves = {k: v.requires_grad_() for k, v in params.items()}
        value = _loss(leaves, x)
        grads = torch.autograd.grad(value, list(leaves.values()))
        params = {k: (v - 0.3 * g).detach() for (k, v), g in zip(leaves.items(), grads, strict=True)}
        wanted.append(value.detach())
    loss: Any = sf.remat(_loss) if "remat" in wrap else _loss
    if wrap not in ("plain", "remat"):
        loss = sf.jit(loss, backend="inductor" if wrap == "inductor" else "graph")
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        step = _step(mesh, loss, stage=3 if wrap == "plain" else 0)
        state, got = step.init(_params()), []
        for x in batches:
            state, metrics = step(state, x.chunk(2)[dist.get_rank()])
            got.append(metrics["loss"].double())
        torch.testing.assert_close(torch.stack(got), torch.stack(wanted), rtol=1e-6, atol=0)
        torch.testing.assert_close({k: v.full_tensor() for k, v in state.params.items()}, params)


@distributed(world=2)
def test_rows_that_have_come_vary_along_the_axis() -> None:
    one = torch.tensor([1, 1])

    def f(x: Tensor) -> Tensor:
        at = torch.zeros(2, dtype=torch.int64) + sf.axis_index("ep")
        return sf.ragged_all_to_all(x, torch.zeros(2), one - 1, one, at, one, "ep")

    mesh, x = sf.make_mesh({"ep": 2}, device="cpu"), torch.arange(2.0)
    with pytest.raises(AxisTypeError, match="varies along 'ep'"):
        sf.shard_map(f, mesh=mesh, in_specs=(sf.P(),), out_specs=sf.P())(x)
    out = sf.shard_map(f, mesh=mesh, in_specs=(sf.P(),), out_specs=sf.P("ep"))(x)
    assert out.tolist() == [0, 0, 0, 0]
    # All ranks have sent the same x, each to all: its gradient is the sum of theirs.
    total = sf.shard_map(lambda x: sf.psum(f(x).sum(), "ep"), mesh=mesh, in_specs=(sf.P(),), out_specs=sf.P())
    assert sf.grad(lambda x: total(x))(x).tolist() == [4, 0]


@pytest.mark.day("False")
@distributed(world=2)
@pytest.mark.parametrize("graph", [False, True])
def test_places_that_do_not_fit_end_a_step_on_all_ranks_and_not_the_next(graph: bool) -> None:
    one, r = torch.tensor([1, 1]), dist.get_rank()

    def loss(w: Tensor, batch: dict[str, Tensor]) -> Tensor:
        x, at = batch["x"] * w, sf.axis_index("ep") + one - one
        return sf.ragged_all_to_all(x, torch.zeros(2), one - 1, batch["sizes"], at, one, "ep").sum()

    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        inner: Any = sf.jit(loss, backend="graph") if graph else loss
        step = sf.sharded_step(inner, sf.optim.sgd(0.1), mesh=mesh, batch=sf.P("ep"), donate=False)
        state = step.init(torch.ones(1))
        batch = {"x": torch.ones(2), "sizes": one}
        for _ in range(2):
            with pytest.raises(ValueError, match="rank 1 of 'ep' sends 2 rows to rank 0 of 'ep', whose recv_sizes"):
                step(state, batch | {"sizes": torch.tensor([2, 1]) if r else one})
            assert float(step(state, batch)[1]["loss"]) == 2


@pytest.mark.skipif(wished() == "gloo", reason="of the way through memory, which is not wished for")
@distributed(world=2)
def test_the_memory_of_its_channel_is_in_the_ledger_and_ends_with_the_mesh() -> None:
    mesh = sf.make_mesh({"ep": 2}, device="cpu")
    step, (x, *_) = _step(mesh, _loss), _batches(2)
    state = step.init(_params())
    with ledger() as book:
        for _ in range(2):
            state, _ = step(state, x.chunk(2)[dist.get_rank()])
    channels: Any = LOSS_CHANNELS.get(mesh)
    shared = channels.loss(("ep",)).shared_bytes
    assert shared >= RINGS and book.peak("host") >= shared
    mesh.close()
    assert LOSS_CHANNELS.get(mesh) is None
