"""Covers the memory of an update of 16-bit gradients by copies in float32: no more than a tile of cast gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from shardfn import optim

NUM, LEAF, TILE = 4, (1 << 19) + 5000, 4 << 18  # leaves, elements of each, bytes of a tile of a thread
RULES = {
    "adamw": optim.adamw(1e-3),
    "clipped": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)),
    "sgd": optim.sgd(1e-3, momentum=0.9),
}


def additional_bytes(run: Callable[[], Any]) -> int:
    """The most bytes in use at once that were not in use before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = run()
    del kept
    sizes = [event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]  # pyright: ignore
    return int(torch.tensor([0, *sizes]).cumsum(0).max())


@pytest.mark.parametrize("name", RULES)
def test_an_update_takes_a_tile_of_memory(name: str) -> None:
    rule, made = optim.master_weights(RULES[name]), torch.Generator().manual_seed(0)
    params, grads = ([torch.randn(LEAF, generator=made).bfloat16() for _ in range(NUM)] for _ in range(2))
    state = rule.init(params)
    step = optim.inplace(rule)
    params, state = step([g.clone() for g in grads], state, params)
    found = additional_bytes(lambda: step(grads, state, params))
    assert found <= TILE * torch.get_num_threads() + (64 << 10) < NUM * LEAF * 4 // 4, found


def test_a_sum_of_squares_of_tiles_has_the_bits_of_the_whole() -> None:
    for num in (5000, 1 << 18, (1 << 18) + 1, (1 << 19) + 5000):
        x = torch.randn(num, generator=torch.Generator().manual_seed(num)).bfloat16()
        assert torch.equal(optim.large_square(x), optim.large_square(x.float()))
