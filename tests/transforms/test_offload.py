"""Covers memory kinds: every placement of params, gradients and optimizer state has the bits of none."""

import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any

import pytest

import shardfn as sf
from shardfn.testing import ODD_TRAINABLE, Run, assert_same, distributed, odd_batch, odd_loss, odd_params, on_mesh

KINDS = ("device", "host", "disk")


def _zero(kinds: tuple[str, str, str], directory: pathlib.Path, **fields: Any) -> sf.Zero:
    params, grads, optimizer = kinds
    where = {"directory": str(directory)} if "disk" in kinds else {}
    placed: dict[str, Any] = {"params": params, "grads": grads, "optimizer": optimizer, **where}
    return sf.Zero(persist=0, bucket=64, chunk=2048, **placed, **fields)


def _run(mesh: sf.Mesh, zero: sf.Zero) -> Run:
    optimizer = sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.adamw(1e-2))
    batches = [odd_batch(n) for n in range(2)]
    return on_mesh(odd_loss, optimizer, odd_params(), batches, mesh=mesh, zero=zero, trainable=ODD_TRAINABLE)


# Nine of the 27 placements in which every pair of memories meets.
PAIRS = [(KINDS[i], KINDS[j], KINDS[(i + j) % 3]) for i in range(3) for j in range(3)]


def _compare(stage: int, world: int, placements: Iterable[tuple[str, str, str]]) -> None:
    mesh = sf.make_mesh({"dp": world})
    want = _run(mesh, sf.Zero(stage, persist=0, bucket=64))
    for kinds in placements:
        with tempfile.TemporaryDirectory() as directory:
            got = _run(mesh, _zero(kinds, pathlib.Path(directory), stage=stage))
        assert_same(got, want, exact=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world=[1, 2])
def test_placements_have_the_bits_of_none(world: int, stage: int) -> None:
    _compare(stage, world, PAIRS)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world=[1, 2, 4], timeout=600)
def test_every_placement_has_the_bits_of_none(world: int, stage: int) -> None:
    _compare(stage, world, [(a, b, c) for a in KINDS for b in KINDS for c in KINDS])
