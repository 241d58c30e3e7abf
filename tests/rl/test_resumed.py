"""Runs of rollouts and updates go on on another number of ranks: by rounding, and bit for bit under canonical sums."""

import functools
import pathlib
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import rl
from shardfn.collectives import local
from shardfn.core import Mesh
from shardfn.models import gpt
from shardfn.testing import distributed
from tests.rl.test_sample import CONFIG, LENGTH, PROMPTS, SAMPLING, engine_of, loss

ROWS = SAMPLING.n * len(PROMPTS)


def go_on(folder: pathlib.Path, mesh: Mesh, zero: sf.Zero, first: int, last: int) -> Any:
    """Updates `first` to `last - 1`, two by each rollout, from the checkpoint before them, if there is one."""
    step = sf.sharded_step(functools.partial(loss, CONFIG), sf.optim.sgd(0.5), mesh=mesh, zero=zero, has_aux=True)
    own, rows = step.rows(len(PROMPTS)), step.rows(ROWS)
    state, held = step.init(gpt.init(CONFIG, sf.key(0))), rl.empty_rollout(rows.stop - rows.start, LENGTH, 7)
    if first:
        found = sf.checkpoint.restore(folder, {"state": state, "held": rl.as_global(held, mesh, "dp")}).tree
        state, held = found["state"], local(found["held"])
    engine, since = engine_of(CONFIG, sf.unshard(state.params), mesh=sf.make_mesh(alone=True)), -(-first // 2)
    for n in range(first, last):
        if n % 2 == 0:
            version = since + engine.update_weights(sf.unshard(state.params))
            how: dict[str, Any] = {"key": sf.fold_in(sf.key(7), n // 2), "start": own.start, "since": since}
            held = rl.sample(engine, PROMPTS[own], SAMPLING, length=LENGTH, **how)
            rl.check_versions(held, version)
        rewards = (held.ids == 5).sum(1).float() + held.lengths
        state, _ = step(state, (held, rl.group_advantages(rewards, SAMPLING.n)))
    tree = {"state": state, "held": rl.as_global(held, mesh, "dp")}
    sf.checkpoint.save(folder, tree, last)
    return sf.unshard({"params": state.params, "held": tree["held"]})


@pytest.mark.nightly
@pytest.mark.parametrize("reduction", ["canonical", "by_rank"])
@distributed(world=2)
def test_a_run_goes_on_on_another_number_of_ranks(reduction: Any, tmp_path: pathlib.Path) -> None:
    mesh, alone = sf.make_mesh({"dp": 2}), sf.make_mesh(alone=True)
    chunks: dict[str, Any] = {"reduction_chunks": 4} if reduction == "canonical" else {}
    zero = sf.Zero(stage=3, persist_elements=0, reduction=reduction, **chunks)
    whole = go_on(tmp_path / f"alone{mesh.rank}", alone, zero, 0, 4)
    go_on(tmp_path / "cut", mesh, zero, 0, 3)  # between two updates by one rollout
    resumed = go_on(tmp_path / "cut", mesh, zero, 3, 4)
    go_on(tmp_path / f"from_one{mesh.rank}", alone, zero, 0, 1)
    for found in (resumed, go_on(tmp_path / f"from_one{mesh.rank}", alone, zero, 1, 4)):
        for a, b in zip(sf.tree_leaves(found), sf.tree_leaves(whole), strict=True):
            if reduction == "canonical":
                assert torch.equal(a.nan_to_num(), b.nan_to_num())
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
