"""Covers `models.gpt` in a pipeline, alone and in meshes of three axes: the loss and the step of one device."""

import dataclasses
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import optim
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

from .test_gpt_parallel import CONFIGS, batches_of, params_of, trainable_of


def parity(
    name: str, mesh: sf.Mesh, stage: int, *, layers: int = 3, microbatches: int = 2, sequence: bool = False, **more: Any
) -> None:
    """A pipelined step of the GPT, against the plain loss on one device."""
    config = dataclasses.replace(CONFIGS[name], num_layers=layers, stacked=True)
    options: dict[str, Any] = {"axis": "tp", "sequence": sequence, **more}
    loss = sf.pipeline(*gpt.stages(config, **options), num_microbatches=microbatches)
    zero = sf.Zero(stage=stage, axis="dp", persist_elements=0) if mesh.axis_size("dp") > 1 else None
    assert_parity(
        loss,
        optim.adamw(0.01),
        params_of(config, torch.float64),
        batches_of(config, rows=4),
        mesh=mesh,
        specs=gpt.specs(config, tp="tp", pp="pp"),
        batch=sf.P("dp"),
        zero=zero,
        trainable=trainable_of(config),
    )


def test_stages_are_the_loss():
    for config in CONFIGS.values():
        config = dataclasses.replace(config, stacked=True)
        params, (batch, _) = params_of(config, torch.float64), batches_of(config)
        got = sf.pipeline(*gpt.stages(config), num_microbatches=2)(params, batch)
        torch.testing.assert_close(got, gpt.loss(config, params, batch), rtol=1e-12, atol=0)


def test_stages_of_layers_that_are_not_stacked_are_the_loss():
    for name in ("bloom", "llama_gqa"):
        config = CONFIGS[name]
        params, (batch, _) = params_of(config, torch.float64), batches_of(config)
        got = sf.pipeline(*gpt.stages(config), num_microbatches=2)(params, batch)
        torch.testing.assert_close(got, gpt.loss(config, params, batch), rtol=1e-12, atol=0)


def test_specs_of_layers_that_are_not_stacked_are_along_no_pipeline():
    with pytest.raises(ValueError, match=r"Use Config\(stacked=True\)"):
        gpt.specs(CONFIGS["bloom"], pp="pp")


@pytest.mark.nightly
@distributed(world=4)
def test_layers_on_ranks_beside_heads_on_ranks() -> None:
    parity("bloom", sf.make_mesh({"pp": 2, "tp": 2}), 0)
    parity("llama_gqa", sf.make_mesh({"dp": 2, "pp": 2}), 3, wrap=sf.remat)


@pytest.mark.nightly
@distributed(world=4)
def test_dropout_has_the_masks_of_one_device() -> None:
    config = dataclasses.replace(CONFIGS["llama_gqa"], num_layers=3, stacked=True, dropout=0.25)
    parts = gpt.stages(config, axis="tp", sequence=True)
    assert_parity(
        sf.pipeline(*parts, num_microbatches=2),
        optim.sgd(0.1),
        params_of(config, torch.float64),
        batches_of(config),
        mesh=sf.make_mesh({"pp": 2, "tp": 2}),
        specs=gpt.specs(config, tp="tp", pp="pp"),
        batch=sf.P("dp"),
        key=sf.key(5),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CONFIGS)
@distributed(world=8, timeout=300)
def test_three_axes(name: str, stage: int) -> None:
    parity(name, sf.make_mesh({"dp": 2, "pp": 2, "tp": 2}), stage, sequence=stage % 2 == 1)


@pytest.mark.nightly
@distributed(world=6, timeout=300)
def test_three_stages_of_four_layers() -> None:
    parity("gpt2_tied", sf.make_mesh({"pp": 3, "dp": 2}), 2, layers=4, microbatches=1)
