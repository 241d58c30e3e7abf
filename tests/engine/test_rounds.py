"""Covers rounds: ranks that share no leaves learn orders of their own, and fail together all the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, Pace, Travel, Zero, optim
from shardfn.collectives import Control, Rounds, chosen_channel, notice_of
from shardfn.core import RankError
from shardfn.engine import comms_of
from shardfn.testing import distributed

SHAPES = {"a": (2, 6, 5), "b": (2, 6, 5), "c": (2, 5, 5)}


def _params() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) / 2 for name, shape in SHAPES.items()}


def _stage(p: dict[str, Tensor], x: Tensor, stage: int) -> Tensor:
    """Two stages that use their leaves in other orders, and one of them a leaf that the other leaves alone."""
    a, b = (p["a"], p["b"]) if stage == 0 else (p["b"], p["a"])
    h = torch.tanh(x @ a[0]) + torch.cos(x @ b[0])
    return ((h @ p["c"][0]) if stage == 0 else h).square().mean()


def _whole(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.stack([_stage({k: v[s : s + 1] for k, v in p.items()}, x, s) for s in range(2)]).sum()


def _loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return sf.psum(_stage(p, sf.pvary(x, "pp"), int(sf.axis_index("pp"))), "pp")


def _step(mesh: sf.Mesh | None, loss: Any = _loss) -> Any:
    zero = Zero(stage=3, persist_elements=0, travel=Travel(bucket_bytes=0), pace=Pace(prefetch_bytes=1))
    return sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, specs=P("pp"), batch=P("dp"), zero=zero)


@pytest.mark.nightly
@distributed(world=4)
def test_stages_learn_orders_of_their_own() -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu")
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step = _step(mesh)
    state, reference = step.init(_params()), {k: v.requires_grad_() for k, v in _params().items()}
    for _ in range(3):
        state, metrics = step(state, x.chunk(2)[mesh.coords["dp"]])
        loss = _whole(reference, x)
        assert torch.isclose(metrics["loss"], loss)
        grads = torch.autograd.grad(loss, list(reference.values()))
        reference = {
            k: (v - 0.1 * g).detach().requires_grad_() for (k, v), g in zip(reference.items(), grads, strict=True)
        }
    for name, x in state.params.items():
        torch.testing.assert_close(x.full_tensor(), reference[name].detach())
    (plan,) = step._planner._plans.values()
    names = [plan.layers[plan.gather_units[u].leaves[0]].path for u in plan.learnt.use_order("step").phase(0)]
    assert names == [f"params['{k}']" for k in ("abc" if mesh.coords["pp"] == 0 else "ba")]


@pytest.mark.nightly
@distributed(world=4, timeout=60)
def test_a_failure_in_one_stage_raises_in_the_other() -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu")

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        if mesh.coords == {"pp": 1, "dp": 1}:
            raise ZeroDivisionError("of stage 1")
        return _loss(p, x)

    step = _step(mesh, loss)
    state = step.init(_params())
    mine = mesh.coords == {"pp": 1, "dp": 1}
    with pytest.raises(ZeroDivisionError if mine else RankError, match="of stage 1"):
        step(state, torch.ones(4, 6, dtype=torch.float64))


def _alone(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ p["a"]).square().mean()


@pytest.mark.nightly
@distributed(world=4, timeout=60)
def test_no_group_goes_on_to_the_update_when_another_has_failed() -> None:
    mesh, failing = sf.make_mesh({"sp": 2, "dp": 2}, device="cpu"), [False]

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        if failing[0] and mesh.coords == {"sp": 0, "dp": 1}:
            raise ZeroDivisionError("in one group")
        return _alone(p, x)

    zero = Zero(stage=3, persist_elements=0)
    step = sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, batch=P("dp"), zero=zero)
    state = step.init({"a": torch.ones(6, 5)})
    x = torch.ones(4, 6)
    state, _ = step(state, x)
    failing[0] = True
    with pytest.raises((ZeroDivisionError, RankError), match="in one group"):
        step(state, x)
    failing[0] = False
    state, _ = step(state, x)  # which is unchanged on all ranks
    assert int(state.step) == 2


def _rounds_a_step(step: Any, state: Any, x: Tensor) -> tuple[Any, int]:
    """The state after a step, and in how many rounds ranks agreed in it."""
    counted, whole = [0], (Rounds.exchange, Rounds.gather)

    def counting(one: Any) -> Any:
        def call(self: Rounds, *args: Any) -> Any:
            counted[0] += 1
            return one(self, *args)

        return call

    Rounds.exchange, Rounds.gather = map(counting, whole)  # type: ignore[method-assign]
    try:
        state, _ = step(state, x)
    finally:
        Rounds.exchange, Rounds.gather = whole  # type: ignore[method-assign]
    return state, counted[0]


def _squares(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ p["a"][0]).square().mean() + (x @ p["b"][1]).square().mean()


def _rounds_of(loss: Any, stage: int) -> int:
    """In how many rounds ranks agree in a step that has learnt its orders."""
    mesh, zero = sf.make_mesh({"dp": 2}, device="cpu"), Zero(stage=stage, persist_elements=0)
    step = sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, zero=zero)
    params = {name: x for name, x in _params().items() if name != "c"}
    state, x = step.init(params), torch.ones(6, 6, dtype=torch.float64)
    for _ in range(2):
        state, _ = step(state, x)
    return _rounds_a_step(step, state, x)[1]


@pytest.mark.nightly
@distributed(world=2)
def test_a_step_agrees_once_besides_the_ends_of_its_phases() -> None:
    for num in (1, 3):
        loss = sf.accumulate(_squares, num)
        # A backward that sends ends in a round; of stage 3, a forward as well, as it gathers.
        assert [_rounds_of(loss, stage) for stage in range(4)] == [1 + num, 1 + num, 1 + num, 1 + 2 * num]


@pytest.mark.nightly
@distributed(world=2)
def test_a_captured_step_agrees_once_on_its_program_and_that_all_have_its_graph() -> None:
    assert [_rounds_of(sf.jit(_squares, backend="graph"), stage) for stage in (0, 3)] == [1, 1]


@pytest.mark.nightly
@distributed(world=2)
def test_a_captured_step_is_made_by_all_where_one_rank_has_no_graph_of_it() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    loss: Any = lambda p, x: sf.WeightedMean((x @ p).square().sum(), torch.tensor(float(len(x))))  # noqa: E731
    step = sf.sharded_step(sf.jit(loss, backend="graph"), optim.sgd(0.1), mesh=mesh, zero=3)
    state = step.init(torch.ones(6, 6))
    # An agreement on unequal sizes has a second round.
    for mine, rounds, misses in (([4, 4], 0, 1), ([4, 4], 1, 1), ([4, 3], 0, 2), ([4, 3], 2, 2), ([4, 4], 1, 2)):
        state, found = _rounds_a_step(step, state, torch.ones(mine[mesh.rank], 6))
        assert not rounds or found == rounds, (mine, found)
        assert step.cache_info().misses == misses
    # Rank 1 alone has the graph of these rows: it has seen them beside other ones.
    state, _ = step(state, torch.ones([4, 2][mesh.rank], 6))
    state, _ = step(state, torch.ones(2, 6))
    assert step.cache_info().misses == 4


@distributed(world=2)
def test_a_function_over_sharded_leaves_agrees_once_besides_the_end_of_its_phase() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    for wrapped, rounds in ((_squares, 2), (sf.jit(_squares, backend="graph"), 1)):
        f = sf.sharded(wrapped, mesh=mesh, zero=Zero(stage=3, persist_elements=0))
        params = f.init({name: x for name, x in _params().items() if name != "c"})
        x = torch.ones(6, 6, dtype=torch.float64)
        for _ in range(2):
            f(params, x)
        assert _rounds_a_step(lambda p, x, f=f: (f(p, x), None), params, x)[1] == rounds


@distributed(world=[pytest.param(2, marks=pytest.mark.nightly), 3])
def test_rounds_go_through_memory_once_ranks_have_agreed(world: int) -> None:
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    step = sf.sharded_step(_squares, optim.sgd(0.1), mesh=mesh, zero=2)
    state = step.init({name: x for name, x in _params().items() if name != "c"})
    state, _ = step(state, torch.ones(6, 6, dtype=torch.float64))
    control, notice = comms_of(mesh).control, notice_of(mesh)
    assert isinstance(control, Control) and [n > 0 for _, n in control.shared()] == [not chosen_channel()]
    notice.mine = 7 if mesh.rank == 1 else 0
    for values in ([5] * world, [-3, (1 << 60) - 1, 0][:world]):
        assert control.exchange(values[mesh.rank]) == values
    assert notice.told == 7
