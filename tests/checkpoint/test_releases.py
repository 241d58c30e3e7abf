"""Covers checkpoints that earlier releases have written: they verify, and restore to the values that were saved.

Each release keeps one in `releases/<version>`, beside `values.safetensors`, its whole leaves as other tools write
them. When the version in pyproject.toml changes, the next one is made by

    python -c "import test_releases; test_releases.keep()"    # in this directory, with shardfn on the path
"""

import pathlib
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardfn as sf
from shardfn import checkpoint, optim
from shardfn.collectives import unshard
from shardfn.core import tree_leaves, tree_paths
from shardfn.testing import distributed, odd_batch, odd_loss, odd_params, shard_rows

RELEASES = pathlib.Path(__file__).parent / "releases"
VERSIONS = sorted(p.name for p in RELEASES.iterdir() if p.is_dir())
USER = {"next_batch": 4, "about": ["text", 1.5, None, True]}


def adamw() -> optim.GradientTransformation:
    return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))


def onebit_adam() -> optim.GradientTransformation:
    return optim.chain(optim.onebit_adam(1e-2, freeze_step=2))


OPTIMIZERS: dict[str, Any] = {"adamw": adamw, "onebit_adam": onebit_adam}


def made(name: str, world: int, stage: int) -> Any:
    zero = sf.Zero(stage=stage, axis="dp", persist_elements=2)
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    return sf.sharded_step(odd_loss, OPTIMIZERS[name](), mesh=mesh, zero=zero)


def wholes(state: Any) -> dict[str, torch.Tensor]:
    """All leaves, whole, by path. Collective."""
    return {p: x.clone() for p, x in zip(tree_paths(state), tree_leaves(unshard(state)), strict=True)}


@distributed(world=[2])
def _kept(place: pathlib.Path, world: int) -> Any:
    out = {}
    for name in OPTIMIZERS:
        step = made(name, world, stage=1)
        state = step.init(odd_params())
        for n in range(4):
            state, _ = step(state, shard_rows(odd_batch(n), sf.P("dp"), step.mesh))
        checkpoint.save(place / name, state, user=USER)
        out[name] = wholes(state)
    return out


def keep(place: pathlib.Path = RELEASES / sf.__version__) -> None:
    """Writes the checkpoints of this release."""
    for name, values in _kept(place, world=2)[0].items():
        save_file(values, place / name / "values.safetensors")
        (place / name / "owner").unlink()  # the lock, which is free


@distributed(world=[1, 2, 3])
def _opened(place: pathlib.Path, name: str, stage: int, world: int) -> Any:
    step = made(name, world, stage)
    restored = checkpoint.restore(place, step.init(odd_params()))
    found = wholes(restored.tree)
    _, metrics = step(restored.tree, shard_rows(odd_batch(4), sf.P("dp"), step.mesh))
    return restored.step, restored.user, found, float(metrics["loss"])


def assert_opens(place: pathlib.Path, name: str, world: int, stage: int, but: str = "^$") -> None:
    """The restored state has the saved bits, except at paths that match `but`; and a step can go on."""
    want = load_file(place / "values.safetensors")
    number, user, found, loss = _opened(place, name, stage, world=world)[0]
    assert (number, user) == (4, USER) and loss < float("inf")
    compared = [p for p in want if not re.search(but, p)]
    assert {*compared} == {p for p in found if not re.search(but, p)}
    assert len(compared) > 20
    wrong = [p for p in compared if found[p].dtype != want[p].dtype or not torch.equal(found[p], want[p])]
    assert not wrong, wrong


def test_this_release_has_kept_one() -> None:
    assert sf.__version__ in VERSIONS, f"the version has changed; keep a checkpoint of it: {__doc__}"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_release_verifies(version: str, name: str) -> None:
    place = RELEASES / version / name
    assert checkpoint.steps(place) == [4]
    assert checkpoint.verify(place).files > 2
    assert sum(p.stat().st_size for p in (RELEASES / version).rglob("*") if p.is_file()) < 100_000


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("world", "stage"),
    [(1, 0), pytest.param(2, 1, marks=pytest.mark.nightly), pytest.param(3, 3, marks=pytest.mark.nightly)],
)
def test_adamw_of_a_release_opens(version: str, world: int, stage: int) -> None:
    assert_opens(RELEASES / version / "adamw", "adamw", world, stage)


@pytest.mark.parametrize("version", VERSIONS)
def test_onebit_adam_of_a_release_opens_with_the_errors_of_ranks(version: str) -> None:
    assert_opens(RELEASES / version / "onebit_adam", "onebit_adam", 2, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("version", VERSIONS)
def test_onebit_adam_of_a_release_opens_on_other_ranks(version: str) -> None:
    assert_opens(RELEASES / version / "onebit_adam", "onebit_adam", 3, 0, but=r"\.(residual|codes|begun)\b")


def test_stored_checkpoints_equal_those_saved_now(tmp_path: pathlib.Path) -> None:
    """A change of the format, or of the names of leaves, is one that the kept checkpoint shows."""
    keep(tmp_path)
    for name in OPTIMIZERS:
        old, new = (checkpoint.inspect(p / name).splitlines()[1:] for p in (RELEASES / sf.__version__, tmp_path))
        assert old == new
