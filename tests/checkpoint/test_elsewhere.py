"""Covers the errors of 1-bit Adam, restored on other numbers of ranks, stages and blocks; see `test_grid`."""

import itertools
import pathlib
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import checkpoint, optim
from shardfn.collectives import unshard
from shardfn.core import tree_leaves, tree_paths
from shardfn.testing import distributed, odd_batch, odd_loss, odd_params, shard_rows


def onebit(world: int, stage: int) -> Any:
    zero = sf.Zero(stage=stage, axis="dp", persist_elements=2)
    tx = optim.chain(optim.onebit_adam(1e-2, freeze_step=2))
    return sf.sharded_step(odd_loss, tx, mesh=sf.make_mesh({"dp": world}, device="cpu"), zero=zero)


@distributed(world=[1, 2, 3])
def _owing(directory: pathlib.Path, stage: int, world: int) -> Any:
    step = onebit(world, stage)
    state = step.init(odd_params())
    for n in range(5):
        state, _ = step(state, shard_rows(odd_batch(n), sf.P("dp"), step.mesh))
    checkpoint.save(directory / f"{world}-{stage}", state, durable=False)
    return unshard(state)


@distributed(world=[1, 2, 3])
def _going_on(directory: pathlib.Path, source: str, stage: int, world: int) -> Any:
    step = onebit(world, stage)
    state = checkpoint.restore(directory / source, step.init(odd_params())).tree
    found = unshard(state)
    state, metrics = step(state, shard_rows(odd_batch(5), sf.P("dp"), step.mesh))
    assert metrics["loss"].isfinite()
    return found


def assert_owes_the_same(old: Any, new: Any, *, exact: bool) -> None:
    assert_equal((new.params, new.opt_state[0].adam), (old.params, old.opt_state[0].adam))
    a, b = old.opt_state[0].residual, new.opt_state[0].residual
    if exact:
        return assert_equal(b, a)
    owed = False
    for x, y in zip(*(tree_leaves(t, is_leaf=lambda r: hasattr(r, "worker")) for t in (a, b)), strict=True):
        n = min(x.worker.shape[1], y.worker.shape[1])
        one, other = ((r.worker.mean(0)[:n] + r.server[:n]) for r in (x, y))
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-7)
        owed = owed or bool(one.any())
    assert owed


def assert_equal(got: Any, want: Any) -> None:
    for path, a, b in zip(tree_paths(want), tree_leaves(got), tree_leaves(want), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), path


@pytest.mark.nightly
def test_errors_of_compression_are_kept(tmp_path: pathlib.Path) -> None:
    old = _owing(tmp_path, 1, world=2)[0]
    assert_owes_the_same(old, _going_on(tmp_path, "2-1", 1, world=2)[0], exact=True)
    assert_owes_the_same(old, _going_on(tmp_path, "2-1", 0, world=2)[0], exact=True)  # other codes, the same errors
    assert_owes_the_same(old, _going_on(tmp_path, "2-1", 3, world=3)[0], exact=False)


@pytest.mark.nightly
def test_errors_of_compression_from_each_to_each(tmp_path: pathlib.Path) -> None:
    places = list(itertools.product((1, 2, 3), (0, 1, 3)))
    old = {(world, stage): _owing(tmp_path, stage, world=world)[0] for world, stage in places}
    for (world, stage), (others, other) in itertools.product(places, places):
        new = _going_on(tmp_path, f"{world}-{stage}", other, world=others)[0]
        assert_owes_the_same(old[world, stage], new, exact=world == others)


def compressing(specs: Any) -> Any:
    """The state of 1-bit Adam on two ranks of data times two blocks, with errors that differ everywhere."""
    mesh = sf.make_mesh({"dp": 2, "tp": 2}, device="cpu")
    step = sf.sharded_step(lambda p, x: x.sum(), optim.onebit_adam(1e-2, freeze_step=2), mesh=mesh, specs=specs)
    params = {k: torch.zeros(shape) for k, shape in (("w", (6, 8)), ("b", (5,))) if k in specs}
    return step.init(params)


def owed_of(state: Any) -> list[torch.Tensor]:
    worker, server = state.opt_state.residual["w"]
    return [worker.full_tensor().view(2, 2, -1)[..., :24], server.full_tensor().view(1, 2, -1)[..., :24]]


@distributed(world=4)
def _other_dim(directory: pathlib.Path) -> None:
    rows, columns = {"w": sf.P("tp"), "b": sf.P()}, {"w": sf.P(None, "tp"), "b": sf.P()}
    state = compressing(rows)
    for i, x in enumerate(tree_leaves(state.opt_state.residual)):
        x.held.copy_(torch.randn(x.held.shape, generator=torch.Generator().manual_seed(10 * x.mesh.rank + i)))
    old = [x.clone() for x in owed_of(state)]
    checkpoint.save(directory / "two", state, 0)
    new = owed_of(checkpoint.restore(directory / "two", compressing(columns)).tree)
    for was, now in zip(old, new, strict=True):
        over = torch.cat([was[:, k].view(-1, 3, 8) for k in range(2)], dim=1)
        assert torch.equal(torch.cat([now[:, k].view(-1, 6, 4) for k in range(2)], dim=2), over)
    # With no leaf that the axis leaves whole, it may be one of those that cut messages and no leaf.
    checkpoint.save(directory / "one", compressing({"w": sf.P("tp")}), 0)
    with pytest.raises(ValueError, match=r"all of its errors are cut along tp, which may be of the axes inside"):
        checkpoint.restore(directory / "one", compressing({"w": sf.P(None, "tp")}))


@pytest.mark.nightly
def test_errors_of_leaves_that_are_cut_along_another_dim_move(tmp_path: pathlib.Path) -> None:
    _other_dim(tmp_path)


CUTS = {"w": sf.P("tp"), "b": sf.P("tp")}
RULES = {
    "onebit_lamb": lambda: optim.onebit_lamb(1e-2, freeze_step=2),
    "onebit_adam": lambda: optim.onebit_adam(1e-2, freeze_step=2),
    "zero_one_adam": lambda: optim.zero_one_adam(1e-2, var_freeze_step=2, local_step_clipper=1),
}


def squares(axes: dict[str, int], specs: Any, name: str) -> Any:
    """A step over leaves that an axis cuts, and a state of it."""

    def loss(p: Any, x: torch.Tensor) -> Any:
        cut = {k: "tp" if "tp" in axes and "tp" in specs[k].axes else None for k in p}
        return sum(sf.psum((v * x.sum()).square().sum(), cut[k]) for k, v in p.items())

    zero = sf.Zero(stage=int(name != "zero_one_adam"), axis="dp", persist_elements=0)  # codes are kept at stage 1
    step = sf.sharded_step(loss, RULES[name](), mesh=sf.make_mesh(axes, device="cpu"), specs=specs, zero=zero)
    return step, step.init({"w": torch.linspace(-1, 1, 48).view(6, 8), "b": torch.linspace(1, 2, 5)})


def without_errors(path: str) -> str | None:
    return None if ".residual" in path else path


@distributed(world=4)
def _given_up(directory: pathlib.Path, name: str) -> None:
    step, state = squares({"dp": 2, "tp": 2}, CUTS, name)
    for _ in range(4):
        state, _ = step(state, torch.full((2, 3), 0.02))
    assert any(bool(x.full_tensor().any()) for x in tree_leaves(state.opt_state.residual))
    checkpoint.save(directory / name, state, 0)
    for axes, specs in (
        ({"dp": 2, "tp": 2}, {"w": sf.P(None, "tp"), "b": sf.P()}),
        ({"dp": 4}, {"w": sf.P(), "b": sf.P()}),
    ):
        other, like = squares(axes, specs, name)
        with pytest.raises(ValueError, match=r"rename=lambda path: None if '.residual' in path else path"):
            checkpoint.restore(directory / name, like)
        got = checkpoint.restore(directory / name, like, rename=without_errors).tree
        assert not any(bool(x.full_tensor().any()) for x in tree_leaves(got.opt_state.residual))
        moments = [x.opt_state.lamb if name == "onebit_lamb" else x.opt_state.adam for x in (got, state)]
        assert_equal(*map(unshard, moments))
        assert_equal(unshard(got.params), unshard(state.params))
        codes = tree_leaves(getattr(got.opt_state, "codes", ()))
        assert bool(codes) == (name != "zero_one_adam")
        if codes:  # those of other messages are no use
            assert int(got.opt_state.freeze.begun.full_tensor()) == 0
        _, metrics = other(got, torch.full((2, 3), 0.02))
        assert metrics["loss"].isfinite()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_errors_that_cannot_be_cut_anew_may_begin_at_zero(name: str, tmp_path: pathlib.Path) -> None:
    _given_up(tmp_path, name)
