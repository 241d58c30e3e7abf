"""Covers `models.gpt` along a `tp` axis: the ranks' results together equal those of one device."""

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import nn, optim
from shardfn.core import block_slices, tree_flatten, tree_paths, tree_unflatten
from shardfn.models import gpt
from shardfn.models.moe import Experts
from shardfn.testing import assert_parity, distributed

GPT2: dict[str, Any] = {"vocab_size": 13, "num_layers": 2, "d_model": 12, "num_heads": 3, "max_len": 7, "d_ff": 10}
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False}
CONFIGS = {
    "gpt2_tied": gpt.Config(**GPT2, tie_embeddings=True, per_head=True),
    "llama_gqa": gpt.Config(**{**GPT2, "d_model": 16, "num_heads": 4, "num_kv_heads": 2}, **LLAMA, per_head=True),
    "mqa": gpt.Config(**{**GPT2, "num_kv_heads": 1}, mlp="swiglu", position="rope", per_head=True),
    "bloom": gpt.Config(**GPT2, position="alibi", embedding_norm=True, tie_embeddings=True, per_head=True),
    "gemma3": gpt.Config(
        **{**GPT2, **LLAMA, "d_model": 16, "num_heads": 4, "num_kv_heads": 2, "mlp": "geglu"},
        **{"qk_norm": "head", "norm_place": "both", "norm_plus_one": True, "embedding_scale": 4.0, "d_head": 6},
        **{"attention_scale": 0.3, "softcap": 2.0, "logits_softcap": 5.0, "window": (3, None)},
        rope=(nn.Rope(50.0), nn.Rope(900.0, scaling=nn.LinearScaling(4.0))),
        tie_embeddings=True,
        per_head=True,
    ),
    "olmo2": gpt.Config(
        **{**GPT2, **LLAMA, "num_kv_heads": 1, "qk_norm": "joint", "norm_place": "after"}, per_head=True
    ),
    "olmo2_gqa": gpt.Config(
        **{**GPT2, **LLAMA, "d_model": 16, "num_heads": 4, "num_kv_heads": 2, "qk_norm": "joint"},
        norm_place="after",
        per_head=True,
    ),
    "phi": gpt.Config(
        **GPT2, position="rope", rope=nn.Rope(fraction=0.5), parallel="one_norm", head_bias=True, per_head=True
    ),
    "sinks": gpt.Config(
        **{**GPT2, **LLAMA, "bias": True, "window": (3, None), "sinks": True},
        rope=(nn.Rope(scaling=nn.YarnScaling(4.0, 16)), None),
        per_head=True,
    ),
    "latent": gpt.Config(
        **{**GPT2, **LLAMA, "latent": gpt.Latent(5, 3, 4, 2, interleaved=True, mscale=0.7)},
        rope=nn.Rope(scaling=nn.YarnScaling(4.0, 16)),
        per_head=True,
    ),
    "gpt_oss": gpt.Config(
        **{**GPT2, **LLAMA, "bias": True, "sinks": True, "window": (3, None)},
        rope=nn.Rope(scaling=nn.YarnScaling(4.0, 16, truncate=False)),
        experts=Experts(
            num=3,
            route=functools.partial(nn.moe.top_k, softmax="after"),
            balance=0.0,
            gate=nn.moe.ClampedGate(limit=0.2),
            biases=True,
        ),
        per_head=True,
    ),
    "deepseek": gpt.Config(
        **{**GPT2, **LLAMA, "latent": gpt.Latent(5, 3, 4, 2, q_rank=5)},
        experts=Experts(
            num=4,
            d_ff=6,
            route=functools.partial(nn.moe.sigmoid_groups, groups=2, groups_kept=1, scale=2.5),
            balance=0.0,
            shared=True,
            shared_d_ff=4,
        ),
        per_head=True,
    ),
    "latent_q": gpt.Config(**{**GPT2, **LLAMA, "latent": gpt.Latent(6, 4, 2, 3, q_rank=5)}, per_head=True),
}
SLOW = "latent", "latent_q", "gpt_oss", "deepseek", "mqa", "gpt2_tied", "olmo2", "olmo2_gqa", "phi", "sinks"


def params_of(config: gpt.Config, dtype: torch.dtype) -> Any:
    """Parameters far enough from their start that no bias is 0 and no scale is 1.

    In float32 nearer to it: there the gradients that one device computes of the Llama are 3e-7 of their largest element
    off those in float64, which leaves room below the tolerance. Further off, and for biases of queries, they are 1e-6.
    """
    noise = 0.2 if dtype == torch.float64 else 0.02
    leaves, treedef = tree_flatten(gpt.init(config, sf.key(0)))
    generator = torch.Generator().manual_seed(0)
    moved = [x.to(dtype) + noise * torch.randn(x.shape, generator=generator, dtype=dtype) for x in leaves]
    return tree_unflatten(treedef, moved)


def trainable_of(config: gpt.Config) -> Any:
    """All leaves but the bias of keys: without rotation it moves all scores of a query alike, and its gradient is 0."""
    params = gpt.init(config, sf.key(0))
    keep = [config.position == "rope" or "'bk'" not in path for path in tree_paths(params)]
    return tree_unflatten(tree_flatten(params)[1], keep)


def batches_of(config: gpt.Config, rows: int = 4, tokens: int = 7) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    shape = (rows, tokens + 1)
    make = functools.partial(torch.randint, config.vocab_size, shape, generator=generator)
    return [{"tokens": make(), "index": torch.arange(rows) + rows * n} for n in range(2)]


def parity(
    config: gpt.Config,
    mesh: sf.Mesh,
    zero: sf.Zero | None,
    *,
    dtype: torch.dtype = torch.float64,
    sequence: bool = False,
    jit: bool = False,
    remat: bool = False,
    accumulate: int = 1,
    tokens: int = 7,
    rows: int = 4,
) -> None:
    torch.set_num_threads(1)
    loss = functools.partial(gpt.loss, config, axis="tp", sequence=sequence, wrap=sf.remat if remat else lambda f: f)
    sharded = sf.accumulate(loss, accumulate) if accumulate > 1 else loss
    assert_parity(
        sf.jit(sharded, backend="graph") if jit else sharded,
        optim.sgd(0.1, momentum=0.9),
        params_of(config, dtype),
        batches_of(config, rows, tokens),
        mesh=mesh,
        reference=functools.partial(gpt.loss, config),
        key=sf.key(5) if config.dropout or config.attention_dropout else None,
        trainable=trainable_of(config),
        zero=zero,
        specs=gpt.specs(config, tp="tp"),
        batch=sf.P("dp"),
    )


@pytest.mark.day("bloom-sequence")
@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["whole", "sequence"])
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.nightly if x in SLOW else ()) for x in CONFIGS])
@distributed(world=2)
def test_every_style_on_two_ranks_in_float64(name: str, sequence: bool) -> None:
    mesh = sf.make_mesh({"tp": 2})
    for stacked in (False, True):
        config = dataclasses.replace(CONFIGS[name], stacked=stacked, dropout=0.25)
        parity(config, mesh, None, sequence=sequence)


STAGES = [None, *(sf.Zero(stage=stage, persist_elements=0) for stage in (1, 2, 3))]


@pytest.mark.nightly
@distributed(world=4)
def test_stages_remat_and_accumulate_on_dp_times_tp() -> None:
    mesh = sf.make_mesh({"dp": 2, "tp": 2})
    for n, zero in enumerate(STAGES):
        drop = {"dropout": 0.25 * (n % 3), "attention_dropout": 0.25 * (n % 2)}
        config = dataclasses.replace([*CONFIGS.values()][n], stacked=n % 2 == 0, **drop)
        parity(config, mesh, zero, sequence=n % 2 == 1, remat=n >= 2, accumulate=1 + n % 2)


@pytest.mark.nightly
@distributed(world=4)
def test_a_captured_step_on_dp_times_tp() -> None:
    config = dataclasses.replace(CONFIGS["llama_gqa"], dropout=0.25, num_layers=1)
    parity(config, sf.make_mesh({"dp": 2, "tp": 2}), STAGES[3], sequence=True, remat=True, jit=True)


@pytest.mark.nightly
@distributed(world=3)
def test_three_ranks_and_float32() -> None:
    mesh = sf.make_mesh({"dp": 1, "tp": 3})
    parity(dataclasses.replace(CONFIGS["llama_gqa"], stacked=True), mesh, STAGES[3])
    for sequence in (False, True):
        parity(CONFIGS["llama_gqa"], mesh, STAGES[2], dtype=torch.float32, sequence=sequence)


@pytest.mark.nightly
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@distributed(world=4)
def test_more_ranks_than_heads_tokens_and_classes(sequence: bool, jit: bool) -> None:
    """3 heads, 3 tokens and 5 classes over 4 ranks: the last rank has no head, token or class."""
    config = dataclasses.replace(CONFIGS["mqa"], vocab_size=5, num_layers=1)
    parity(config, sf.make_mesh({"tp": 4}), None, sequence=sequence, jit=jit, tokens=3)


MESHES = {2: [(1, 2), (2, 1)], 3: [(1, 3), (3, 1)], 4: [(2, 2)], 6: [(3, 2), (2, 3)]}


@pytest.mark.nightly
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", CONFIGS)
@distributed(world=list(MESHES), timeout=900)
def test_grid(name: str, stage: int, jit: bool, world: int) -> None:
    """Every mesh x stage x style, with the sequence whole and cut, in both shapes of blocks, remat and accumulation."""
    for dp, tp in MESHES[world]:
        mesh = sf.make_mesh({"dp": dp, "tp": tp})
        for sequence, (remat, accumulate) in itertools.product([False, True], [(False, 1), (True, 2)]):
            config = dataclasses.replace(CONFIGS[name], stacked=sequence != remat, dropout=0.25 * remat)
            how: dict[str, Any] = {"sequence": sequence, "remat": remat, "accumulate": accumulate, "jit": jit}
            parity(config, mesh, STAGES[stage], rows=2 * dp, **how)


# Transfers.


def _sent(config: gpt.Config, sequence: bool, tokens: int) -> dict[str, tuple[int, int]]:
    """Collective -> calls and bytes of one loss and its gradients."""
    blocks, treedef = tree_flatten(_own_blocks(config))
    blocks = [x.requires_grad_() for x in blocks]
    batch = batches_of(config, tokens=tokens)[0]
    with sf.collectives.count_traffic() as traffic:
        loss = gpt.loss(config, tree_unflatten(treedef, blocks), batch, axis="tp", sequence=sequence)
        torch.autograd.grad(loss, blocks)
    return {op: (calls, sent) for (op, _), (calls, sent) in traffic.by_op.items()}


def _own_blocks(config: gpt.Config) -> Any:
    mesh = sf.collectives.current_mesh()
    leaves, treedef = tree_flatten(params_of(config, torch.float64))
    specs: list[Any] = tree_flatten(gpt.specs(config, tp="tp"))[0]
    cuts = [block_slices(tuple(x.shape), spec, mesh.shape, mesh.coords) for x, spec in zip(leaves, specs, strict=True)]
    return tree_unflatten(treedef, [x[cut].clone() for x, cut in zip(leaves, cuts, strict=True)])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt2_tied", "llama_gqa"])
@distributed(world=[2, 4])
def test_a_block_sends_four_all_reduces_or_their_volume_in_pairs(name: str, world: int) -> None:
    torch.set_num_threads(1)
    mesh = sf.make_mesh({"tp": world})
    rows, tokens = 4, 4
    config = dataclasses.replace(CONFIGS[name], num_heads=4, num_kv_heads=4)
    one, two = (dataclasses.replace(config, num_layers=n) for n in (1, 2))
    with sf.collectives.bind_mesh(mesh):
        whole = {op: _minus(_sent(two, False, tokens)[op], _sent(one, False, tokens)[op]) for op in ("psum",)}
        after, before = _sent(two, True, tokens), _sent(one, True, tokens)
        cut = {op: _minus(after[op], before[op]) for op in after}
    volume = rows * tokens * config.d_model * 8
    share = volume * (world - 1) // world
    assert whole == {"psum": (4, 4 * 2 * share)}
    # Four pairs: two gathers and two scatters forward, and their transposes; and whole leaves' gradients.
    assert cut["all_gather"] == cut["psum_scatter"] == (4, 4 * share)
    leaves = len([n for n in ("norm1_w", "norm1_b", "norm2_w", "norm2_b", "bo", "b_down") if n in _leaves_of(one)])
    assert cut["psum"] == (leaves, leaves * 2 * config.d_model * 8 * (world - 1) // world)
    assert cut.keys() <= {"all_gather", "psum_scatter", "psum", "pmax", "all_gather_invariant"}


def _leaves_of(config: gpt.Config) -> Any:
    return gpt.init(config, sf.key(0))["blocks"][0]


def _minus(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] - b[0], a[1] - b[1]


@distributed(world=2)
def test_logits_and_samples_are_those_of_one_device() -> None:
    config, prompt = CONFIGS["bloom"], torch.tensor([[1, 2], [3, 4]])
    params, mesh = params_of(config, torch.float64), sf.make_mesh({"tp": 2})
    with sf.collectives.bind_mesh(mesh):
        own = gpt.apply(config, _own_blocks(config), prompt, axis="tp", sequence=True)
        logits = sf.all_gather_invariant(own, "tp", dim=-1, size=config.vocab_size)
        drawn = gpt.generate(config, _own_blocks(config), prompt, 4, sf.key(1), axis="tp")
    assert own.shape[-1] == (7, 6)[mesh.rank]
    torch.testing.assert_close(logits, gpt.apply(config, params, prompt), rtol=1e-12, atol=1e-12)
    assert torch.equal(drawn, gpt.generate(config, params, prompt, 4, sf.key(1)))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.nightly), 3])
@distributed(world=2)
def test_a_sharded_state_samples_like_one_device(stage: int) -> None:
    config, prompt = CONFIGS["llama_gqa"], torch.tensor([[1, 2], [3, 4]])
    params = params_of(config, torch.float64)
    zero = sf.Zero(stage=stage, persist_elements=0)
    step = sf.sharded_step(functools.partial(gpt.loss, config), optim.sgd(0.1), mesh=sf.make_mesh({"dp": 2}), zero=zero)
    drawn = step.apply(functools.partial(gpt.generate, config), step.init(params), prompt, 6, sf.key(1))
    want = gpt.generate(config, params, prompt, 6, sf.key(1))
    assert torch.equal(drawn, want) and not torch.equal(want, gpt.generate(config, params, prompt, 6, sf.key(2)))
