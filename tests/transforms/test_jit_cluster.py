"""Covers jit with a cluster: all ranks run rank 0's choice, with the bits of eager; a failure is an error on all."""

import dataclasses
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import optim
from shardfn.graph import Cluster, Device, Link, Schedule
from shardfn.testing import assert_same, distributed, odd_batch, odd_loss, odd_params, on_mesh

NOTHING = Link(1e12, 0.0)
LATE = Link(1e6, 1e-2)
ZERO = sf.Zero(stage=3, persist_elements=2)


def _box(link: Link, memory: int = 1 << 30) -> Cluster:
    return Cluster(Device("box", memory, {"float32": 1e9}, 1e9), 1, link, link)


def _lowered(mesh: sf.Mesh, **options: Any) -> Any:
    step = sf.sharded_step(sf.jit(odd_loss, backend="graph", **options), optim.adamw(1e-2), mesh=mesh, zero=ZERO)
    return step.lower(odd_params(), _own(odd_batch(0), mesh))


def _own(batch: dict[str, torch.Tensor], mesh: sf.Mesh) -> dict[str, torch.Tensor]:
    return {k: torch.tensor_split(v, mesh.size)[0] for k, v in batch.items()}


@pytest.mark.nightly
@distributed(world=2)
def test_all_ranks_run_the_choice_of_rank_0() -> None:
    mesh = sf.make_mesh({"dp": 2})
    batches = [odd_batch(n) for n in range(3)]
    options: dict[str, Any] = {"mesh": mesh, "zero": ZERO}
    want = on_mesh(odd_loss, optim.adamw(1e-2), odd_params(), batches, **options)
    # Their own choices would pair other messages: one rank joins them, the other does not.
    mine = _box((LATE, NOTHING)[mesh.rank])
    alone = [_lowered(sf.make_mesh({"dp": 2}, abstract=True), cluster=_box(link)).schedule for link in (LATE, NOTHING)]
    assert alone[0].bucket and not alone[1].bucket
    got = on_mesh(sf.jit(odd_loss, backend="graph", cluster=mine), optim.adamw(1e-2), odd_params(), batches, **options)
    assert_same(got, want, exact=True)


@pytest.mark.nightly
@distributed(world=2)
def test_a_failure_on_one_rank_raises_on_all() -> None:
    mesh = sf.make_mesh({"dp": 2})

    def take(**options: Any) -> None:
        jitted = sf.jit(odd_loss, backend="graph", **options)
        on_mesh(jitted, optim.adamw(1e-2), odd_params(), [odd_batch(0)], mesh=mesh, zero=ZERO)

    for failing, said in ((0, "schedules fits"), (1, "the schedule does not fit")):
        memory = 64 if mesh.rank == failing else None
        kind = ValueError if mesh.rank == failing else sf.RankError
        with pytest.raises(
            kind, match=said if mesh.rank == failing else f"rank {failing} failed: ValueError: .*{said}"
        ):
            take(cluster=_box(LATE), memory=memory)
    for mixed in ({"cluster": _box(LATE)}, {}), ({"cluster": _box(LATE), "bucket": 0}, {"cluster": _box(LATE)}):
        with pytest.raises(
            sf.RankError, match=r"(?s)ranks disagree on what to run.*rank 0: jit by cluster=.*rank 1: jit by"
        ):
            take(**mixed[mesh.rank])
    take(cluster=_box(LATE))


@pytest.mark.nightly
def test_lower_shows_the_candidates() -> None:
    mesh = sf.make_mesh({"dp": 4}, abstract=True)
    lowered = _lowered(mesh, cluster=_box(LATE))
    choice = lowered.choice
    assert lowered.schedule == choice.schedule
    assert lowered.memory_analysis().peak == choice.peak
    assert lowered.estimate(_box(LATE)).seconds == choice.seconds
    assert lowered.schedule_table() == str(choice) and str(choice).count("\n") == len(choice.table)
    given = _lowered(mesh)
    assert given.choice is None and given.schedule == Schedule() and "given: Schedule(" in given.schedule_table()
    kept = _lowered(mesh, cluster=_box(LATE), bucket=0, donate=False)
    assert {(s.schedule.bucket, s.schedule.donate) for s in kept.choice.table} == {(0, False)}
    with pytest.raises(ValueError, match="schedules fits"):
        _lowered(mesh, cluster=_box(LATE), memory=64)


@pytest.mark.nightly
def test_functions_alone_choose_and_options_without_effect_are_refused() -> None:
    box = _box(NOTHING)
    f = sf.jit(lambda x: (x * 2).sum(), backend="graph", cluster=box)
    assert f(torch.ones(3)) == 6
    with pytest.raises(ValueError, match="fits"):
        dataclasses.replace(f, memory=8)(torch.ones(30))
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({"memory": 1 << 30}, "without cluster= has no effect"),
        ({"cluster": box, "memory": 0}, "above 0"),
        ({"cluster": box, "graph_schedule": Schedule()}, "leaves nothing to choose"),
        ({"cluster": box, "prefetch": 0, "bucket": 0, "reductions": 0}, "no choice is left"),
    )
    for options, said in bad:
        with pytest.raises(ValueError, match=said):
            sf.jit(odd_loss, **options)
    with pytest.raises(TypeError, match="Cluster"):
        sf.jit(odd_loss, cluster="h100")  # type: ignore[arg-type]
