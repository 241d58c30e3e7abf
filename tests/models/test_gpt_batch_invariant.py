"""Covers `models.gpt` with `batch_invariant=True`: logits of a token have the same bits alone and on ranks."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import interop, kernels, nn
from shardfn.core import block_slices, tree_flatten, tree_leaves, tree_map, tree_unflatten
from shardfn.models import gpt
from shardfn.testing import distributed

NIGHTLY = pytest.mark.nightly
BASE: dict[str, Any] = {"vocab_size": 67, "num_layers": 2, "d_model": 24, "num_heads": 4, "max_len": 40, "d_ff": 40}
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {"tie_embeddings": True},
    "llama": {**LLAMA, "num_kv_heads": 2},
    "bloom": {"position": "alibi", "embedding_norm": True, "tie_embeddings": True},
    "qwen": {**LLAMA, "bias": "qkv", "num_kv_heads": 1, "per_head": True, "tie_embeddings": True},
    "mistral": {**LLAMA, "window": 4, "stacked": True, "chunks": 3},
    "no biases": {"bias": False, "norm": "rms", "position": "rope", "per_head": True},
    "mixed": {"norm": "layer", "mlp": "swiglu", "position": "rope", "bias": True, "stacked": True},
    "gemma3": {
        **LLAMA,
        **{"qk_norm": "head", "norm_place": "both", "norm_plus_one": True, "mlp": "geglu", "d_head": 10},
        **{"embedding_scale": 5.0, "attention_scale": 0.2, "softcap": 1.5, "logits_softcap": 4.0, "num_kv_heads": 2},
        **{"window": (3, None), "rope": (nn.Rope(50.0), nn.Rope(900.0, scaling=nn.LinearScaling(4.0)))},
    },
    "olmo2": {**LLAMA, "qk_norm": "joint", "norm_place": "after", "num_kv_heads": 2},
    "smollm3": {**LLAMA, "rope": (nn.Rope(), None), "num_kv_heads": 1},
    "phi": {
        **{"position": "rope", "parallel": "one_norm", "head_bias": True, "rope": nn.Rope(fraction=0.5), "d_head": 8}
    },
    "gpt_neox": {"position": "rope", "parallel": "two_norms", "rope": nn.Rope(fraction=0.25), "d_head": 8},
    "sinks": {
        **{**LLAMA, "bias": True, "sinks": True, "window": (4, None), "num_kv_heads": 2},
        **{"rope": nn.Rope(scaling=nn.YarnScaling(4.0, 16, truncate=False))},
    },
    "latent": {**LLAMA, "latent": gpt.Latent(12, 6, 4, 5, q_rank=10, interleaved=True)},
}
DAY = "latent", "gpt2", "llama", "mistral", "gemma3", "olmo2"
NAMES = [pytest.param(x, marks=() if x in DAY else NIGHTLY) for x in SETTINGS]


def config_of(name: str, **changes: Any) -> gpt.Config:
    return gpt.Config(**{**BASE, **SETTINGS[name], "batch_invariant": True, **changes})


def params_of(config: gpt.Config) -> Any:
    """Parameters far enough from their start that no bias is 0 and no scale is 1."""
    draw = torch.Generator().manual_seed(0)
    return tree_map(lambda x: x + 0.2 * torch.randn(x.shape, generator=draw), gpt.init(config, sf.key(0)))


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(67, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.day("llama")
@pytest.mark.parametrize("name", NAMES)
def test_samples_and_prefixes_have_the_bits_that_they_have_alone(name: str) -> None:
    config, tokens = config_of(name), tokens_of(3, 34)
    params = params_of(config)
    logits = gpt.apply(config, params, tokens)
    torch.testing.assert_close(logits, gpt.apply(dataclasses.replace(config, batch_invariant=False), params, tokens))
    for rows, length in ((slice(1, 2), 34), (slice(0, 1), 1), (slice(2, 3), 7), (slice(0, 2), 32), (slice(1, 3), 33)):
        assert torch.equal(gpt.apply(config, params, tokens[rows, :length]), logits[rows, :length]), (rows, length)


def test_logits_at_positions_have_the_bits_of_all_logits_and_their_gradients() -> None:
    config, tokens, at = config_of("llama"), tokens_of(3, 12), torch.tensor([[2, 5], [0, 11], [7, 7]])
    leaves, treedef = tree_flatten(params_of(config))
    leaves = [x.requires_grad_() for x in leaves]
    params = tree_unflatten(treedef, leaves)
    wanted, found = (
        gpt.apply(config, params, tokens)[torch.arange(3)[:, None], at],
        gpt.apply(config, params, tokens, at=at),
    )
    assert torch.equal(found, wanted)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SETTINGS)
def test_threads_do_not_change_bits(name: str) -> None:
    config = config_of(name, d_model=136, d_ff=1409, vocab_size=1000)
    params, tokens, before = params_of(config), tokens_of(2, 33), torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(gpt.apply(config, params, tokens))
    torch.set_num_threads(before)
    assert torch.equal(*found)
    alone = [gpt.apply(config, params, tokens[:1, :n])[0, -1] for n in range(1, 34)]
    assert torch.equal(torch.stack(alone), found[0][0])


def packed(config: gpt.Config, params: Any) -> Any:
    """The parameters as a server has them: weights of linear layers in panels, the embedding too where it is tied."""

    def pack(name: str, w: Tensor) -> Any:
        kept = name in ("position", "wk_b", "wv_b") or (name == "embed" and not config.tie_embeddings)
        if w.ndim < 2 or kept or name[0] == "b":
            return w
        matrix = w.flatten(1) if name in ("wo", "w_down") else w.flatten(0, -2)
        return nn.BatchInvariantWeight(kernels.pack_rows(matrix), w.shape, config.chunks)

    blocks = [{name: pack(name, w) for name, w in p.items()} for p in params["blocks"]]
    return {name: blocks if name == "blocks" else pack(name, w) for name, w in params.items()}


@pytest.mark.parametrize("name", [x for x in NAMES if not SETTINGS[str(x.values[0])].get("stacked")])
def test_weights_that_are_packed_before_have_the_same_bits(name: str) -> None:
    config, tokens = config_of(name), tokens_of(2, 9)
    params = params_of(config)
    assert torch.equal(gpt.apply(config, packed(config, params), tokens), gpt.apply(config, params, tokens))


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
def test_gradients_are_those_of_torch_in_float64(name: str) -> None:
    config, batch = config_of(name), {"tokens": tokens_of(2, 6)}
    plain, params = dataclasses.replace(config, batch_invariant=False), gpt.init(config, sf.key(0))
    wide = tree_map(torch.Tensor.double, params)
    exact_loss, plain_loss = functools.partial(gpt.loss, config), functools.partial(gpt.loss, plain)
    got: Any = torch.func.grad(exact_loss)(params, batch)
    want: Any = torch.func.grad(plain_loss)(wide, batch)
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert (a - b).abs().max() <= 2e-6 * (1 + b.abs().max())
    tangents = tree_map(lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(2)), params)
    pushed: Any = torch.func.jvp(lambda p: exact_loss(p, batch), (params,), (tangents,))[1]
    true: Any = torch.func.jvp(lambda p: plain_loss(p, batch), (wide,), (tree_map(torch.Tensor.double, tangents),))[1]
    torch.testing.assert_close(pushed, true.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_float64_has_the_same_laws(name: str) -> None:
    config, tokens = config_of(name), tokens_of(3, 12)
    params = tree_map(lambda x: x.double() * (1 + 1e-9), params_of(config))
    plain, logits = dataclasses.replace(config, batch_invariant=False), gpt.apply(config, params, tokens)
    torch.testing.assert_close(logits, gpt.apply(plain, params, tokens), rtol=1e-11, atol=1e-11)
    for rows, length in ((slice(1, 2), 12), (slice(0, 1), 1), (slice(1, 3), 7)):
        assert torch.equal(gpt.apply(config, params, tokens[rows, :length]), logits[rows, :length]), (rows, length)
    batch = {"tokens": tokens[:2, :7]}
    got, want = (torch.func.grad(functools.partial(gpt.loss, x))(params, batch) for x in (config, plain))
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


# Ranks.


def _same_bits(name: str, ranks: int, chunks: int, sequence: bool) -> None:
    torch.set_num_threads(1)
    width = 24 if ranks != 4 else 32
    config = config_of(name, chunks=chunks, num_heads=width // 4 if ranks == 3 else 4, d_model=width, per_head=True)
    config = dataclasses.replace(config, d_ff=48)
    params, tokens = params_of(config), tokens_of(2, 7)
    want = gpt.apply(config, params, tokens)
    mesh = sf.make_mesh({"tp": ranks})

    leaves, treedef = tree_flatten(params)
    kinds = tree_leaves(gpt.specs(config, tp="tp"), is_leaf=lambda x: isinstance(x, sf.P | sf.Sharding))
    specs = [kind.spec if isinstance(kind, sf.Sharding) else kind for kind in kinds]
    blocks = [block_slices(x.shape, spec, mesh.shape, mesh.coords) for x, spec in zip(leaves, specs, strict=True)]
    own = tree_unflatten(treedef, [x[block] for x, block in zip(leaves, blocks, strict=True)])
    with sf.collectives.bind_mesh(mesh):
        logits = gpt.apply(config, own, tokens, axis="tp", sequence=sequence)
        assert torch.equal(sf.all_gather_invariant(logits, "tp", dim=-1, size=config.vocab_size), want)


@pytest.mark.nightly
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x == "llama" else NIGHTLY) for x in SETTINGS])
@distributed(world=2)
def test_two_ranks_have_the_bits_of_one(name: str, sequence: bool) -> None:
    _same_bits(name, 2, 8, sequence)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen"])
@distributed(world=3)
def test_three_ranks_have_the_bits_of_one(name: str) -> None:
    _same_bits(name, 3, 24, False)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen"])
@distributed(world=4)
def test_four_ranks_have_the_bits_of_one(name: str) -> None:
    _same_bits(name, 4, 8, True)


@pytest.mark.nightly
@pytest.mark.parametrize("jit", [False, True])
@distributed(world=2)
def test_a_step_of_two_ranks_has_the_forward_of_one(jit: bool) -> None:
    torch.set_num_threads(1)
    config = config_of("llama")
    params, batch = params_of(config), {"tokens": tokens_of(4, 8)}
    mesh = sf.make_mesh({"dp": 2})
    rows = slice(2 * mesh.coords["dp"], 2 * mesh.coords["dp"] + 2)
    own = {"tokens": batch["tokens"][rows]}
    alone = gpt.loss(config, params, own)

    def loss(params: Any, batch: Any) -> Any:
        found = gpt.loss(config, params, batch)
        return found, {"sum": sf.psum(found.detach(), "dp")}

    step = sf.sharded_step(
        sf.jit(loss) if jit else loss,
        sf.optim.sgd(0.1),
        mesh=mesh,
        batch=sf.P("dp"),
        zero=sf.Zero(stage=3),
        has_aux=True,
    )
    state, metrics = step(step.init(params), own)
    with sf.collectives.bind_mesh(mesh):
        assert torch.equal(metrics["sum"], sf.psum(alone, "dp"))
    _, again = step(state, own)
    assert torch.isfinite(again["loss"])


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["graph", "inductor"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_captured_and_compiled_programs_and_remat_have_the_bits_of_eager_code(name: str, backend: str) -> None:
    config, tokens, mesh = config_of(name), tokens_of(24, 39), sf.make_mesh({"dp": 1})  # enough for a compiler
    params = params_of(config)
    want = gpt.apply(config, params, tokens)
    assert torch.equal(gpt.apply(config, params, tokens, wrap=sf.remat), want)
    compiled = sf.sharded(sf.jit(functools.partial(gpt.apply, config), backend=backend), mesh=mesh)
    shards = tree_map(lambda x: sf.collectives.shard(x, sf.P(), mesh), params)
    assert torch.equal(compiled(shards, tokens), want)


@pytest.mark.nightly
def test_operations_of_a_lowered_step_are_those_of_the_plain_model() -> None:
    config = config_of("llama", vocab_size=64, d_model=64, d_ff=128)
    found = []
    for each in (config, dataclasses.replace(config, batch_invariant=False)):
        step = sf.sharded_step(
            sf.jit(functools.partial(gpt.loss, each)), sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 1})
        )
        lowered = step.lower(gpt.init(config, sf.key(0)), {"tokens": tokens_of(2, 33) % 64})
        found.append(lowered.cost_analysis().flops)
    assert found[1] <= found[0] < 1.5 * found[1]  # attention is computed again for its backward, in whole tiles


# Refusals.


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"attention": nn.Blockwise()}, r"batch_invariant=True does not know attention=Blockwise\(block=512\)"),
        ({"causal": False}, "batch_invariant=True does not know causal=False"),
        ({"attention_dropout": 0.1}, r"batch_invariant=True does not know attention_dropout=0\.1"),
        ({"loss_tile": 4}, "batch_invariant=True does not know loss_tile=4"),
        ({"chunks": 0}, "chunks=0 must be at least 1"),
    ],
)
def test_settings_that_are_not_exact_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config_of("gpt2", **changes)


def test_narrow_parameters_and_documents_are_refused() -> None:
    config = config_of("gpt2")
    params = params_of(config)
    with pytest.raises(
        TypeError, match=r"bfloat16: batch-invariant layers compute float32, .*\. Remove mixed precision"
    ):
        gpt.apply(config, tree_map(torch.Tensor.bfloat16, params), tokens_of(1, 3))
    batch = {"tokens": tokens_of(1, 4), "segment_ids": torch.zeros(1, 4, dtype=torch.int64)}
    with pytest.raises(ValueError, match=r"(?s)attention by BatchInvariant\(\):.*Segments"):
        gpt.loss(config, params, batch)


def test_the_old_keyword_is_refused_with_the_new_name() -> None:
    with pytest.raises(TypeError, match=r"Config\(exact=True\): .*Write batch_invariant=True"):
        gpt.Config(**{**BASE, "exact": True})


def test_a_file_of_a_model_with_the_old_field_is_read() -> None:
    """Files have the fields of transformers, and no `exact`. A file that has the field anyway is read as before."""
    config = config_of("llama")
    written = interop.hf_config(config)
    assert "exact" not in written and "batch_invariant" not in written
    read = interop.gpt_config({**written, "exact": True}, batch_invariant=True, chunks=config.chunks)
    assert read == interop.gpt_config(written, batch_invariant=True, chunks=config.chunks)
