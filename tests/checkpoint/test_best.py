"""Covers `best` of shardfn/checkpoint/_manager.py: the best checkpoints stay, also after kills; infinite values."""

import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import shardfn as sf
from shardfn import checkpoint
from shardfn.checkpoint import Manager
from shardfn.core import P, RankError
from shardfn.testing import distributed

LOSSES = [5.0, 3.0, math.nan, 4.0, 3.0, 3.5, math.inf, 6.0, 4.5]


def tree(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((50,), float(step))}


def save_all(manager: Manager, losses: list[float] = LOSSES) -> None:
    for step, loss in enumerate(losses):
        manager.save(tree(step), step, metrics={"validation_loss": loss, "other": "not looked at"})


@pytest.mark.parametrize(("mode", "num", "steps"), [("min", 3, [1, 4, 5, 8]), ("max", 2, [6, 7, 8])])
def test_the_best_ones_stay_beside_the_newest(tmp_path: pathlib.Path, mode: str, num: int, steps: list[int]) -> None:
    with Manager(tmp_path, best="validation_loss", mode=mode, keep_best=num, keep_last=1) as manager:
        assert manager.best() is None
        save_all(manager)
        # The earliest of equal ones; NaN is never the best.
        assert manager.best() == checkpoint.best(tmp_path, "validation_loss", mode) == {"min": 1, "max": 6}[mode]
        assert manager.steps() == steps
        assert manager.restore(tree(0), step=manager.best()).tree["w"][0] == manager.best()


def test_another_process_knows_the_best(tmp_path: pathlib.Path) -> None:
    with Manager(tmp_path, best="loss", keep_last=1) as manager:
        for step, loss in enumerate([2.0, 1.0, 3.0]):
            manager.save(tree(step), step, metrics={"loss": torch.tensor(loss)})
    with Manager(tmp_path, best="loss", keep_last=1) as manager:
        assert (manager.best(), manager.steps()) == (1, [1, 2])
        manager.save(tree(3), 3, metrics={"loss": 1.5})
        manager.wait()
        assert (manager.best(), manager.steps()) == (1, [1, 3])
        manager.save(tree(4), 4, metrics={"loss": 0.5})
        assert (manager.best(), manager.steps()) == (4, [4])
    # Another metric has no values, and without one no checkpoint is kept longer.
    assert checkpoint.best(tmp_path, "accuracy", "max") is None
    assert "metrics: {'loss': 0.5}" in checkpoint.inspect(tmp_path)
    with Manager(tmp_path, keep_last=1) as manager:
        manager.save(tree(5), 5)
    assert checkpoint.steps(tmp_path) == [5]


def test_a_replaced_checkpoint_has_its_new_value(tmp_path: pathlib.Path) -> None:
    with Manager(tmp_path, best="loss", keep_last=1, replace=True) as manager:
        for step, loss in ((1, 1.0), (2, 2.0), (1, 9.0), (2, 3.0)):
            manager.save(tree(step), step, metrics={"loss": loss})
        assert (manager.best(), manager.steps()) == (2, [2])


def test_an_absent_metric_is_named_with_those_that_are_there(tmp_path: pathlib.Path) -> None:
    with Manager(tmp_path, best="validation_loss", save_every=10) as manager:
        with pytest.raises(ValueError) as error:
            manager.save(tree(10), 10, metrics={"loss": 1.0, "valid_loss": 2.0})
        assert "Manager(best='validation_loss'): at step 10 metrics= has 'loss', 'valid_loss'." in str(error.value)
        assert "Did you mean 'valid_loss'?" in str(error.value)
        with pytest.raises(ValueError, match="at step 10 metrics= is missing or empty"):
            manager.save(tree(10), 10)
        with pytest.raises(
            TypeError,
            match=r"metrics\['validation_loss'\] must be a number or a 0-d tensor, but is a tensor of shape \(2,\)",
        ):
            manager.save(tree(10), 10, metrics={"validation_loss": torch.ones(2)})
        assert not manager.save(tree(11), 11) and manager.steps() == []
        # A job that is asked to stop saves where nothing was measured.
        assert manager.save(tree(12), 12, now=True) and manager.best() is None and manager.steps() == [12]
    with Manager(tmp_path) as manager:
        with pytest.raises(ValueError, match=r"no effect without Manager\(best=\)"):
            manager.save(tree(13), 13, metrics={"loss": 1.0})
        with pytest.raises(ValueError, match=r"needs Manager\(best=\)"):
            manager.best()
    mistakes: Any = (
        ({"best": "x", "mode": "low"}, "mode='low'"),
        ({"mode": "max"}, "no effect"),
        ({"keep_best": 0}, "keep_best=0"),
    )
    for wrong, message in mistakes:
        with pytest.raises(ValueError, match=message):
            Manager(tmp_path, **wrong)


def test_the_best_one_stays_in_an_object_store() -> None:
    try:
        with Manager("memory://bucket/best", best="validation_loss", keep_last=1) as manager:
            save_all(manager)
            assert (manager.best(), manager.steps()) == (1, [1, 8])
    finally:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]


@distributed(world=2, timeout=60)
def test_ranks_agree_on_the_best(tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")

    def leaf(step: int) -> Any:
        return {"w": sf.shard(torch.full((8,), float(step)), P("dp"), mesh)}

    with Manager(tmp_path, mesh=mesh, best="loss", keep_last=1) as manager:
        for step, loss in enumerate([2.0, 1.0, 3.0]):
            manager.save(leaf(step), step, metrics={"loss": loss})
            assert manager.best() == min(step, 1)
        assert manager.steps() == [1, 2]
        assert manager.restore(leaf(0), step=manager.best()).tree["w"].full_tensor()[0] == 1
        with pytest.raises(RankError, match="metrics="):
            manager.save(leaf(3), 3, metrics={"loss": float(mesh.rank)})
        with pytest.raises((ValueError, RankError), match="metrics= is missing or empty"):
            manager.save(leaf(3), 3, metrics={"loss": 0.0} if mesh.rank == 0 else {})
        manager.save(leaf(3), 3, metrics={"loss": 4.0})
        assert (manager.best(), manager.steps()) == (1, [1, 3])
    with pytest.raises(RankError, match="of 'loss'"):
        Manager(tmp_path, mesh=mesh, best="loss", mode="min" if mesh.rank else "max")


# kill -9

LOOP = """
import os, random, sys
import torch
torch.set_num_threads(1)
from shardfn.checkpoint import Manager, latest

directory, seed = sys.argv[1], int(sys.argv[2])
with Manager(directory, best="loss", keep_last=2, file_bytes=3000, durable=False) as manager:
    step = (latest(directory) or 0) + 1
    while True:
        loss = random.Random(step).random()
        manager.save({"w": torch.full((50,), float(step))}, step, metrics={"loss": loss})
        os.write(1, b".")
        step += 1
"""


@pytest.mark.nightly
def test_killed_at_any_instant_the_best_one_is_whole(tmp_path: pathlib.Path) -> None:
    draw, best = random.Random(0), math.inf
    env = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    for n in range(8):
        line = [sys.executable, "-c", LOOP, str(tmp_path), str(n)]
        with subprocess.Popen(line, env=env, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(draw.randint(2, 30)):
                assert process.stdout.read(1), "it ended by itself"
            time.sleep(draw.uniform(0.0, 0.02))
            os.kill(process.pid, signal.SIGKILL)
        step, newest = checkpoint.best(tmp_path, "loss"), checkpoint.latest(tmp_path)
        assert step is not None and newest is not None and checkpoint.verify(tmp_path, step).step == step
        # It is the best of all complete ones, and no kill has lost it.
        want = min(range(1, newest + 1), key=lambda k: random.Random(k).random())
        assert step == want and random.Random(step).random() <= best
        best = random.Random(step).random()
        assert len(checkpoint.steps(tmp_path)) <= 4


# Values beside a state.

ODD: Any = {
    "best": math.inf,
    "low": [-math.inf, 1.5, {"deep": math.nan}],
    "$float": "inf",
    "one": {"$float": "nan"},
    "two": {"$float": {"$float": 3}},
    "none": None,
}


def test_infinite_values_and_nan_come_back(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, tree(1), 1, user=ODD)
    text = (tmp_path / "step_000001" / "manifest.json").read_text()
    assert "Infinity" not in text and "NaN" not in text
    got: Any = checkpoint.restore(tmp_path, tree(0)).user
    assert math.isnan(got["low"][2].pop("deep")) and math.isnan(ODD["low"][2]["deep"])
    assert got == ODD | {"low": [-math.inf, 1.5, {}]}
    checkpoint.save(tmp_path, tree(2), 2, user=math.inf)
    assert checkpoint.restore(tmp_path, tree(0)).user == math.inf


def test_other_values_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TypeError) as error:
        checkpoint.save(tmp_path, tree(1), 1, user={"a": [1, {2}], "b": {"c": torch.ones(1)}, "d": 1})
    assert "user['a'][1], a set, is not JSON serializable" in str(error.value)
    assert "user['b']['c'], a Tensor, is not JSON serializable" in str(error.value)
    assert ".item()" in str(error.value) and "user['d']" not in str(error.value)
