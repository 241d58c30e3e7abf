"""Covers states saved in each layout of ranks, ZeRO stages, heads and layers, and restored in every other."""

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
from shardfn.collectives import GlobalTensor, Residual, blocks_of
from shardfn.core import named_leaves, tree_leaves, tree_paths
from shardfn.models import gpt
from shardfn.testing import distributed, shard_rows

CONFIG = gpt.Config.llama_like(vocab_size=19, num_layers=3, d_model=12, num_heads=3, d_ff=20, max_len=6, per_head=True)
# The tolerance for a step on other ranks, which sum in another order.
PARITY = 1e-5
# One layout: axes (dp, tp, pp), and the ZeRO stage along dp.
Layout = tuple[int, int, int, int]
LAYOUTS: list[Layout] = [
    (world // tp // pp, tp, pp, stage)
    for world, tp, pp in itertools.product((1, 2, 3, 4), (1, 2), (1, 2))
    if world % (tp * pp) == 0
    for stage in (0, 1, 3)
]
RING: list[Layout] = [(3, 1, 1, 3), (1, 2, 2, 0), (2, 2, 1, 1), (1, 1, 1, 0), (2, 1, 2, 3)]
UNCUT: list[Layout] = [(dp, tp, pp, 0) for dp, tp, pp, _ in RING]
ALONG_DP: list[Layout] = [(3, 1, 1, 3), (1, 1, 1, 0), (4, 1, 1, 1), (2, 1, 1, 0), (2, 1, 1, 3)]
DAY: list[Layout] = [(2, 1, 1, 3), (1, 2, 1, 0), (1, 1, 2, 0)]
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2)),
    "adam": lambda: optim.adam(1e-2),
    "lamb": lambda: optim.lamb(1e-2),
    "lion": lambda: optim.lion(1e-3),
    "sgd": lambda: optim.sgd(1e-2, momentum=0.9),
    "masters": lambda: optim.master_weights(optim.adamw(1e-2)),
    "delayed": lambda: optim.delayed(optim.adamw(1e-2)),
    "onebit_adam": lambda: optim.onebit_adam(1e-2, freeze_step=2),
    "apmsqueeze": lambda: optim.apmsqueeze(1e-2, freeze_step=2, compressor=sf.collectives.int4()),
    "onebit_lamb": lambda: optim.onebit_lamb(1e-2, freeze_step=2),
    "zero_one_adam": lambda: optim.zero_one_adam(1e-2, var_freeze_step=2),
}
# Ranks keep parts of the state for themselves; 1-bit LAMB's messages are of several leaves, so only dp may change.
RINGS: dict[str, list[Layout]] = dict.fromkeys(OPTIMIZERS, RING) | {"zero_one_adam": UNCUT, "onebit_lamb": ALONG_DP}
OWED, STEPS = ("onebit_adam", "apmsqueeze", "zero_one_adam"), 4
# Leaves that depend on the stage or on the number of ranks; those of `OWED` are compared laid out over the parameters.
OF_RANKS = (".residual", ".codes", ".begun")


def world_of(layout: Layout) -> int:
    return layout[0] * layout[1] * layout[2]


def name_of(layout: Layout) -> str:
    return "dp{}-tp{}-pp{}-zero{}".format(*layout)


def batch(n: int) -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, 19, (12, 7), generator=torch.Generator().manual_seed(n))}


def made(layout: Layout, name: str) -> tuple[Any, Any, Any]:
    """A step of a layout, how it gets parameters, and their specs; layers are stacked where they are staged."""
    dp, tp, pp, stage = layout
    config = dataclasses.replace(CONFIG, stacked=pp > 1)
    mesh = sf.make_mesh({"dp": dp, "tp": tp, "pp": pp}, device="cpu")
    if pp > 1:
        loss: Any = sf.pipeline(*gpt.stages(config, axis="tp"), num_microbatches=2)
    else:
        loss = functools.partial(gpt.loss, config, axis="tp")
    specs = gpt.specs(config, tp="tp", pp="pp" if pp > 1 else None)
    zero = sf.Zero(stage=stage, axis="dp", persist_elements=0)
    step = sf.sharded_step(loss, OPTIMIZERS[name](), mesh=mesh, specs=specs, batch=sf.P("dp"), zero=zero)
    return step, functools.partial(gpt.init, config), specs


def by_layer(leaves: dict[str, Tensor], lead: int = 0) -> dict[str, Tensor]:
    """The same with a stack of layers, which lie along dim `lead`, as one leaf each."""
    out = {}
    for path, x in leaves.items():
        if "['blocks']['" in path:
            rows = x.unbind(lead)
            out |= {path.replace("['blocks']", f"['blocks'][{i}]"): row.clone() for i, row in enumerate(rows)}
        else:
            out[path] = x.clone()
    return out


def own_blocks(state: Any, mesh: Any) -> dict[str, Any]:
    """This rank's block of each leaf but those of ranks: the leaf's shape, where the block is, and its values."""
    out = {}
    for path, x in named_leaves(state):
        spec, held = (x.spec, x.local) if isinstance(x, GlobalTensor) else (sf.P(), x)
        if not any(word in path for word in OF_RANKS):
            out[path] = tuple(x.shape), blocks_of(tuple(x.shape), spec, mesh)[mesh.rank], held.clone()
    return out


def whole(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """All those leaves, by path and layer; ranks that have the same elements must have the same bits."""
    out: dict[str, Tensor] = {}
    for path, (shape, _, first) in ranks[0].items():
        full, seen = torch.zeros(shape, dtype=first.dtype), torch.zeros(shape, dtype=torch.bool)
        for _, box, block in (own[path] for own in ranks):
            place = tuple(slice(lo, hi) for lo, hi in box)
            assert torch.equal(full[place][seen[place]], block[seen[place]]), path
            full[place], seen[place] = block, True
        assert seen.all(), path
        out[path] = full
    return by_layer(out)


def own_errors(state: Any, specs: Any, mesh: Any) -> dict[str, Any]:
    """This rank's errors: for each leaf its shape and block, the rank's index along dp, and both errors."""
    inner: Any = state.opt_state
    if not hasattr(inner, "adam"):
        return {}
    out = {}
    cuts = dict(named_leaves(specs))
    shapes = dict(named_leaves(state.params))
    residuals = tree_leaves(inner.residual, is_leaf=lambda x: isinstance(x, Residual))
    for path, r in zip(tree_paths(inner.residual, is_leaf=lambda x: isinstance(x, Residual)), residuals, strict=True):
        shape = tuple(shapes[path].shape)
        box = blocks_of(shape, cuts[path], mesh)[mesh.rank]
        held: list[Any] = [x.held if isinstance(x, GlobalTensor) else x for x in r]
        out[path] = shape, box, mesh.axis_index("dp"), *(x.clone() for x in held)
    return out


def over_leaves(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The ranks' errors, laid out over the leaves: `worker of w` [P, *shape], `server of w` [1, *shape]."""
    out: dict[str, Tensor] = {}
    for path in ranks[0]:
        rows = [own[path] for own in ranks]
        shape, num = rows[0][0], 1 + max(r[2] for r in rows)
        worker, server = torch.zeros(num, *shape), torch.zeros(1, *shape)
        for _, box, at, own, _ in rows:
            size = [hi - lo for lo, hi in box]
            place = tuple(slice(lo, hi) for lo, hi in box)
            worker[(at, *place)] = own[0, : torch.Size(size).numel()].view(size)
            chunks = {r[2]: r[4] for r in rows if r[1] == box}
            flat = torch.cat([chunks[k] for k in range(num)])
            server[(0, *place)] = flat[: torch.Size(size).numel()].view(size)
        out |= {f"worker of {path}": worker, f"server of {path}": server}
    return by_layer(out, 1)


def went_on(step: Any, state: Any, specs: Any) -> Any:
    """A rank's blocks and errors of the state, the same one step later, and the loss of that step."""
    now = own_blocks(state, step.mesh), own_errors(state, specs, step.mesh)
    state, metrics = step(state, shard_rows(batch(STEPS), sf.P("dp"), step.mesh))
    return *now, own_blocks(state, step.mesh), own_errors(state, specs, step.mesh), float(metrics["loss"])


@distributed(world=[1, 2, 3, 4], timeout=900)
def _saved(directory: pathlib.Path, layouts: list[Layout], name: str, world: int) -> Any:
    out = {}
    for layout in layouts:
        step, init, specs = made(layout, name)
        state = step.init(init, sf.key(0))
        for n in range(STEPS):
            state, _ = step(state, shard_rows(batch(n), sf.P("dp"), step.mesh))
        checkpoint.save(directory / name_of(layout), state, durable=False)
        out[layout] = went_on(step, state, specs)
    return out


@distributed(world=[1, 2, 3, 4], timeout=900)
def _restored(directory: pathlib.Path, layout: Layout, sources: list[Layout], name: str, world: int) -> Any:
    step, init, specs = made(layout, name)
    out = {}
    for source in sources:
        like = step.init(sf.eval_shape(init, sf.key(1)))
        state = checkpoint.restore(directory / name_of(source), like).tree
        out[source] = went_on(step, state, specs)
    return out


def assert_bits(found: dict[str, Tensor], want: dict[str, Tensor], where: object) -> None:
    assert found.keys() == want.keys(), where
    wrong = [p for p, x in found.items() if x.dtype != want[p].dtype or not torch.equal(x, want[p])]
    assert not wrong, (where, wrong)


def assert_close(found: dict[str, Tensor], want: dict[str, Tensor], where: object) -> None:
    for path, x in want.items():
        scale = float(x.abs().max()) if x.numel() else 1.0
        torch.testing.assert_close(
            found[path], x, rtol=PARITY, atol=PARITY * scale, msg=lambda m, p=path: f"{where} {p}: {m}"
        )


def assert_owed(old: list[dict[str, Any]], new: list[dict[str, Any]], where: object) -> None:
    """On an equal number of ranks the errors are the same bits; else each rank has the mean of the old ones'."""
    want, found = over_leaves(old), over_leaves(new)
    for path, x in want.items():
        num = len(found[path])
        want[path] = x if len(x) == num else (x.sum(0) / len(x)).expand(num, *x.shape[1:])
    assert_bits(found, want, where)
    assert any(x.any() for path, x in found.items() if path.startswith("worker"))


def owing(after: list[Any], state: dict[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """By leaf, the momentum as sent and the mean errors of workers and server: their sum is the exact momentum."""
    errors = over_leaves([rank[3] for rank in after])
    mus = {p[p.index(".mu") + 3 :]: x for p, x in state.items() if ".mu[" in p}
    return {p: (x, errors[f"worker of {p}"].mean(0), errors[f"server of {p}"][0]) for p, x in mus.items()}


def assert_owing(found: dict[str, tuple[Tensor, ...]], want: dict[str, tuple[Tensor, ...]], where: object) -> None:
    """The sums are equal, up to rounding at the scale of their terms."""
    for path, terms in want.items():
        scale = max(float(x.abs().max()) for x in terms)
        difference = float((sum(found[path]) - sum(terms)).abs().max())  # type: ignore[union-attr]
        assert difference <= PARITY * scale, (where, path, difference, scale)


def saved(directory: pathlib.Path, sources: list[Layout], name: str) -> dict[Layout, list[Any]]:
    out: dict[Layout, list[Any]] = {}
    for world in sorted({world_of(x) for x in sources}):
        own = [x for x in sources if world_of(x) == world]
        ranks = _saved(directory, own, name, world=world)
        out |= {x: [rank[x] for rank in ranks] for x in own}
    return out


def assert_restored(
    directory: pathlib.Path, all_saved: dict[Layout, list[Any]], target: Layout, sources: list[Layout], name: str
) -> None:
    """A layout restores the saved state bit for bit; and its next step is that of the job that saved it.

    LAMB has a ratio a leaf, so that a stack of layers makes another step than a list of them.
    """
    ranks = _restored(directory, target, sources, name, world=world_of(target))
    for source in sources:
        old, new, where = all_saved[source], [rank[source] for rank in ranks], f"{name}, {source} to {target}"
        assert_bits(whole([r[0] for r in new]), whole([r[0] for r in old]), where)
        went, goes = whole([r[2] for r in old]), whole([r[2] for r in new])
        assert new[0][4] == pytest.approx(old[0][4], rel=PARITY), where
        if name in OWED:
            assert_owed([r[1] for r in old], [r[1] for r in new], where)
        if source[:3] == target[:3] and (name in OWED or source[3] == target[3]):
            assert_bits(goes, went, where)
        if name in OWED and name != "zero_one_adam":
            assert_owing(owing(new, goes), owing(old, went), where)
        elif name not in (*OWED, "onebit_lamb") and (name != "lamb" or (source[2] > 1) == (target[2] > 1)):
            assert_close(goes, went, where)


def ring(layouts: list[Layout]) -> list[tuple[Layout, Layout]]:
    return [(x, layouts[(i + 1) % len(layouts)]) for i, x in enumerate(layouts)]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["adamw", "onebit_adam"])
def test_from_ranks_of_data_to_heads_to_layers(tmp_path: pathlib.Path, name: str) -> None:
    states = saved(tmp_path, DAY, name)
    for source, target in ring(DAY):
        assert_restored(tmp_path, states, target, [source], name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in ("adamw", "onebit_adam")])
def test_around_a_ring_of_layouts(tmp_path: pathlib.Path, name: str) -> None:
    states = saved(tmp_path, RINGS[name], name)
    for source, target in ring(RINGS[name]):
        assert_restored(tmp_path, states, target, [source], name)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The states of an optimizer saved in all layouts, once."""

    @functools.cache
    def of(name: str) -> tuple[pathlib.Path, dict[Layout, list[Any]]]:
        place = tmp_path_factory.mktemp(name)
        return place, saved(place, LAYOUTS, name)

    return of


@pytest.mark.nightly
@pytest.mark.parametrize("target", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("name", ["adamw", "onebit_adam"])
def test_every_layout_restores_every_other(everything: Any, name: str, target: Layout) -> None:
    place, states = everything(name)
    assert_restored(place, states, target, LAYOUTS, name)
