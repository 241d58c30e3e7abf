"""Covers 28 heads, those of Turing-NLG 17B, over numbers of ranks that do not divide them: 3, 8 and 16."""

import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import optim
from shardfn.models import gpt
from shardfn.testing import distributed

from .test_gpt_parallel import LLAMA, parity

HEADS: dict[str, Any] = {
    "vocab_size": 31,
    "num_layers": 2,
    "d_model": 56,
    "num_heads": 28,
    "max_len": 7,
    "d_ff": 60,
    "per_head": True,
}
CONFIGS = {
    "28 heads": gpt.Config(**HEADS, tie_embeddings=True),
    "28 heads, 4 of keys": gpt.Config(**HEADS, **LLAMA, num_kv_heads=4),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["28 heads", "28 heads, 4 of keys"])
@distributed(world=3)
def test_three_ranks(name: str) -> None:
    parity(CONFIGS[name], sf.make_mesh({"tp": 3}), None)


@pytest.mark.nightly
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@distributed(world=8, timeout=300)
def test_eight_ranks(name: str, sequence: bool) -> None:
    parity(CONFIGS[name], sf.make_mesh({"tp": 8}), None, sequence=sequence)


@pytest.mark.nightly
def test_sixteen_ranks_on_paper() -> None:
    """Ranks have 2 heads or 0, and a step sends Megatron's sums, as over a number that divides."""
    config, found = CONFIGS["28 heads"], []
    with sf.core.deferred():
        params = gpt.init(config, sf.key(0))
    batch = {"tokens": torch.empty(2, 6, dtype=torch.int64, device="meta")}
    for ranks in (14, 16):
        mesh = sf.make_mesh({"dp": 1, "tp": ranks}, device="cpu", abstract=True)
        loss = sf.jit(functools.partial(gpt.loss, config, axis="tp"), backend="graph")
        step = sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, specs=gpt.specs(config, tp="tp"), batch=sf.P("dp"))
        transfers = step.lower(params, batch).cost_analysis().transfers
        found.append({op: calls for op, (calls, _) in transfers.items()})
    assert found[0] == found[1]
    sums = sum(calls for (op, axes), calls in found[1].items() if op == "psum" and "tp" in axes)
    assert sums >= 4 * config.num_layers
