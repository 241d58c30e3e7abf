"""Covers `shardfn plan --longest`: its result just fits, its bytes are those of steps, and refusals."""

import dataclasses
import functools
import json
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import memory, optim
from shardfn.cli import MLP_WIDTH, LongSettings, Setup, longest, main, parse_model, peak_bytes
from shardfn.core import Zero
from shardfn.graph import cluster
from shardfn.models import gpt, moe
from shardfn.transforms import policies


def setup_of(V: int, L: int, D: int, mesh: Any = None, **more: Any) -> Setup:
    config = gpt.Config.llama_like(vocab_size=V, num_layers=L, d_model=D, num_heads=4, d_ff=3 * D, max_len=1 << 14)
    return Setup("tiny", config, mesh or {"dp": 1}, cluster("cpu"), Zero(3), "fp32-adam", **more)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 4])
def test_one_token_more_does_not_fit(ranks: int) -> None:
    setup, limit = setup_of(1000, 2, 64, {"dp": ranks}), 100 << 20
    found = longest(setup, limit)
    assert [x.settings.kind for x in found] == [(n > 0, n > 1, n > 2) for n in range(4)]
    assert [x.tokens for x in found] == sorted({x.tokens for x in found})
    for x in found:
        assert x.peak == peak_bytes(setup, x.settings, x.tokens) <= limit
        assert peak_bytes(setup, x.settings, x.tokens + 1) > limit
    assert longest(setup, 1 << 10)[-1].tokens == 0


def counted(setup: Setup, settings: LongSettings, tokens: int) -> int:
    torch.set_num_threads(1)
    c, rows = setup.config, {"tokens": torch.zeros(1, tokens + 1, dtype=torch.int64)}
    tile = functools.partial(sf.tiled, tiles=-(-tokens // MLP_WIDTH)) if settings.tiled_mlp else None
    config = dataclasses.replace(c, loss_tile=settings.loss_tile)
    loss: Any = functools.partial(gpt.loss, config, wrap=sf.remat, tile=tile)
    if settings.offload:
        loss = sf.offload(loss, policies.offload_larger_than(1 << 14), window=1 << 18)
    with memory.ledger() as book:
        step = sf.sharded_step(loss, optim.adamw(1e-3), mesh=sf.make_mesh({"dp": 1}))
        step(step.init(functools.partial(gpt.init, config), sf.key(0)), rows)
    return book.peak("device")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shape", "tokens", "settings"),
    [
        ((8000, 3, 64), 1024, LongSettings(16, tiled_mlp=True, offload=True)),
        pytest.param((8000, 2, 64), 512, LongSettings(128), marks=pytest.mark.nightly),
        pytest.param((512, 2, 128), 1536, LongSettings(64), marks=pytest.mark.nightly),
        pytest.param((512, 3, 128), 1536, LongSettings(64, tiled_mlp=True), marks=pytest.mark.nightly),
        pytest.param((512, 4, 128), 1536, LongSettings(64, tiled_mlp=True, offload=True), marks=pytest.mark.nightly),
        pytest.param((512, 2, 128), 700, LongSettings(64, tiled_mlp=True), marks=pytest.mark.nightly),
        pytest.param((512, 2, 128), 5000, LongSettings(64, tiled_mlp=True, offload=True), marks=pytest.mark.nightly),
        pytest.param((8000, 2, 64), 64, LongSettings(16), marks=pytest.mark.nightly),
    ],
)
def test_bytes_are_within_5_percent_of_those_counted(
    shape: tuple[int, int, int], tokens: int, settings: LongSettings
) -> None:
    setup = setup_of(*shape)
    planned, found = peak_bytes(setup, settings, tokens), counted(setup, settings, tokens)
    assert abs(planned / found - 1) <= 0.05, (planned, found)


@pytest.mark.nightly
def test_the_program_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["plan", "--model", "llama-7b", "--mesh", "dp=8", "--longest"]
    assert main(run) == 0
    text = capsys.readouterr().out
    assert "Config(loss_tile=" in text
    assert 'nn.Ulysses("sp", tokens)' in text
    assert main([*run, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["longest"]
    best = longest(Setup("llama-7b", parse_model("llama-7b"), {"dp": 8}, cluster("a100-80"), Zero(3)))
    assert [x["tokens"] for x in told] == [x.tokens for x in best]
    assert main(["plan", "--model", "llama-65b", "--longest"]) == 1


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"(?s)tp=2: take dp alone.*--batch 3: take 1"):
        longest(setup_of(100, 1, 16, {"dp": 2, "tp": 2}, batch=3))
    assert main(["plan", "--longest", "--search"]) == 2
    assert "leave out:\n  - --search" in capsys.readouterr().err


def test_few_layers_with_experts_or_a_pyramid_have_a_peak() -> None:
    """The gradients of the largest block count, whichever layers have experts."""
    dense, settings = setup_of(1000, 4, 64), LongSettings(16)
    peaks = []
    for experts in (None, moe.Experts(num=4, every=4), moe.Experts(num=(2, 4), every=2), moe.Experts(num=4)):
        setup = dataclasses.replace(dense, config=dataclasses.replace(dense.config, experts=experts))
        peaks.append(peak_bytes(setup, settings, 8))
    assert peaks == sorted(set(peaks))
