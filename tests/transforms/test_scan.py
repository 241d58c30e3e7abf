"""Covers scan and stacked leaves: parity with one device and with leaves layer by layer; the loop's graph; errors."""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.testing import assert_same, distributed, on_mesh, one_device

LAYERS = 5
STACKED = sf.Sharding(sf.P(), stacked=True)
SPECS = {"blocks": STACKED, "in": sf.P(), "out": sf.P()}
TRAINABLE = {
    "blocks": {"frozen": False, "gain": True, "skip": True, "unused": True, "w": True},
    "in": True,
    "out": True,
}
# Small enough that the leaves fall on both sides of each threshold.
ODD: dict[str, Any] = {"persist": 2, "bucket": 64, "prefetch": 150}


def params() -> dict[str, Any]:
    """Stacked: a 7 x 7, a vector, a scalar a layer, a frozen one, one that nobody uses."""
    g = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) / 2

    blocks = {"w": draw(LAYERS, 7, 7), "gain": draw(LAYERS, 7), "skip": draw(LAYERS), "frozen": draw(LAYERS, 3, 7)}
    return {"blocks": blocks | {"unused": draw(LAYERS, 2, 3)}, "in": draw(5, 7), "out": draw(7, 3)}


def block(h: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Uses `w` twice."""
    y = torch.tanh(h @ p["w"].t() * p["gain"]) @ p["w"]
    return h * p["skip"] + y, (y @ p["frozen"].t()).square().mean()


def loss(p: dict, batch: dict, wrap: Any = lambda f: f) -> Tensor:
    h, ys = sf.scan(wrap(block), batch["x"] @ p["in"], p["blocks"])
    return ((h @ p["out"] - batch["y"]) ** 2).mean() + ys.sum()


def looped(p: dict, batch: dict, wrap: Any = lambda f: f) -> Tensor:
    """The same as a Python loop."""
    h, ys = batch["x"] @ p["in"], []
    f = wrap(block)
    for i in range(LAYERS):
        h, y = f(h, {k: v[i] for k, v in p["blocks"].items()})
        ys.append(y)
    stacked = torch.stack(ys)
    return ((h @ p["out"] - batch["y"]) ** 2).mean() + stacked.sum()


def batch(n: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(100 + n)
    return {"x": torch.randn(12, 5, generator=g), "y": torch.randn(12, 3, generator=g)}


rematted = functools.partial(loss, wrap=sf.remat)


@distributed(world=[1, 2])
def test_every_stage_equals_one_device(world: int) -> None:
    mesh, batches = sf.make_mesh({"dp": world}), [batch(n) for n in range(3)]
    tx = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2, weight_decay=0.1))
    want = one_device(loss, tx, params(), batches, trainable=TRAINABLE)
    for micro, inner in itertools.product((1, 3), (loss, rematted)):
        runs = []
        for stage in range(4):
            options: dict[str, Any] = {"mesh": mesh, "zero": sf.Zero(stage=stage, **ODD), "trainable": TRAINABLE}
            run = on_mesh(sf.accumulate(inner, micro), tx, params(), batches, specs=SPECS, **options)
            assert_same(run, want)
            runs.append(run)
        assert_same(runs[2], runs[1], exact=True)
        assert_same(runs[3], runs[1], exact=True)
