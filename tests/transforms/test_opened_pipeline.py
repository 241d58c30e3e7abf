"""Covers the opened step of a pipeline: its gradients and its update are the step, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.testing import assert_opened, distributed

D, B, L = 6, 12, 4


def _params() -> Any:
    g = torch.Generator().manual_seed(0)
    blocks = {"w": torch.randn(L, D, D, generator=g) / 2, "b": torch.randn(L, D, generator=g)}
    return {"into": torch.randn(D, D, generator=g), "blocks": blocks, "out": torch.randn(D, generator=g)}


def _specs(params: Any) -> Any:
    return sf.tree_map(lambda _: P(), params) | {"blocks": P("pp")}


def _batches() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(B, D, generator=g) for _ in range(3)]


def _pipeline(**how: Any) -> Any:
    return sf.pipeline(
        lambda p, x: x @ p["into"],
        lambda p, h: h + torch.tanh(h @ p["w"] + p["b"]),
        lambda p, h, x: ((h @ p["out"] - x[:, 0]) ** 2).mean(),
        blocks="blocks",
        axis="pp",
        num_microbatches=3,
        **how,
    )


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.nightly)])
@distributed(world=[2])
def test_a_pipeline(world: int, stage: int) -> None:
    mesh = sf.make_mesh({"pp": world} if stage == 0 else {"dp": 1, "pp": world})
    params = _params()
    assert_opened(
        _pipeline(),
        sf.optim.adamw(1e-2),
        params,
        _batches(),
        mesh=mesh,
        specs=_specs(params),
        batch=P("dp"),
        zero=sf.Zero(stage=stage),
    )
