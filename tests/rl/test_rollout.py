"""Rollouts: as batches, as checkpoints under any number of ranks, and their checks and metrics."""

import pathlib

import pytest
import torch

import shardfn as sf
from shardfn import rl
from shardfn.collectives import local
from shardfn.testing import distributed


def whole(rows: int = 8) -> rl.Rollout:
    draw = torch.Generator().manual_seed(0)
    return rl.Rollout(
        ids=torch.randint(0, 9, (rows, 10), generator=draw),
        prompts=torch.randint(1, 6, (rows,), generator=draw),
        lengths=torch.arange(rows) % 5,
        logprobs=-torch.rand(rows, 4, generator=draw),
        versions=torch.full((rows, 4), 3),
        rewards=torch.where(torch.arange(rows) % 4 == 1, torch.nan, torch.arange(rows, dtype=torch.float32)),
        ended=torch.arange(rows) % 2 == 0,
        places=torch.arange(rows * 4).view(rows, 4),
        expert_ids=torch.zeros(rows, 10, 0, 0, dtype=torch.int16),
        failed=torch.where(torch.arange(rows) % 4 == 1, torch.arange(rows) // 4 + 1, 0).to(torch.int8),
    )


def cut(rollout: rl.Rollout, rows: slice) -> rl.Rollout:
    return sf.tree_map(lambda x: x[rows], rollout)


@distributed(world=[1, 2])
def test_a_rollout_is_saved_and_restored(world: int, tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": world})
    rows = slice(mesh.rank * 8 // world, (mesh.rank + 1) * 8 // world)
    sf.checkpoint.save(tmp_path, rl.as_global(cut(whole(), rows), mesh, "dp"), step=1)
    form = rl.as_global(rl.empty_rollout(8 // world, 10, 4), mesh, "dp")
    found = local(sf.checkpoint.restore(tmp_path, form).tree)
    for a, b in zip(found, cut(whole(), rows), strict=True):
        assert a.dtype == b.dtype and torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
    everywhere = local(sf.checkpoint.restore(tmp_path, rl.as_global(rl.empty_rollout(8, 10, 4), mesh, None)).tree)
    assert torch.equal(everywhere.ids, whole().ids) and isinstance(everywhere, rl.Rollout)


@distributed(world=[1, 2])
def test_metrics_are_means_over_all_ranks(world: int) -> None:
    mesh, rollout = sf.make_mesh({"dp": world}), whole()

    def loss(params: dict[str, torch.Tensor], batch: rl.Rollout) -> object:
        mask = rl.completion_mask(batch.lengths, batch.width)
        return rl.token_mean(params["w"] * mask, batch.lengths), rl.rollout_metrics(batch)

    step = sf.sharded_step(loss, sf.optim.sgd(1.0), mesh=mesh, has_aux=True)
    _, metrics = step(step.init({"w": torch.ones(4)}), cut(rollout, step.rows(8)))
    assert abs(float(metrics["reward"]) - (0 + 2 + 3 + 4 + 6 + 7) / 6) < 1e-6
    assert float(metrics["missing"]) == 0.25 and float(metrics["ended"]) == 0.5
    assert [float(metrics[kind]) for kind in rl.FAILURES] == [1 / 8, 1 / 8, 0, 0]
    assert abs(float(metrics["length"]) - (10 + 3) / 8) < 1e-6


def test_answers_of_other_weights_are_named() -> None:
    rollout = whole()
    rl.check_versions(rollout, 3)
    rl.check_versions(rollout, 4, behind=1)
    rollout.versions[:3] = 4
    rollout.versions[3, 1:] = 4
    wanted = "row 3 was drawn by version 3, 4, and from 4 to 4 are expected. Draw it again after update_weights"
    with pytest.raises(ValueError, match=wanted):
        rl.check_versions(rollout, 4)
    with pytest.raises(ValueError, match="row 1 was drawn by version 4, and from 3 to 3"):
        rl.check_versions(rollout, 3)
