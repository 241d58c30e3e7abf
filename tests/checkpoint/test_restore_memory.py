"""Covers the memory that a restore takes: that of the rank's blocks, and at most one leaf more."""

import math
import pathlib
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import checkpoint
from shardfn.collectives import GlobalTensor, blocks_of
from shardfn.core import P, tree_leaves
from shardfn.interop import gpt_from_hf, gpt_to_hf
from shardfn.memory import ledger
from shardfn.models import gpt
from shardfn.testing import distributed

SHAPES = {"a": (1024, 768), "b": (511, 1030), "c": (3, 256, 700), "d": (33,), "e": (700, 2, 515)}


def specs_of(cut: str) -> dict[str, P]:
    last = {name: P(*[None] * (len(shape) - 1), "dp") for name, shape in SHAPES.items()}
    return last if cut == "columns" else {name: P("dp") if cut == "rows" else P() for name in SHAPES}


def values(scale: int = 1) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {k: torch.randn((scale * s[0], *s[1:]), generator=g) for k, s in SHAPES.items()}


def own_bytes(tree: Any) -> int:
    return sum(x.local.nbytes for x in tree_leaves(tree))


def abstract(cut: str, dtype: torch.dtype, mesh: Any, scale: int = 1) -> dict[str, GlobalTensor]:
    """A tree that takes no memory."""
    out = {}
    for name, (first, *rest) in SHAPES.items():
        shape, spec = (scale * first, *rest), specs_of(cut)[name]
        box = blocks_of(shape, spec, mesh)[mesh.rank]
        block = torch.empty([hi - lo for lo, hi in box], dtype=dtype, device="meta")
        out[name] = GlobalTensor(block, torch.Size(shape), spec, mesh)
    return out


@distributed(world=[1, 2, 3])
def _saved(directory: pathlib.Path, world: int) -> None:
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    tree = {k: sf.shard(x, specs_of("rows")[k], mesh) for k, x in values().items()}
    checkpoint.save(directory, tree, 0, durable=False)


@distributed(world=[1, 2, 3])
def _restored(directory: pathlib.Path, cut: str, dtype: torch.dtype, world: int) -> None:
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    like = abstract(cut, dtype, mesh)
    with ledger() as book:
        tree = checkpoint.restore(directory, like).tree
    own, leaf = own_bytes(tree), max(math.prod(s) * 4 for s in SHAPES.values())
    assert own <= book.peak("device") + book.peak("host") <= own + leaf
    for name, x in values().items():
        assert torch.equal(tree[name].full_tensor(), x.to(dtype))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("cut", "dtype"),
    [
        ("rows", torch.float32),
        pytest.param("columns", torch.float64, marks=pytest.mark.nightly),
        pytest.param("whole", torch.float32, marks=pytest.mark.nightly),
    ],
)
def test_a_restore_has_its_blocks_and_no_more_than_a_leaf(tmp_path: pathlib.Path, cut: str, dtype: torch.dtype) -> None:
    _saved(tmp_path, world=3)
    _restored(tmp_path, cut, dtype, world=2)


@pytest.mark.nightly
@distributed(world=2)
def test_weights_of_hugging_face_are_read_a_leaf_at_a_time() -> None:
    place = [tempfile.mkdtemp()]
    dist.broadcast_object_list(place)
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    config = gpt.Config(vocab_size=512, num_layers=3, d_model=192, num_heads=3, tie_embeddings=True)
    whole = gpt.init(config, sf.key(0))
    if mesh.rank == 0:
        gpt_to_hf(place[0], config, whole)
    dist.barrier()
    config, params = gpt_from_hf(place[0])
    step = sf.sharded_step(
        lambda p, x: x.sum(), sf.optim.sgd(0.0), mesh=mesh, specs=gpt.specs(config),
        zero=sf.Zero(stage=3, persist_elements=0),
    )  # fmt: skip
    with ledger() as book:
        state = step.init(params)
    own = sum(x.held.nbytes if isinstance(x, GlobalTensor) else x.nbytes for x in tree_leaves(state))
    leaf = max(x.nbytes for x in tree_leaves(whole))
    assert own <= book.peak("device") + book.peak("host") <= own + leaf
    for x, y in zip(tree_leaves(state.params), tree_leaves(whole), strict=True):
        assert torch.equal(x.full_tensor(), y)


def peak_rss() -> int:
    """The most that this process has had resident since the last time."""
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) << 10


@distributed(world=[2, 3], timeout=400)
def _resident(directory: pathlib.Path, world: int) -> None:
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    if world == 3:
        tree = {k: sf.shard(x, specs_of("rows")[k], mesh) for k, x in values(32).items()}
        checkpoint.save(directory, tree, 0, durable=False)
        return
    checkpoint.save(directory / "first", {"x": sf.shard(torch.ones(8), P("dp"), mesh)}, 0)  # loads code and buffers
    checkpoint.restore(directory / "first", {"x": sf.shard(torch.zeros(8), P("dp"), mesh)})
    like = abstract("columns", torch.float32, mesh, 32)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = peak_rss()
    tree = checkpoint.restore(directory, like).tree
    own, leaf = own_bytes(tree), max(math.prod(s) * 32 * 4 for s in SHAPES.values())
    taken = peak_rss() - before
    assert own <= taken <= own + leaf, (own, taken, leaf)


@pytest.mark.nightly
def test_a_restore_is_resident_with_its_blocks_and_no_more_than_a_leaf(tmp_path: pathlib.Path) -> None:
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError as problem:
        pytest.skip(f"peaks cannot be reset here: {problem}")
    _resident(tmp_path, world=3)
    _resident(tmp_path, world=2)
