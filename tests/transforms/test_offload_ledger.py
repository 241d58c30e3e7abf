"""Covers the guarantees of memory kinds: bytes that stay on the device, and bytes that cross to host and disk."""

import pathlib
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.engine import comms_of
from shardfn.engine.transfers import _gradient_store, _reduce
from shardfn.testing import distributed

LAYERS, WIDTH = 12, 512
PSI = LAYERS * WIDTH * WIDTH
GRADIENT = 2 * WIDTH * WIDTH
BF16 = sf.Policy.bf16(reduce=torch.bfloat16)


def _loss(params: list[Tensor], x: Tensor) -> Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return x.float().square().mean()


def _measured(mesh: sf.Mesh, zero: sf.Zero) -> tuple[sf.memory.Ledger, int]:
    """The ledger of one step that is not the first, and the elements of this rank's share of a sharded state."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5 for _ in range(LAYERS)]
    step = sf.sharded_step(sf.mixed_precision(_loss, BF16), sf.optim.adamw(1e-3), mesh=mesh, zero=zero)
    state = step.init(params)
    state, _ = step(state, torch.ones(2, WIDTH))
    held: list[sf.GlobalTensor] = [*sf.core.tree_leaves(state.params), *sf.core.tree_leaves(state.opt_state)]
    # Bytes under way are bounded by constants that are larger than this model.
    bounds = [
        mock.patch.object(_reduce, "IN_FLIGHT_BYTES", GRADIENT),
        mock.patch.object(_reduce, "PATIENCE", 60.0),
    ]
    bounds += [mock.patch.object(_gradient_store, "LEAVING_BYTES", GRADIENT)]
    with sf.memory.ledger() as book, bounds[0], bounds[1], bounds[2]:
        while held:
            x = held.pop()
            book.count(x.held, x.memory_kind)
            del x
        state, _ = step(state, torch.ones(2, WIDTH))
    del state
    until = time.monotonic() + 10  # a transfer's thread may hold its tensors a moment longer
    while book.live("host") > _set_aside(mesh) and zero.optimizer == "disk" and time.monotonic() < until:
        time.sleep(0.01)
    return book, PSI // mesh.size


def _set_aside(mesh: sf.Mesh) -> int:
    """Bytes of the channels' own, where ranks share memory."""
    comms: Any = comms_of(mesh)
    return sum(nbytes for _, nbytes in [*comms.channels.shared(), *comms.control.shared()])


@pytest.mark.nightly
@distributed(world=[1, 2])
def test_offload_keeps_two_bytes_a_parameter_on_the_device_and_moves_four(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    for chunk in (1 << 20, 64 << 20):
        zero = sf.Zero(
            2,
            persist_elements=0,
            grads="host",
            optimizer="host",
            travel=sf.Travel(bucket_bytes=0),
            pace=sf.Pace(chunk_bytes=chunk),
        )
        book, own = _measured(mesh, zero)
        assert book.moved("device", "host") == 2 * own  # gradients, in 16 bits
        assert book.moved("host", "device") == 2 * own  # parameters, in 16 bits
        assert book.moved("host", "disk") == book.moved("disk", "host") == 0
        assert book.peak("device") <= 2 * PSI + 6 * GRADIENT
        assert book.live("device") <= (1 << 10)


@pytest.mark.nightly
@distributed(world=[1, 2])
def test_disk_reads_and_writes_twelve_bytes_a_parameter(world: int, tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": world})
    chunk = 2 << 20  # a part of a chunk has rows of whole pages only
    where: dict[str, Any] = {"directory": str(tmp_path), "chunk_bytes": chunk}
    book, own = _measured(
        mesh, sf.Zero.flat(stage=2, persist_elements=0, bucket_bytes=0, grads="host", optimizer="disk", **where)
    )
    assert book.moved("disk", "host") == book.moved("host", "disk") == 12 * own  # master, mu and nu
    assert book.moved("device", "host") == book.moved("host", "device") == 2 * own
    # Gradients wait in float32, one of them beside its 16 bits while it is widened; three chunks are in the update.
    assert book.peak("host") <= 4 * own + 2 * GRADIENT + 3 * chunk + _set_aside(mesh)


@pytest.mark.nightly
@distributed(world=2)
def test_everything_on_disk_leaves_a_window_on_the_device(tmp_path: pathlib.Path) -> None:
    mesh, window = sf.make_mesh({"dp": 2}), 2 * GRADIENT
    kinds: dict[str, Any] = {"params": "disk", "grads": "disk", "optimizer": "disk", "directory": str(tmp_path)}
    zero = sf.Zero.flat(
        stage=3, persist_elements=0, bucket_bytes=0, prefetch_bytes=window, chunk_bytes=2 << 20, **kinds
    )
    book, own = _measured(mesh, zero)
    assert book.peak("device") <= 3 * window + 8 * GRADIENT
    assert book.live("device") <= 1 << 10 and book.live("host") == _set_aside(mesh)
    assert book.moved("host", "disk") == (12 + 2) * own  # state, parameters; gradients go straight into the update
