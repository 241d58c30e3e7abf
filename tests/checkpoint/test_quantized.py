"""Covers quantized leaves in checkpoints, and files of the version in which `Sharding(quantization=)` was `codes=`."""

import pathlib

import pytest
import torch

import shardfn as sf
from shardfn import checkpoint, optim

BEFORE = pathlib.Path(__file__).parent / "quantized_before"


def _loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return ((params["w"] @ (params["v"] * x)) ** 2).sum()


def _state(params: dict[str, torch.Tensor], quantization: "sf.core.Quantization") -> sf.TrainState:
    specs = {"w": sf.Sharding(quantization=quantization), "v": sf.P()}
    mesh, trainable = sf.make_mesh({"dp": 1}, device="cpu"), {"w": False, "v": True}
    return sf.sharded_step(_loss, optim.sgd(0.1), mesh=mesh, specs=specs, trainable=trainable).init(params)


def test_a_file_written_before_the_rename_has_the_same_bytes() -> None:
    drawn = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(3, 64, generator=drawn), "v": torch.randn(64, generator=drawn)}
    zeros = {name: torch.zeros_like(x) for name, x in params.items()}
    found = checkpoint.restore(BEFORE, _state(zeros, "int4")).tree.params
    assert torch.equal(found["w"].held.blocks, _state(params, "int4").params["w"].held.blocks)
    assert torch.equal(found["v"].full_tensor(), params["v"])


def test_a_leaf_of_another_quantization_is_refused_with_its_path() -> None:
    zeros = {"w": torch.zeros(3, 64), "v": torch.zeros(64)}
    with pytest.raises(ValueError, match=r"(?s)params\['w'\] is \(3, 68\) here, but \(3, 40\) in"):
        checkpoint.restore(BEFORE, _state(zeros, "int8"))
