"""Covers `checkpoint.save_dcp` and `restore_dcp`: torch's DCP reads our checkpoints, and we read its checkpoints."""

import pathlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardfn as sf
from shardfn import checkpoint, optim
from shardfn.collectives import GlobalTensor, unshard
from shardfn.core import P, tree_leaves, tree_paths
from shardfn.testing import distributed, odd_batch, odd_loss, odd_params, shard_rows


def wholes() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(4)
    return {
        "w": torch.randn(7, 5, generator=g),
        "b": torch.randn(5, generator=g).bfloat16(),
        "n": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "one": torch.randn(1, generator=g).double(),
    }


def made(world: int, stage: int) -> Any:
    zero = sf.Zero(stage=stage, axis="dp", persist_elements=2)
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    return sf.sharded_step(odd_loss, optim.adamw(1e-2), mesh=mesh, zero=zero)


def by_path(state: Any) -> dict[str, torch.Tensor]:
    pairs = zip(tree_paths(state), tree_leaves(unshard(state)), strict=True)
    return {p.removeprefix("."): x.clone() for p, x in pairs}


def assert_bits(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    wrong = [p for p, x in want.items() if got[p].dtype != x.dtype or not torch.equal(got[p], x)]
    assert not wrong, wrong


@distributed(world=[1, 2, 3])
def _state_saved(place: pathlib.Path, world: int) -> Any:
    step = made(world, stage=3)
    state = step.init(odd_params())
    for n in range(2):
        state, _ = step(state, shard_rows(odd_batch(n), P("dp"), step.mesh))
    checkpoint.save_dcp(place / f"{world}", state)
    return by_path(state)


@distributed(world=[1, 2, 3])
def _state_restored(place: pathlib.Path, stage: int, world: int) -> Any:
    step = made(world, stage)
    state = checkpoint.restore_dcp(place, step.init(odd_params()))
    found = by_path(state)
    step(state, shard_rows(odd_batch(2), P("dp"), step.mesh))
    return found


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP's warning in one process
@pytest.mark.parametrize("source", [1, 2, 3])
def test_a_state_saved_for_dcp_is_read_by_torch_and_by_us(tmp_path: pathlib.Path, source: int) -> None:
    want = _state_saved(tmp_path, world=source)[0]
    plain = {p: torch.full_like(x, 9) for p, x in want.items()}
    dcp.load(plain, checkpoint_id=tmp_path / f"{source}", no_dist=True)
    assert_bits(plain, want)
    for target, stage in ((1, 0), (2, 1), (3, 3)):
        if target != source or source == 3:
            assert_bits(_state_restored(tmp_path / f"{source}", stage, world=target)[0], want)


@distributed(world=[1, 2, 3])
def _dtensors_saved(place: pathlib.Path, world: int) -> None:
    mesh = sf.make_mesh({"dp": world}, device="cpu").device_mesh
    if mesh is None:  # one process, and so no DTensors
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save({"model": wholes(), "epoch": 3}, checkpoint_id=place)
        return
    cuts = {"w": Shard(0), "b": Shard(0), "n": Replicate(), "empty": Shard(1), "one": Replicate()}
    model = {k: distribute_tensor(x, mesh, [cuts[k]]) for k, x in wholes().items()}
    dcp.save({"model": model, "epoch": 3}, checkpoint_id=place)


@distributed(world=[1, 2, 3])
def _dtensors_restored(place: pathlib.Path, world: int) -> Any:
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    like: dict[str, Any] = {
        k: sf.shard(torch.zeros_like(x), P(*[None] * (x.ndim - 1), "dp") if x.ndim else P(), mesh)
        for k, x in wholes().items()
    }
    like["n"] = torch.tensor(0)
    tree = checkpoint.restore_dcp(place, like, rename=lambda path: "model." + path[2:-2])
    return {k: x.full_tensor().clone() if isinstance(x, GlobalTensor) else x for k, x in tree.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("source", [1, 2, 3])
def test_dtensors_saved_by_torch_are_restored_on_any_mesh(tmp_path: pathlib.Path, source: int) -> None:
    _dtensors_saved(tmp_path, world=source)
    for target in (1, 2, 3):
        for found in _dtensors_restored(tmp_path, world=target):
            assert_bits(found, wholes())


def test_every_leaf_that_does_not_fit_is_listed_before_a_value_is_read(tmp_path: pathlib.Path) -> None:
    assert not dist.is_initialized()
    checkpoint.save_dcp(tmp_path, {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.float64)})
    like = {"a": torch.zeros(4), "b": torch.zeros(2), "c": torch.zeros(1)}
    with pytest.raises(ValueError, match="does not fit") as error:
        checkpoint.restore_dcp(tmp_path, like)
    assert "['a'] is (4,) here, but (3,) in the checkpoint" in str(error.value)
    assert "['b'] is torch.float32 here, but torch.float64" in str(error.value)
    assert "['c'] is not in the checkpoint" in str(error.value)
    assert not like["a"].any()


LAYERS = 3
AXES = {4: {"dp": 2, "tp": 2}, 2: {"pp": 2}, 3: {"dp": 3}, 1: {"dp": 1}}


def layered(mesh: Any, pool: Any, *, stacked: bool, filled: bool) -> dict[str, Any]:
    """Leaves cut along two axes of one dim and of two, on disk, and layers that are stacked and staged or in a list."""
    g = torch.Generator().manual_seed(5)
    w, d, ws = torch.randn(7, 5, generator=g), torch.randn(6, 4, generator=g), torch.randn(LAYERS, 5, 3, generator=g)
    if not filled:
        w, d, ws = (torch.zeros_like(x) for x in (w, d, ws))
    disk = sf.shard(d, P("tp", "dp"), mesh)
    layer = P(None, "tp")
    return {
        "one dim": sf.shard(w, P(("tp", "dp")), mesh),
        "two dims": sf.shard(w + 1 if filled else w, P("dp", "tp"), mesh),
        "disk": GlobalTensor(pool.write(disk.local).result(), disk.shape, disk.spec, mesh, "disk"),
        "blocks": {"w": sf.shard(ws, P("pp", None, "tp"), mesh)}
        if stacked
        else [{"w": sf.shard(x, layer, mesh)} for x in ws],
    }


@distributed(world=[1, 2, 3, 4])
def _layers_saved(place: pathlib.Path, world: int) -> None:
    with sf.memory.Pool(place / f"pool{dist.get_rank() if world > 1 else 0}") as pool:
        tree = layered(sf.make_mesh(AXES[world], device="cpu"), pool, stacked=world == 2, filled=True)
        checkpoint.save_dcp(place / "saved", tree)


@distributed(world=[1, 2, 3, 4])
def _layers_restored(place: pathlib.Path, world: int) -> None:
    with sf.memory.Pool(place / f"pool{dist.get_rank() if world > 1 else 0}-of-{world}") as pool:
        mesh = sf.make_mesh(AXES[world], device="cpu")
        want = by_path(layered(mesh, pool, stacked=world == 2, filled=True))
        tree = checkpoint.restore_dcp(place / "saved", layered(mesh, pool, stacked=world == 2, filled=False))
        assert tree["disk"].memory_kind == "disk"
        assert_bits(by_path(tree), want)


@pytest.mark.nightly
@pytest.mark.parametrize("source", [2, 4])
def test_heads_stages_disk_and_stacks_there_and_back(tmp_path: pathlib.Path, source: int) -> None:
    """Two ranks have the layers stacked, along stages; all others in a list, and four have them cut along tp."""
    _layers_saved(tmp_path, world=source)
    for target in (1, 2, 3, 4):
        _layers_restored(tmp_path, world=target)
