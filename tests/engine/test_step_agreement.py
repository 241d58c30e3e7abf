"""Covers the agreement of ranks before anything is sent: all parts of a step, and the rows that it gets.

Every disagreement is an error on all ranks that shows the lines in which they differ; the next step runs.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.collectives import TracedControl
from shardfn.engine.loss._check import check_same_loss
from shardfn.testing import distributed, on_mesh


def _loss(params: dict, x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean()


def _params() -> dict:
    return {"w": torch.arange(15.0).reshape(5, 3) / 15}


def _run(mesh: sf.Mesh, loss=_loss, tx=None, **options) -> sf.TrainState:
    step = sf.sharded_step(
        loss, tx or optim.adamw(0.1), mesh=mesh, zero=sf.Zero(stage=2, persist_elements=0), **options
    )
    state, _ = step(step.init(_params()), torch.ones(4, 5))
    return state


_CLIPPED = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1))
# The options of each rank; and a line of each in the error.
_DIFFERENT = {
    "microbatches": (
        [{"loss": sf.accumulate(_loss, 1)}, {"loss": sf.accumulate(_loss, 2)}],
        ["accumulate 1", "accumulate 2"],
    ),
    "jit": ([{}, {"loss": sf.jit(_loss, backend="graph")}], ["eager, without jit", "jit by the schedule given"]),
    "schedule": (
        [{"loss": sf.jit(_loss, backend="graph", bucket=n)} for n in (0, 1)],
        ["jit.schedule.bucket = 0", "jit.schedule.bucket = 1"],
    ),
    "remat": ([{}, {"loss": sf.remat(_loss)}], ["(nothing that the others lack)", "loss: remat"]),
    "precision": (
        [{}, {"loss": sf.mixed_precision(_loss, sf.Policy.full())}],
        ["", "mixed_precision[0].compute = torch.float32"],
    ),
    "clip": ([{}, {"tx": _CLIPPED}], ["optimizer: chain + fused", "optimizer.txs[0].max_norm = 1.0"]),
    "rate": (
        [{"tx": optim.adamw(r)} for r in (0.1, 0.2)],
        ["optimizer.advance.learning_rate = 0.1", "optimizer.advance.learning_rate = 0.2"],
    ),
    "schedules": (
        [{"tx": optim.sgd(lambda n, k=k: k / (n + 1))} for k in (1.0, 2.0)],
        ["learning_rate = [1.0, 0.5", "learning_rate = [2.0, 1.0"],
    ),
    "donate": ([{}, {"donate": False}], ["donate True", "donate False"]),
}


@pytest.mark.nightly
@distributed(world=2)
def test_steps_that_differ_never_meet_in_a_transfer() -> None:
    mesh, rank = sf.make_mesh(), dist.get_rank()
    for name, (has, told) in _DIFFERENT.items():
        with pytest.raises(sf.RankError, match="ranks disagree on what to run") as caught:
            _run(mesh, **has[rank])
        said = str(caught.value)
        assert all(f"rank {r}: " in said and line in said for r, line in enumerate(told)), f"{name}: {said}"
    want = _run(mesh).params["w"].full_tensor()
    assert torch.equal(_run(mesh).params["w"].full_tensor(), want)


@distributed(world=2)
def test_one_cause_is_one_line_a_rank() -> None:
    mesh, rank = sf.make_mesh(), dist.get_rank()
    step = sf.sharded_step(_loss, optim.adamw(0.1), mesh=mesh)
    state = step.init(_params())
    cases: list[tuple[Callable[[], Any], list[str]]] = [
        (
            lambda: _run(mesh, tx=optim.adamw(0.1 + rank)),
            ["optimizer.advance.learning_rate = 0.1", "optimizer.advance.learning_rate = 1.1"],
        ),
        (
            lambda: sf.sharded_step(_loss, optim.sgd(0.1), mesh=mesh, zero=rank).init(_params()),
            ["Zero(stage=0)", "Zero(stage=1)"],
        ),
        (
            lambda: step.apply(_loss, state, torch.ones(4, 5)) if rank else step.evaluate(state, [torch.ones(4, 5)]),
            ["step.evaluate", "apply"],
        ),
    ]
    for call, told in cases:
        with pytest.raises(sf.RankError) as caught:
            call()
        want = ["ranks disagree on what to run:", *(f"  - rank {r}: {line}" for r, line in enumerate(told))]
        found = str(caught.value).splitlines()
        # Calls that differ have a remedy, too.
        assert found[:3] == want and all(line.startswith("All ranks of a mesh make the same") for line in found[3:])


@distributed(world=2)
def test_a_leaf_that_a_rank_lacks_and_unequal_batches_are_named() -> None:
    mesh, rank = sf.make_mesh(), dist.get_rank()
    step = sf.sharded_step(lambda params, batch: _loss(params, batch["x"]), optim.sgd(0.1), mesh=mesh, donate=False)
    state, x = step.init(_params()), torch.ones(4, 5)
    has = [{"x": x, "images": {"pixels": torch.ones(7, 2, 3)}}, {"x": x}]
    with pytest.raises(sf.RankError, match=r"torch.zeros\(\(0, 2, 3\), dtype=torch.float32\)") as caught:
        step(state, has[rank])
    assert "batch['images']['pixels'] is missing on ranks [1]" in str(caught.value)
    sizes = {"x": torch.ones(4, 5), "y": torch.ones(4), "patches": torch.ones(3 + rank, 2)}
    with pytest.raises((ValueError, sf.RankError), match=r"WeightedMean") as told:
        step(state, sizes)
    if isinstance(told.value, ValueError):  # a rank whose loss comes later learns it from the one that is first
        assert str(told.value).splitlines()[1:] == ["  - batch['patches']: dim 0 is 3 on rank 0, 4 on rank 1"]


@distributed(world=2)
def test_a_state_of_another_optimizer_and_steps_that_differ_later_are_found_too() -> None:
    mesh, rank = sf.make_mesh(), dist.get_rank()
    made = [sf.sharded_step(_loss, tx, mesh=mesh) for tx in (optim.adamw(0.1), _CLIPPED)]
    states = [step.init(_params()) for step in made]
    x = torch.ones(4, 5)
    with pytest.raises(sf.RankError, match=r"(?s)rank 0: .*state of the optimizer.*rank 1: .*state of the optimizer"):
        made[0](states[rank], x)
    for call in (
        lambda s: s(states[0], x),
        lambda s: s.apply(_loss, states[0], x),
        lambda s: s.loss(states[0].params, x),
    ):
        steps = [sf.sharded_step(sf.accumulate(_loss, n), optim.adamw(0.1), mesh=mesh) for n in (1, 2)]
        with pytest.raises(sf.RankError, match=r"(?s)rank 0: accumulate 1.*rank 1: accumulate 2"):
            call(steps[rank])
    gradient = torch.func.grad(made[0].loss)(states[0].params, x)  # in a transform, too, and from then on unasked
    assert torch.equal(
        gradient["w"].full_tensor(), torch.func.grad(made[0].loss)(states[0].params, x)["w"].full_tensor()
    )


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_ranks_without_a_dp_axis_train_together(mode: str) -> None:
    rank = dist.get_rank()
    loss = sf.jit(_loss, backend="graph") if mode == "graph" else _loss
    rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    want = on_mesh(loss, optim.sgd(0.1), _params(), [rows, rows], mesh=sf.make_mesh({"dp": -1}))
    mesh = sf.make_mesh({"data": -1})
    got = on_mesh(loss, optim.sgd(0.1), _params(), [rows, rows], mesh=mesh)
    assert torch.equal(got.params["w"], want.params["w"])
    # A batch that is declared whole must have the same rows on all ranks.
    step = sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, batch=sf.P("dp"))
    with pytest.raises(sf.RankError, match=r"(?s)along \('data',\) must pass .* no axis.*batch=P\('data'\).*rank 1 "):
        step(step.init(_params()), rows[4 * rank :][:4])
    state, _ = step(step.init(_params()), rows)
    same = step.apply(lambda p: p["w"].clone(), state)
    other = same.clone()
    dist.broadcast(other, 0)
    assert torch.equal(same, other)


@pytest.mark.nightly
@distributed(world=2)
def test_a_program_of_several_ranks_needs_a_mesh() -> None:
    for make in (
        lambda **how: sf.sharded_step(_loss, optim.sgd(0.1), **how),
        lambda **how: sf.shard_map(lambda x: x, in_specs=sf.P(), out_specs=sf.P(), **{"mesh": None} | how),
    ):
        with pytest.raises(
            ValueError, match=r"the program has 2 ranks, but no mesh.*mesh=sf.make_mesh\(\).*make_mesh\(alone=True\)"
        ):
            make()
        make(mesh=sf.make_mesh())
        make(mesh=sf.make_mesh(alone=True))
    alone = sf.sharded_step(_loss, optim.sgd(0.1), mesh=sf.make_mesh(alone=True))
    alone(alone.init(_params()), torch.ones(4, 5))
    with pytest.raises(ValueError, match=r"Zero\(stage=3, axis='dp'\) has no effect.*Zero\(axis='data'\)"):
        sf.sharded_step(_loss, optim.sgd(0.1), mesh=sf.make_mesh({"data": -1}), zero=sf.Zero(stage=3))
    sf.sharded_step(_loss, optim.sgd(0.1), mesh=sf.make_mesh({"data": -1}), zero=sf.Zero(stage=3, axis="data"))


def test_a_launched_program_that_is_not_connected_needs_a_mesh_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="the program has 4 ranks, but no mesh"):
        sf.sharded_step(_loss, optim.sgd(0.1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    sf.sharded_step(_loss, optim.sgd(0.1))


def test_the_default_cut_is_along_all_axes_that_no_spec_uses() -> None:
    mesh = sf.make_mesh({"pod": 2, "dp": 2, "tp": 2}, abstract=True)
    cut = sf.transforms.default_batch
    assert cut(sf.P(), mesh) == sf.P(("pod", "dp", "tp"))
    assert cut({"a": sf.P(None, "tp"), "b": sf.Sharding(sf.P("dp"))}, mesh) == sf.P(("pod", "dp"))
    assert cut(sf.P(("pod", "tp")), mesh) == sf.P("dp")
    assert cut(sf.P(), sf.make_mesh({"dp": 1})) == sf.P("dp") == cut(sf.P(), sf.make_mesh(alone=True))


def _says(losses: list[float]) -> TracedControl:
    control: Any = TracedControl(sf.make_mesh({"dp": 2}, device="cpu", abstract=True))
    control.gather = lambda mine: losses
    return control


@pytest.mark.parametrize(
    ("losses", "one"),
    [
        ([1.0, 1.0001], True),
        pytest.param([1.0, 1.1], False, marks=pytest.mark.nightly),
        pytest.param([1.0, float("nan")], False, marks=pytest.mark.nightly),
    ],
)
def test_one_loss_is_distinguished_from_several(losses: list[float], one: bool) -> None:
    plan = SimpleNamespace(leaves=[], batch_axes=(), mesh=sf.make_mesh({"dp": 2}, device="cpu", abstract=True))
    if one:
        return check_same_loss(torch.tensor(1.0), plan, _says(losses))
    with pytest.raises(sf.RankError, match=f"(?s)different ones.*rank 1: {losses[1]}"):
        check_same_loss(torch.tensor(1.0), plan, _says(losses))


def test_a_loss_that_is_finite_nowhere_is_one() -> None:
    check_same_loss(torch.tensor(1.0), None, _says([float("nan"), float("inf")]))
