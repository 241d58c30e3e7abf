"""Covers scans in captured steps: leaves that are not stacked, writes to saved values, remat with policies."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.testing import assert_same, distributed, on_mesh, one_device
from shardfn.transforms import policies

LAYERS = 5


def start() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"w": torch.randn(LAYERS, 4, 4, generator=g).double(), "h": torch.randn(4, generator=g).double()}


def rows() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double()


def layer(h: Tensor, w: Tensor) -> tuple[Tensor, None]:
    """Saves views of `w`, and `w` itself."""
    return torch.tanh(h @ w) @ w.t(), None


def loss(p: dict, x: Tensor) -> Tensor:
    """Its leaves have no specs, so stacks are cut as wholes; one of them is the carry."""
    return sf.scan(layer, p["h"].expand(4, 4), p["w"])[0].square().mean() + sf.scan(layer, x, p["w"])[0].square().mean()


@pytest.mark.nightly
@distributed(world=[1, 2])
def test_leaves_that_are_not_stacked_are_not_taken_to_be_written_to(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    tx, want = optim.adam(1e-2), one_device(loss, optim.adam(1e-2), start(), [rows()] * 2)
    for zero in (
        sf.Zero(stage=3, persist_elements=0),
        sf.Zero(stage=3, persist_elements=0, params="host"),
        sf.Zero(stage=0, params="host"),
    ):
        given: dict[str, Any] = {"mesh": mesh, "zero": zero}
        eager = on_mesh(loss, tx, start(), [rows()] * 2, **given)
        assert_same(eager, want)
        assert_same(on_mesh(sf.jit(loss, backend="graph"), tx, start(), [rows()] * 2, **given), eager, exact=True)


@pytest.mark.nightly
def test_a_write_to_a_tensor_saved_by_a_copied_layer_is_an_error_as_in_eager_mode() -> None:
    def writes(p: dict, x: Tensor) -> Tensor:
        h = sf.scan(lambda h, w: (torch.tanh(h @ w), None), x, p["w"])[0]
        return h.mul_(2).mean()  # tanh's derivative needs the old h

    def views(p: dict, x: Tensor) -> Tensor:
        h = sf.scan(lambda h, w: (torch.tanh(h @ w).t(), None), x[:4], p["w"])[0]
        return h.mul_(2).mean()

    for f in (writes, views):
        for inner in (f, sf.jit(f, backend="graph")):
            step = sf.sharded_step(inner, optim.sgd(0.1), mesh=sf.make_mesh({"dp": 1}))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                step(step.init(start()), rows())


@pytest.mark.nightly
def test_remat_with_a_policy_around_a_scan(caplog: pytest.LogCaptureFixture) -> None:
    kinds: tuple[Any, ...] = (
        policies.dots_saveable,
        policies.everything_saveable,
        policies.budget(200, then=policies.nothing_saveable),
        policies.offload_dot_with_no_batch_dims("host"),
        policies.save_only_these_names("inner"),
    )

    def named(p: dict, x: Tensor) -> Tensor:
        def f(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            y = sf.checkpoint_name(torch.sin(h @ w), "inner")
            return torch.tanh(y), y.mean()

        h, ys = sf.scan(f, x, p["w"])
        return h.square().mean() + ys.sum()

    mesh = sf.make_mesh({"dp": 1})
    want = on_mesh(named, optim.adam(1e-2), start(), [rows()] * 2, mesh=mesh)
    for policy in kinds:
        f = sf.jit(sf.remat(named, policy), backend="graph")
        assert_same(on_mesh(f, optim.adam(1e-2), start(), [rows()] * 2, mesh=mesh), want, exact=True)
    assert "captured layer by layer" in caplog.text and "remat with a policy" in caplog.text
