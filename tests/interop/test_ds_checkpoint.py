"""Covers DeepSpeed's files: in its own layout, at odd sizes, and malicious ones."""

import os
import pathlib
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch

from shardfn import interop

SHAPES = [{"a": (7, 5), "b": (3,), "c": ()}, {"d": (2, 2, 2), "e": (11,)}]


def values(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for group in SHAPES for name, shape in group.items()}


def write(place: pathlib.Path, stage: int, world: int) -> dict[str, dict[str, torch.Tensor]]:
    """Writes a checkpoint of a stage; returns its values."""
    place.mkdir(parents=True)
    (place.parent / "latest").write_text(place.name)
    trees = {"fp32": values(0), "exp_avg": values(1), "exp_avg_sq": values(2)}
    frozen = torch.arange(5.0 if world < 9 else 25.0)
    size = -(-frozen.numel() // world)
    fragments = torch.cat([frozen, torch.zeros(size * world - frozen.numel())]).split(size)

    def parts(tree: dict[str, torch.Tensor], group: dict[str, Any]) -> list[torch.Tensor]:
        if stage == 3:
            cut = {n: -(-tree[n].numel() // world) for n in group}
            padded = {n: torch.cat([tree[n].flatten(), torch.zeros(cut[n] * world - tree[n].numel())]) for n in group}
            return [torch.cat([padded[n][r * cut[n] : (r + 1) * cut[n]] for n in group]) for r in range(world)]
        flat = torch.cat([tree[n].flatten() for n in group])
        size = -(-flat.numel() // (2 * world)) * 2
        return [flat[r * size : (r + 1) * size] for r in range(world)]

    for rank in range(world):
        state = {
            i: {k: parts(trees[k], group)[rank] for k in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(9.0)}
            for i, group in enumerate(SHAPES)
        }
        flat = [parts(trees["fp32"], group)[rank] for group in SHAPES]
        inner: dict[str, Any] = (
            {"fp32_flat_groups": flat, "optimizer_state_dict": {"state": state}, "partition_count": world}
            if stage == 3
            else {
                "single_partition_of_fp32_groups": flat,
                "base_optimizer_state": {"state": state},
                "partition_count": [world] * 2,
            }
        )
        torch.save({"optimizer_state_dict": inner}, place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model = {
            "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in SHAPES],
            "frozen_param_shapes": OrderedDict(f=frozen.shape),
            "frozen_param_fragments": {"f": fragments[rank]},
            "shared_params": {"tied": "a"},
            "buffer_names": ["seen"],
            "module": {"seen": torch.arange(3), "f": torch.empty(0) if stage == 3 else frozen, "tied": torch.empty(0)},
        }
        if stage < 3:
            model["frozen_param_fragments"] = {"f": frozen}
        if stage == 1:
            del model["frozen_param_fragments"], model["frozen_param_shapes"]
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(model, place / name)
    return trees | {"frozen": {"f": frozen}}


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(1, marks=pytest.mark.nightly),
        2,
        pytest.param(3, marks=pytest.mark.nightly),
        pytest.param(11, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(
    "stage", [1, pytest.param(2, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.nightly)]
)
def test_parameters_and_moments_are_whole_again(tmp_path: pathlib.Path, stage: int, world: int) -> None:
    if (stage, world) == (3, 1):
        world = 4
    want = write(tmp_path / "tag", stage, world)
    found = interop.read_deepspeed(str(tmp_path))
    assert found.step == 9 and found.shared == {"tied": "a"}
    assert found.params.keys() == want["fp32"].keys() | {"f"} and torch.equal(found.buffers["seen"], torch.arange(3))
    for tree, got in (
        (want["fp32"] | want["frozen"], found.params),
        (want["exp_avg"], found.moments["exp_avg"]),
        (want["exp_avg_sq"], found.moments["exp_avg_sq"]),
    ):
        for name, x in tree.items():
            assert torch.equal(got[name], x), name


def write_universal(place: pathlib.Path, *, flat: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Writes a universal checkpoint as of stage 3, with flat files, or of the others; returns its values."""
    trees = {"fp32": values(0), "exp_avg": values(1), "exp_avg_sq": values(2)}
    model = {
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in SHAPES],
        "shared_params": {"tied": "a"},
        "buffer_names": ["seen"],
        "module": {"seen": torch.arange(3)},
    }
    for name in trees["fp32"]:
        (place / "zero" / name).mkdir(parents=True)
        for kind, tree in trees.items():
            x = tree[name].flatten() if flat else {"param": tree[name], "cat_dim": 0}
            torch.save(x, place / "zero" / name / f"{kind}.pt")
        if not flat:
            torch.save(torch.tensor(4.0), place / "zero" / name / "step.pt")
    if flat:
        inner = {"optimizer_state_dict": {"state": {0: {"step": torch.tensor(4.0)}}}}
        torch.save(inner, place / "zero" / "optimizer_state.pt")
    else:  # tied parameters and buffers are written again
        for name in ("tied", "seen"):
            (place / "zero" / name).mkdir()
            torch.save({"param": torch.arange(3)}, place / "zero" / name / "fp32.pt")
    torch.save(model, place / ("zero_pp_rank_0_mp_rank_00_model_states.pt" if flat else "mp_rank_00_model_states.pt"))
    return trees


@pytest.mark.parametrize("flat", [False, True])
def test_universal_checkpoints_have_shapes_and_a_step(tmp_path: pathlib.Path, flat: bool) -> None:
    want = write_universal(tmp_path / "u", flat=flat)
    found = interop.read_deepspeed(str(tmp_path), "u")
    assert (found.step, found.shared, list(found.buffers)) == (4, {"tied": "a"}, ["seen"])
    for tree, got in (
        (want["fp32"], found.params),
        *((want[k], found.moments[k]) for k in ("exp_avg", "exp_avg_sq")),
    ):
        assert tree.keys() == got.keys() and all(torch.equal(got[name], x) for name, x in tree.items())
    torch.save(torch.zeros(2), tmp_path / "u" / "zero" / "e" / "fp32.pt")
    with pytest.raises(ValueError, match=r"fp32.pt has 2 elements, and its parameter is \(11,\)"):
        interop.read_deepspeed(str(tmp_path), "u")
    next((tmp_path / "u").glob("*.pt")).unlink()
    with pytest.raises(FileNotFoundError, match="is flat, and needs "):
        interop.read_deepspeed(str(tmp_path), "u")


class Harm:
    def __init__(self, where: pathlib.Path) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.where),)


@pytest.mark.parametrize("which", ["zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"])
def test_a_pickle_that_would_run_something_is_not_opened(tmp_path: pathlib.Path, which: str) -> None:
    write(tmp_path / "tag", 2, 2)
    path = tmp_path / "tag" / which
    torch.save({"optimizer_state_dict": Harm(tmp_path / "done")}, path)
    with pytest.raises(ValueError, match=rf"{which} has objects that are not tensors, posix.mkdir"):
        interop.read_deepspeed(str(tmp_path))
    path.write_bytes(pickle.dumps(Harm(tmp_path / "done")))
    with pytest.raises(ValueError, match="is not a file of a checkpoint"):
        interop.read_deepspeed(str(tmp_path))
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize("universal", [False, True])
def test_weights_that_are_there_twice_and_differ_are_named(tmp_path: pathlib.Path, universal: bool) -> None:
    want = write_universal(tmp_path / "tag", flat=False) if universal else write(tmp_path / "tag", 2, 3)
    model = tmp_path / "tag" / "mp_rank_00_model_states.pt"
    had = torch.load(model)
    own = {name: x.bfloat16() for name, x in want["fp32"].items()}
    torch.save(had | {"module": had["module"] | own}, model)
    found = interop.read_deepspeed(str(tmp_path), "tag")
    assert all(torch.equal(found.params[name], x) for name, x in want["fp32"].items())
    torch.save(had | {"module": had["module"] | own | {"e": -own["e"], "c": -own["c"]}}, model)
    with pytest.raises(ValueError, match=r"are not the optimizer's, rounded.*\n  - c .*\n  - e \(11,\)$"):
        interop.read_deepspeed(str(tmp_path), "tag")


def test_experts_and_missing_ranks_of_stage_3_are_refused(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "tag", 3, 3)
    (tmp_path / "tag" / "zero_pp_rank_1_mp_rank_00_model_states.pt").rename(tmp_path / "kept")
    with pytest.raises(FileNotFoundError, match="model states of all 3 ranks that have written, got 2"):
        interop.read_deepspeed(str(tmp_path))
    (tmp_path / "kept").rename(tmp_path / "tag" / "layer_0_expert_1_mp_rank_00_model_states.pt")
    with pytest.raises(ValueError, match=r"such as layer_0_expert_1.*read_deepspeed_weights"):
        interop.read_deepspeed(str(tmp_path))


def test_missing_weights_and_weights_that_do_not_fit(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file 'latest'"):
        interop.read_deepspeed(str(tmp_path))
    write(tmp_path / "tag", 2, 3)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint 'other' in .*\['tag'\]"):
        interop.read_deepspeed(str(tmp_path), "other")
    with pytest.raises(ValueError, match="has no checkpoint with the name"):
        interop.read_deepspeed(str(tmp_path), "../tag")
    one = tmp_path / "tag" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    saved = one.read_bytes()
    one.unlink()
    with pytest.raises(FileNotFoundError, match=r"ranks \[1\]"):
        interop.read_deepspeed(str(tmp_path))
    one.write_bytes(saved[: len(saved) // 2])
    with pytest.raises(ValueError, match="is not a file of a checkpoint"):
        interop.read_deepspeed(str(tmp_path))
    one.write_bytes(saved)
    last = tmp_path / "tag" / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    last.rename(tmp_path / "kept")
    with pytest.raises(FileNotFoundError, match="optimizer states of all 3 ranks that have written, got 2"):
        interop.read_deepspeed(str(tmp_path))
    model = tmp_path / "tag" / "mp_rank_00_model_states.pt"
    (tmp_path / "kept").rename(last)
    had = torch.load(model)
    torch.save(had | {"frozen_param_shapes": {"f": torch.Size((9,))}}, model)
    with pytest.raises(ValueError, match=r"5 elements are there of 1 ranks, too few for f \(9,\)"):
        interop.read_deepspeed(str(tmp_path))
    torch.save({"param_shapes": [{"a": torch.Size((900, 2))}, {"d": torch.Size((2,))}]}, model)
    with pytest.raises(ValueError, match=r"too few for a \(900, 2\)"):
        interop.read_deepspeed(str(tmp_path))
    torch.save({"param_shapes": [{"a": torch.Size((2,))}, {"d": torch.Size((2,))}]}, model)
    with pytest.raises(ValueError, match="the parameters have 2"):
        interop.read_deepspeed(str(tmp_path))
    last.rename(tmp_path / "tag" / "zero_pp_rank_0_mp_rank_01_optim_states.pt")
    with pytest.raises(ValueError, match="several model-parallel ranks"):
        interop.read_deepspeed(str(tmp_path))
