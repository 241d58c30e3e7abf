"""Covers tiled linear maps: they equal untiled ones for any cuts, and hold few tiles of the weight at once."""

import functools
import itertools
import pathlib
from typing import Any
from unittest import mock

import pytest
import torch

import shardfn as sf
from shardfn import nn
from shardfn.engine.transfers import _gradient_store, _reduce
from shardfn.testing import distributed

F, D = 11, 7


def test_it_equals_linear_for_any_cut() -> None:
    draw = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=draw, requires_grad=True) for s in ((2, 3, D), (F, D), (F,)))
    want = nn.linear(x, w, b)
    grads = torch.autograd.grad(want.square().sum(), (x, w, b))
    for ins, outs in itertools.product((1, 2, 3, D), (1, 2, 5, F)):
        tiles = nn.tiles(w.detach(), in_splits=ins, out_splits=outs)
        assert torch.equal(nn.untile(tiles), w)
        leaves = [t.requires_grad_() for row in tiles for t in row]
        got = nn.tiled_linear(x, tiles, b)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=2e-6)
        dx, db, *dw = torch.autograd.grad(got.square().sum(), (x, b, *leaves))
        flat = iter(dw)
        whole = nn.untile([[next(flat) for _ in row] for row in tiles])
        for a, e in zip((dx, whole, db), grads, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(nn.tiled_linear(x, nn.tiles(w, in_splits=2)), nn.linear(x, w), rtol=1e-6, atol=2e-6)


def test_tiles_fit_the_bytes_they_may_have() -> None:
    for numel in (1, 3, D, D + 1, 4 * D, F * D):
        grid = nn.tile_shapes((F, D), tile_bytes=4 * numel)
        assert max(f * d for row in grid for f, d in row) <= numel
        assert sum(f * d for row in grid for f, d in row) == F * D
    with sf.core.deferred():
        grid = nn.init_tiles(sf.key(0), (1 << 20, 1 << 20), tile_bytes=1 << 35)
    assert len(grid) == 128 and len(grid[0]) == 1


def test_a_malformed_grid_is_an_error() -> None:
    x, w = torch.ones(2, 4), torch.ones(3, 4)
    for tiles, bias, said in (
        ([[w[:, :2], w[:2, 2:]]], None, r"tile \[0\]\[1\] is \(2, 2\), expected \(3, 2\)"),
        ([[w], [w, w]], None, "row 1 has 2 tiles, row 0 1"),
        ([[w], [w[:, :3]]], None, r"tile \[1\]\[0\]"),
        ([[w[:, :3]]], None, "x has 4 features"),
        ([[w]], torch.ones(4), "the bias has 4 features"),
        ([], None, "no tiles"),
    ):
        with pytest.raises(ValueError, match=said):
            nn.tiled_linear(x, tiles, bias)
    for options, said in (
        ({"in_splits": 5}, "in_splits must be between 1 and 4.*got 5"),
        ({"out_splits": 0}, "out_splits must be between 1 and 3.*got 0"),
        ({"tile_bytes": 3}, "less than one element"),
        ({"tile_bytes": 8, "in_splits": 2}, "not both"),
    ):
        with pytest.raises(ValueError, match=said):
            nn.tiles(w, **options)


@pytest.mark.nightly
@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_no_more_than_tiles_are_on_the_device(world: int, tmp_path: pathlib.Path) -> None:
    """A weight of 16 tiles on host or disk, a window of one tile: forward, backward and update."""
    mesh, wide = sf.make_mesh({"dp": world}), 512
    tile = wide * wide * 4 // 16

    def loss(params: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        return nn.tiled_linear(x, params["w"], params["b"]).square().mean()

    def trained(kind: str | None, w: Any) -> tuple[Any, int]:
        places: dict[str, Any] = {} if kind is None else {"params": kind, "grads": "host", "optimizer": kind}
        where: dict[str, Any] = {"directory": str(tmp_path)} if kind == "disk" else {}
        zero = sf.Zero.flat(
            stage=3, persist_elements=0, bucket_bytes=0, prefetch_bytes=tile, chunk_bytes=tile, **places, **where
        )
        step = sf.sharded_step(loss, sf.optim.adamw(1e-2), mesh=mesh, zero=zero)
        state = step.init({"w": w, "b": torch.ones(wide)})
        # The bounds of transfers under way are by default larger than this weight.
        bounds = {"IN_FLIGHT_BYTES": tile, "PATIENCE": 60.0}
        few = mock.patch.multiple(_gradient_store, LEAVING_BYTES=tile), mock.patch.multiple(_reduce, **bounds)
        with few[0], few[1], sf.memory.ledger() as book:
            state, _ = step(state, torch.ones(2, wide))
        out = sf.core.tree_leaves(sf.unshard(state.params))
        del state
        step.close()
        return out, book.peak("device")

    draw = functools.partial(nn.init_tiles, sf.key(0), (wide, wide), stddev=0.02)
    want, whole = trained(None, draw(in_splits=4, out_splits=4))
    assert whole > 8 * tile
    for kind in ("host", "disk"):
        got, peak = trained(kind, draw(in_splits=4, out_splits=4))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        # The tile in use, the one ahead, and gradients on their way down; a weight of one piece takes 16 and more.
        assert peak <= 7 * tile, peak / tile
