"""Covers states that are saved on one mesh and restored on another: world, ZeRO stage, tp, pp, memory, optimizer."""

import dataclasses
import functools
import itertools
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import checkpoint, optim
from shardfn.collectives import unshard
from shardfn.core import tree_leaves, tree_paths
from shardfn.models import gpt
from shardfn.testing import distributed, odd_batch, odd_loss, odd_params, own_rows

CONFIG = gpt.Config.llama_like(vocab_size=19, num_layers=3, d_model=12, num_heads=3, d_ff=20, max_len=6, per_head=True)
# One layout: axes (dp, tp, pp), and the ZeRO stage along dp.
Layout = tuple[int, int, int, int]
LAYOUTS: list[Layout] = [
    (world // tp // pp, tp, pp, stage)
    for world, tp, pp in itertools.product((1, 2, 3, 4), (1, 2), (1, 2))
    if world % (tp * pp) == 0
    for stage in (0, 1, 3)
]
RING: list[Layout] = [(3, 1, 1, 3), (1, 2, 2, 0), (2, 2, 1, 1), (1, 1, 1, 0), (2, 1, 2, 3)]
DAY: list[Layout] = [(2, 1, 1, 3), (1, 2, 1, 0), (1, 1, 2, 0)]
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2)),
    "lamb": lambda: optim.lamb(1e-2),
    "lion": lambda: optim.lion(1e-3),
    "sgd": lambda: optim.sgd(1e-2, momentum=0.9),
}


def world_of(layout: Layout) -> int:
    return layout[0] * layout[1] * layout[2]


def name_of(layout: Layout) -> str:
    return "dp{}-tp{}-pp{}-zero{}".format(*layout)


def batch() -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, 19, (12, 7), generator=torch.Generator().manual_seed(3))}


def made(layout: Layout, optimizer: Any) -> tuple[Any, Any]:
    """A step of a layout, and its parameters; a pipeline's layers are stacked, the others' are in a list."""
    dp, tp, pp, stage = layout
    config = dataclasses.replace(CONFIG, stacked=pp > 1)
    mesh = sf.make_mesh({"dp": dp, "tp": tp, "pp": pp}, device="cpu")
    if pp > 1:
        loss: Any = sf.pipeline(*gpt.stages(config, axis="tp"), num_microbatches=2)
    else:
        loss = functools.partial(gpt.loss, config, axis="tp")
    specs = gpt.specs(config, tp="tp", pp="pp" if pp > 1 else None)
    zero = sf.Zero(stage=stage, axis="dp", persist_elements=0)
    step = sf.sharded_step(loss, optimizer, mesh=mesh, specs=specs, batch=sf.P("dp"), zero=zero)
    return step, config


def layers(state: Any) -> dict[str, Tensor]:
    """All leaves, whole, by path; a stack of layers as one leaf each. Collective."""
    out = {}
    for path, x in zip(tree_paths(state), tree_leaves(unshard(state)), strict=True):
        if "['blocks']['" in path:
            out |= {path.replace("['blocks']", f"['blocks'][{i}]"): row.clone() for i, row in enumerate(x)}
        else:
            out[path] = x.clone()
    return out


@distributed(world=[1, 2, 3, 4])
def _saved(directory: pathlib.Path, layouts: list[Layout], name: str, world: int) -> Any:
    out = {}
    for layout in layouts:
        step, config = made(layout, OPTIMIZERS[name]())
        state = step.init(functools.partial(gpt.init, config), sf.key(0))
        for _ in range(2):
            state, _ = step(state, own_rows(batch(), sf.P("dp"), step.mesh))
        checkpoint.save(directory / name_of(layout), state, durable=False)
        out[layout] = layers(state)
    return out


@distributed(world=[1, 2, 3, 4])
def _restored(directory: pathlib.Path, layout: Layout, sources: list[Layout], name: str, world: int) -> Any:
    step, config = made(layout, OPTIMIZERS[name]())
    out = {}
    for source in sources:
        like = step.init(sf.eval_shape(functools.partial(gpt.init, config), sf.key(1)))
        restored = checkpoint.restore(directory / name_of(source), like)
        state = restored.tree
        found = layers(state)
        state, metrics = step(state, own_rows(batch(), sf.P("dp"), step.mesh))
        out[source] = found, float(metrics["loss"])
    return out


def assert_moved(directory: pathlib.Path, sources: list[Layout], targets: Any, name: str = "adamw") -> None:
    """What was saved in each layout is what others restore, bit for bit; and they go on alike."""
    saved: dict[Layout, dict[str, Tensor]] = {}
    for world in sorted({world_of(x) for x in sources}):
        saved |= _saved(directory, [x for x in sources if world_of(x) == world], name, world=world)[0]
    losses: dict[Layout, list[float]] = {}
    for target, own in targets:
        got = _restored(directory, target, own, name, world=world_of(target))
        for source, (found, loss) in got[0].items():
            want = saved[source]
            assert found.keys() == want.keys()
            wrong = [p for p, x in found.items() if x.dtype != want[p].dtype or not torch.equal(x, want[p])]
            assert not wrong, (source, target, wrong)
            losses.setdefault(source, []).append(loss)
    for found in losses.values():
        torch.testing.assert_close(torch.tensor(found), torch.full((len(found),), found[0]), rtol=1e-5, atol=0)


def ring(layouts: list[Layout]) -> list[tuple[Layout, list[Layout]]]:
    """Each layout, to be restored from the one before it."""
    return [(layouts[(i + 1) % len(layouts)], [x]) for i, x in enumerate(layouts)]


def test_adamw_from_ranks_of_data_to_heads_to_layers(tmp_path: pathlib.Path) -> None:
    assert_moved(tmp_path, DAY, ring(DAY))


@pytest.mark.nightly
def test_adamw_around_a_ring_of_layouts(tmp_path: pathlib.Path) -> None:
    assert_moved(tmp_path, RING, ring(RING))


@pytest.mark.nightly
@pytest.mark.parametrize("source", LAYOUTS, ids=name_of)
def test_adamw_from_every_layout_to_every_other(tmp_path: pathlib.Path, source: Layout) -> None:
    assert_moved(tmp_path, [source], [(x, [source]) for x in LAYOUTS])


@pytest.mark.nightly
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "adamw"])
def test_other_optimizers_around_a_ring(tmp_path: pathlib.Path, name: str) -> None:
    assert_moved(tmp_path, RING, ring(RING), name)


# 1-bit Adam: what ranks owe one another


def onebit(world: int, stage: int) -> Any:
    zero = sf.Zero(stage=stage, axis="dp", persist_elements=2)
    tx = optim.chain(optim.onebit_adam(1e-2, freeze_step=2))
    return sf.sharded_step(odd_loss, tx, mesh=sf.make_mesh({"dp": world}, device="cpu"), zero=zero)


@distributed(world=[1, 2, 3])
def _owing(directory: pathlib.Path, stage: int, world: int) -> Any:
    step = onebit(world, stage)
    state = step.init(odd_params())
    for n in range(5):
        state, _ = step(state, own_rows(odd_batch(n), sf.P("dp"), step.mesh))
    checkpoint.save(directory / f"{world}-{stage}", state, durable=False)
    return unshard(state)


@distributed(world=[1, 2, 3])
def _going_on(directory: pathlib.Path, source: str, stage: int, world: int) -> Any:
    step = onebit(world, stage)
    state = checkpoint.restore(directory / source, step.init(odd_params())).tree
    found = unshard(state)
    state, metrics = step(state, own_rows(odd_batch(5), sf.P("dp"), step.mesh))
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
