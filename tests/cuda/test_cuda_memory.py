"""Covers the peak memory of a step on a GPU, by the allocator's own count. Never run so far."""

from typing import Any

import torch
from torch import Tensor

import shardfn as sf
from shardfn import memory

LAYERS, WIDTH = 8, 1024
LAYER = WIDTH * WIDTH * 4  # bytes


def _loss(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    h = batch
    for n in range(LAYERS):
        h = torch.tanh(h @ params[f"w{n}"])
    return h.square().mean()


def _peak(**fields: Any) -> tuple[int, int]:
    """Bytes on the device at the peak of a warm step, and those copied from the host in it."""
    step = sf.sharded_step(
        _loss,
        sf.optim.sgd(1e-3),
        mesh=sf.make_mesh({"dp": 1}),
        zero=sf.Zero.flat(stage=3, persist_elements=0, bucket_bytes=0, prefetch_bytes=LAYER, **fields),
    )
    g = torch.Generator().manual_seed(0)
    state = step.init({f"w{n}": torch.randn(WIDTH, WIDTH, generator=g) / 32 for n in range(LAYERS)})
    batch = torch.ones(4, WIDTH, device="cuda")
    state, _ = step(state, batch)  # learns the order of use
    torch.cuda.synchronize()
    with memory.ledger() as book:
        state, _ = step(state, batch)
        torch.cuda.synchronize()
    return book.peak("device"), book.moved("host", "device")


def test_leaves_on_the_host_are_on_the_device_a_few_at_a_time() -> None:
    here, nothing = _peak()
    away, moved = _peak(params="host", grads="host", optimizer="host")
    assert here >= LAYERS * LAYER and nothing == 0
    assert moved >= LAYERS * LAYER
    assert away < LAYERS * LAYER  # less than the model: the window holds a few layers and their gradients


def test_steps_leave_nothing_behind() -> None:
    step = sf.sharded_step(
        _loss, sf.optim.adamw(1e-3), mesh=sf.make_mesh({"dp": 1}), zero=sf.Zero(stage=3, persist_elements=0)
    )
    state = step.init({f"w{n}": torch.ones(WIDTH, WIDTH) / WIDTH for n in range(LAYERS)})
    batch, held = torch.ones(4, WIDTH, device="cuda"), []
    for _ in range(4):
        state, _ = step(state, batch)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] == held[1]
