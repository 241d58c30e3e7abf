"""Covers `models.gpt` with layouts of attention: all bodies and meshes compute the same; models that look ahead."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import nn, optim
from shardfn.core import tree_flatten, tree_unflatten
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

T = 7
CONFIG = gpt.Config.llama_like(
    vocab_size=13,
    num_layers=2,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    d_ff=10,
    max_len=T,
    per_head=True,
    attention=nn.BlockSparse(),
    layout=functools.partial(
        nn.layouts.fixed, block=2, num_heads=4, num_local_blocks=2, num_patterns=2, padded=True, attention="horizontal"
    ),
)


def params_of(config: gpt.Config) -> Any:
    leaves, treedef = tree_flatten(gpt.init(config, sf.key(0)))
    g = torch.Generator().manual_seed(0)
    noise = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in leaves]
    return tree_unflatten(treedef, [x.double() + 0.2 * n for x, n in zip(leaves, noise, strict=True)])


def batch_of(config: gpt.Config, seed: int, rows: int = 4) -> dict[str, Tensor]:
    """Documents, targets (some do not count), and the numbers of the samples."""
    g = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(config.vocab_size, (2, rows, T), generator=g)
    ids = torch.randint(2, (rows, T), generator=g).sort(-1).values
    targets[torch.rand(rows, T, generator=g) < 0.3] = -100
    return {"tokens": tokens, "targets": targets, "segment_ids": ids, "index": torch.arange(rows) + seed * rows}


def parity(mesh: sf.Mesh, config: gpt.Config, *, stage: int = 3, remat: bool = False, jit: bool = False) -> None:
    """A model on a mesh, against dense attention on one device."""
    torch.set_num_threads(1)
    plain, cut = dataclasses.replace(config, attention=nn.Dense()), sf.P("dp", config.attention.axes)
    loss = functools.partial(gpt.loss, config, axis="tp", wrap=sf.remat if remat else lambda f: f)
    assert_parity(
        sf.jit(loss, backend="graph") if jit else loss,
        optim.sgd(0.1, momentum=0.9),
        params_of(config),
        [batch_of(config, n) for n in range(2)],
        mesh=mesh,
        key=sf.key(5) if config.attention_dropout else None,
        reference=functools.partial(gpt.loss, plain),
        zero=sf.Zero(stage=stage, axis=("dp", *config.attention.axes), persist_elements=0) if stage else None,
        specs=gpt.specs(config, tp="tp"),
        batch={**dict.fromkeys(("tokens", "targets", "segment_ids"), cut), "index": sf.P("dp")},
    )


@pytest.mark.parametrize("causal", [True, False])
def test_bodies_compute_the_same(causal: bool) -> None:
    config = dataclasses.replace(CONFIG, causal=causal)
    params, batch = params_of(config), batch_of(config, 0)

    def loss(body: nn.AttentionBackend, params: Any) -> Tensor:
        return gpt.loss(dataclasses.replace(config, attention=body), params, batch).mean()

    value, grads = sf.value_and_grad(functools.partial(loss, nn.BlockSparse()))(params)
    for body in (nn.Dense(), nn.Blockwise(3), nn.BlockSparse(3)):
        want, others = sf.value_and_grad(functools.partial(loss, body))(params)
        for a, b in zip((value, *tree_flatten(grads)[0]), (want, *tree_flatten(others)[0]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    everything = dataclasses.replace(config, layout=None)
    assert not torch.allclose(gpt.loss(everything, params, batch).mean(), value)


@pytest.mark.nightly
@distributed(world=2)
def test_dropout_of_tiles_on_two_ranks() -> None:
    """Each rank draws the same as one device for its heads and samples."""
    one = dataclasses.replace(CONFIG, num_layers=1, attention_dropout=0.25)
    parity(sf.make_mesh({"sp": 2}), dataclasses.replace(one, attention=nn.Ulysses("sp", T, nn.BlockSparse())))


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_equal_one_device() -> None:
    """Along sp each rank has the layouts of its heads; along tp, too; scanned, recomputed and captured."""
    one = dataclasses.replace(CONFIG, num_layers=1)
    parity(sf.make_mesh({"sp": 2}), dataclasses.replace(one, attention=nn.Ulysses("sp", T, nn.BlockSparse())))
    dropping = {"attention_dropout": 0.25}
    parity(sf.make_mesh({"tp": 2}), dataclasses.replace(one, causal=False, **dropping), remat=True, stage=0)
    parity(sf.make_mesh({"dp": 2}), dataclasses.replace(CONFIG, stacked=True, **dropping), remat=True, jit=True)


@pytest.mark.nightly
@distributed(world=[3, 4], timeout=600)
def test_more_ranks_and_kinds(world: int) -> None:
    bodies = nn.Ulysses("sp", T, nn.BlockSparse(3)), nn.Ring("sp", T, block=2)
    for n, body in enumerate(bodies):
        config = dataclasses.replace(CONFIG, attention=body, stacked=n == 0, causal=n == 0, attention_dropout=0.25)
        sizes = {"sp": 3} if world == 3 else {"sp": 2, "tp": 2} if n else {"sp": 2, "dp": 2}
        parity(sf.make_mesh(sizes), config, remat=n == 0, jit=n == 1, stage=3 * (1 - n))
    random = functools.partial(nn.layouts.bigbird, block=1, random=(1, sf.key(0)), num_heads=4)
    config = dataclasses.replace(CONFIG, layout=random)
    parity(sf.make_mesh({"tp": world}), config, jit=True, stage=0)


def test_pipeline_stages() -> None:
    config = dataclasses.replace(CONFIG, stacked=True)
    params, batch = params_of(config), batch_of(config, 0)
    first, block, last = gpt.stages(config)
    h = first(params, batch)
    for i in range(config.num_layers):
        h = block({name: x[i] for name, x in params["blocks"].items()}, h)
    torch.testing.assert_close(last(params, h, batch).mean(), gpt.loss(config, params, batch).mean())


def test_refusals() -> None:
    ahead = dataclasses.replace(CONFIG, causal=False)
    params = gpt.init(CONFIG, sf.key(0))
    with pytest.raises(ValueError, match=r'each token sees the next.*Give the batch "targets"'):
        gpt.loss(ahead, params, {"tokens": torch.zeros(1, 5, dtype=torch.int64)})
    with pytest.raises(ValueError, match="generate: a model with causal=False"):
        gpt.generate(ahead, params, torch.zeros(1, 1, dtype=torch.int64), 1, sf.key(0))
    for field in ({"window": 3}, {"position": "alibi"}):
        with pytest.raises(ValueError, match=r"looks back only, but causal=False\. Leave one of them out"):
            dataclasses.replace(ahead, **field)
    with pytest.raises(ValueError, match="got 7 tokens in blocks of 2"):
        strict = dataclasses.replace(CONFIG, layout=functools.partial(nn.layouts.fixed, block=2))
        gpt.apply(strict, params, torch.zeros(1, T, dtype=torch.int64))
    with pytest.raises(ValueError, match="BlockLayout for 2 heads, but there are 4"):
        other = dataclasses.replace(CONFIG, layout=lambda n: nn.BlockLayout(torch.ones(2, n, n), 1))
        gpt.apply(other, params, torch.zeros(1, T, dtype=torch.int64))


def test_samples_of_any_length() -> None:
    tokens = gpt.generate(CONFIG, gpt.init(CONFIG, sf.key(0)), torch.zeros(2, 1, dtype=torch.int64), 4, sf.key(1))
    assert tokens.shape == (2, 5)
