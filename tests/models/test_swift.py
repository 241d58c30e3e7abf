"""Covers SwiftKV: keys and values of later layers from one state. The formulas, one device, and the counted work."""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import shardfn as sf
from shardfn import distill, optim
from shardfn.core import named_leaves, tree_map
from shardfn.inference import CacheLayout, Engine, Sampling, decoder, limits_of
from shardfn.inference._cache import make_single_bodies
from shardfn.interop import gpt_from_hf, gpt_to_hf, hf_config
from shardfn.models import gpt
from shardfn.models.gpt import Swift
from shardfn.models.moe import Experts
from shardfn.testing import assert_parity, distributed

GPT2: dict[str, Any] = {"vocab_size": 13, "num_layers": 5, "d_model": 16, "num_heads": 4, "max_len": 24}
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False, "num_kv_heads": 2}
BASES = {
    "gpt2": gpt.Config(**GPT2, tie_embeddings=True),
    "llama": gpt.Config(**GPT2, **LLAMA),
    "bloom": gpt.Config(**GPT2, position="alibi", window=6, per_head=True),
}
TOKENS = torch.randint(13, (2, 12), generator=torch.Generator().manual_seed(0))


def params_of(config: gpt.Config, dtype: torch.dtype = torch.float32) -> Any:
    """Parameters far from their start, so that no bias is 0 and no scale is 1."""
    drawn = torch.Generator().manual_seed(1)
    return tree_map(lambda x: (x + 0.2 * torch.randn(x.shape, generator=drawn)).to(dtype), gpt.init(config, sf.key(0)))


def with_swift(name: str, first: int = 1, group: int = 2, **changes: Any) -> tuple[gpt.Config, Any]:
    """A model whose own leaves have moved from their start."""
    config = dataclasses.replace(BASES[name], **changes)
    config = dataclasses.replace(config, swift=Swift(first, group))
    return config, params_of(config)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one head [T, K]."""
    scores = q @ k.T / q.shape[1] ** 0.5
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1) @ v


def formula(config: gpt.Config, p: Any, tokens_T: Tensor) -> Tensor:
    """The logits of a GPT-2 with SwiftKV, one layer and one head after the other."""
    assert config.swift is not None
    layer_norm = functools.partial(torch.nn.functional.layer_norm, normalized_shape=(config.d_model,))
    x, K = p["embed"][tokens_T] + p["position"][: len(tokens_T)], config.head_dim
    kept: Any = None
    for i, b in enumerate(p["blocks"]):
        h, late = layer_norm(x, weight=b["norm1_w"], bias=b["norm1_b"]), i >= config.swift.first
        if i == config.swift.first:
            kept = layer_norm(x, weight=p["s_norm_w"], bias=p["s_norm_b"])
        leader = p["blocks"][config.swift.first + (i - config.swift.first) // config.swift.group * config.swift.group]
        q = h @ b["s_wq" if late else "wq"].T + b["s_bq" if late else "bq"]
        own, source, s = (leader, kept, "s_") if late else (b, h, "")
        k, v = (source @ own[f"{s}w{n}"].T + own[f"{s}b{n}"] for n in "kv")
        heads = [attended(*(y[:, n * K : (n + 1) * K] for y in (q, k, v))) for n in range(config.num_heads)]
        x = x + torch.cat(heads, -1) @ b["wo"].T + b["bo"]
        up = layer_norm(x, weight=b["norm2_w"], bias=b["norm2_b"]) @ b["w_up"].T + b["b_up"]
        x = x + torch.nn.functional.gelu(up, approximate="tanh") @ b["w_down"].T + b["b_down"]
    return layer_norm(x, weight=p["norm_w"], bias=p["norm_b"]) @ p["embed"].T


@pytest.mark.parametrize("first, group", [(1, 2), (2, 3), (4, 1)])
def test_logits_are_those_of_the_formula(first: int, group: int) -> None:
    config, params = with_swift("gpt2", first, group)
    params = tree_map(lambda x: x.double(), params)
    got = gpt.apply(config, params, TOKENS)
    want = torch.stack([formula(config, params, row) for row in TOKENS])
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", BASES)
def test_all_layers_before_the_first_are_the_model_itself(name: str) -> None:
    base = BASES[name]
    config, params = gpt.add_swift_kv(base, params_of(base), first=5)
    assert torch.equal(gpt.apply(config, params, TOKENS), gpt.apply(base, params, TOKENS))
    assert config.num_cache_layers == 5 and len(named_leaves(params)) == len(named_leaves(gpt.init(base, sf.key(0))))


def test_the_start_copies_queries_and_averages_keys() -> None:
    base = BASES["llama"]
    params = params_of(base)
    config, made = gpt.add_swift_kv(base, params, first=1, group=2)
    blocks = params["blocks"]
    assert torch.equal(made["blocks"][4]["s_wq"], blocks[4]["wq"]) and "s_wk" not in made["blocks"][4]
    torch.testing.assert_close(made["blocks"][3]["s_wk"], (blocks[3]["wk"] + blocks[4]["wk"]) / 2)
    assert torch.equal(made["s_norm_w"], blocks[1]["norm1_w"]) and config.num_cache_layers == 3
    plain, back = gpt.drop_swift_kv(config, made)
    assert torch.equal(gpt.apply(plain, back, TOKENS), gpt.apply(base, params, TOKENS))
    stacked = dataclasses.replace(base, stacked=True)
    _, same = gpt.add_swift_kv(stacked, tree_map(lambda x: x, _stack(params)), first=1, group=2)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(named_leaves(made), named_leaves(same), strict=True))


def _stack(params: Any) -> Any:
    blocks = params["blocks"]
    return {**params, "blocks": {name: torch.stack([p[name] for p in blocks]) for name in blocks[0]}}


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("rows", [[11], [3, 11], list(range(12))])
def test_wanted_rows_through_later_layers_are_those_of_the_forward(name: str, rows: list[int]) -> None:
    """Bit for bit, with keys in a cache that groups of layers share, in one call and in two."""
    config, params = with_swift(name, batch_invariant=True)
    want = gpt.apply(config, params, TOKENS)[0]
    packed, at_T = gpt.pack(config, params), torch.arange(12, dtype=torch.int32)
    layout = CacheLayout(config.num_cache_layers, config.kv_heads, config.head_dim)
    bodies, wanted = make_single_bodies(layout, 12), torch.tensor(rows)
    found = gpt.decode(config, packed, TOKENS[0], at_T, wanted, bodies)
    assert torch.equal(found.logits, want[wanted]) and torch.equal(found.state_after(5), found.hidden)
    whole = gpt.decode(config, packed, TOKENS[0], at_T, at_T, make_single_bodies(layout, 12))
    assert all(torch.equal(found.state_after(i), whole.state_after(i)[wanted]) for i in range(6))
    for part in (slice(0, 7), slice(7, 12)):
        cut = [
            dataclasses.replace(b, slots=b.slots[part], positions=b.positions[part], sequences=b.sequences[part])
            for b in bodies
        ]
        last = torch.tensor([part.stop - part.start - 1])
        got = gpt.decode(config, packed, TOKENS[0, part], at_T[part], last, cut)
        assert torch.equal(got.logits[0], want[part.stop - 1])


def test_counted_prefill_is_that_of_the_formula() -> None:
    """All tokens pay for keys and values of each group, and only wanted rows for the rest of later layers."""
    T, L, first, group = 256, 8, 4, 2
    sizes: dict[str, Any] = {**GPT2, **LLAMA, "num_layers": L, "d_model": 32, "max_len": T, "num_kv_heads": 4}
    base = gpt.Config(**sizes)
    params = params_of(base)

    def count(config: gpt.Config, params: Any, rows: list[int]) -> int:
        layout = CacheLayout(config.num_cache_layers, config.kv_heads, config.head_dim)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            how = torch.arange(T, dtype=torch.int32), torch.tensor(rows), make_single_bodies(layout, T)
            gpt.decode(config, gpt.pack(config, params), torch.zeros(T, dtype=torch.int64), *how)
        return counter.get_total_flops()

    D, F, V = base.d_model, base.ff_dim, base.vocab_size
    keys, rest = 4 * T * D * D, T * (4 * D * D + 6 * D * F)  # of a layer
    found = count(*gpt.add_swift_kv(base, params, first=first, group=group), [T - 1])
    want = first * (keys + rest) + (L - first) // group * keys
    assert want <= found - 2 * D * V < 1.02 * want
    assert count(base, params, [*range(T)]) == L * (keys + rest) + 2 * T * D * V


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"swift": Swift(0)}, r"swift: first must be from 1 to num_layers=5, got 0"),
        ({"swift": Swift(6)}, r"swift: first must be from 1 to num_layers=5, got 6"),
        ({"swift": Swift(2, 2)}, r"swift: group must divide the 3 layers from first=2 on, got 2"),
        ({"swift": Swift(2), "stacked": True}, r"swift does not know stacked=True"),
        ({"swift": Swift(2), "experts": Experts(num=2)}, r"swift does not know experts"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(BASES["gpt2"], **changes)


def test_missing_leaves_and_adapters_of_unread_weights_are_refused() -> None:
    config, params = with_swift("gpt2")
    del params["blocks"][3]["s_wk"], params["s_norm_b"]
    with pytest.raises(ValueError, match=r"(?s)params\['blocks'\]\[3\]\['s_wk'\] is missing.*s_norm_b'\] is missing"):
        gpt.pack(config, params)
    sizes = gpt.linear_sizes(config)
    assert "blocks.0.wk" in sizes and "blocks.1.wk" not in sizes and "blocks.1.s_wk" in sizes
    with pytest.raises(ValueError, match=r"distill.swift_loss: the config has swift=None"):
        distill.swift_loss(BASES["gpt2"], params, {"tokens": TOKENS})


def test_only_the_new_leaves_learn() -> None:
    config, params = with_swift("gpt2")
    loss = functools.partial(distill.swift_loss, config)
    step = sf.sharded_step(loss, optim.adam(1e-2), trainable=gpt.swift_trainable(config))
    state, losses = step.init(params), list[float]()
    before = dict(named_leaves(tree_map(lambda x: x.full_tensor().clone(), state.params)))
    for _ in range(12):
        state, metrics = step(state, {"tokens": TOKENS})
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    for name, x in named_leaves(tree_map(lambda x: x.full_tensor(), state.params)):
        assert torch.equal(x, before[name]) == ("s_" not in name), name


def test_the_loss_is_that_of_its_formula() -> None:
    config, params = with_swift("llama")
    params, base = tree_map(lambda x: x.double(), params), gpt.drop_swift_kv(config, params)[0]
    batch = {"tokens": TOKENS, "mask": torch.arange(12) < torch.tensor([[12], [9]])}
    total, weight = distill.swift_loss(config, params, batch, hidden_weight=0.5)
    sums = []
    for row, length in zip(TOKENS, (12, 9), strict=True):
        pair = [gpt.apply_and_hidden(c, params, row[None, : length - 1]) for c in (config, base)]
        (s, hs), (t, ht) = pair
        p = (t / 2).softmax(-1)
        sums.append(4 * (p * (p.log() - (s / 2).log_softmax(-1))).sum() + 0.5 * (hs - ht).square().mean(-1).sum())
    assert weight.item() == 11 + 8
    torch.testing.assert_close(total, torch.stack(sums).sum(), rtol=1e-10, atol=0.0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}])
@distributed(world=2)
def test_training_on_ranks_equals_one_device(name: str, axes: dict[str, int]) -> None:
    torch.set_num_threads(1)
    config, _ = with_swift(name, per_head=True)
    params, mesh, axis = params_of(config, torch.float64), sf.make_mesh(axes), "tp" if "tp" in axes else None
    batches = [{"tokens": torch.cat([TOKENS, TOKENS.flip(1)])} for _ in range(2)]
    for loss, trainable in (
        (gpt.loss, None),
        (distill.swift_loss, gpt.swift_trainable(config)),
    ):
        assert_parity(
            functools.partial(loss, config, axis=axis),
            optim.sgd(0.1),
            params,
            batches,
            mesh=mesh,
            reference=functools.partial(loss, config),
            trainable=trainable,
            specs=gpt.specs(config, tp=axis),
            batch=sf.P("dp" if "dp" in axes else None),
            zero=sf.Zero(stage=3, axis="dp") if "dp" in axes else None,
        )


@pytest.mark.nightly
@distributed(world=2)
def test_an_engine_on_ranks_has_the_tokens_of_one() -> None:
    """By heads, and by tokens where a step has 7 of them or more."""
    config, params = with_swift("llama", batch_invariant=True)
    how, prompts = Sampling(max_tokens=9, temperature=0.7, seed=1), [[1, 2, 3, 4, 5], [7, 8]]
    alone = Engine(decoder(config), params, mesh=sf.make_mesh(alone=True)).generate(prompts, how)
    made = decoder(config, tp="tp")
    for layouts in ((("tp", 1),), (("tp", 1), ("sp", 7))):
        limits = limits_of(made, layouts=layouts, buckets=(2, 8), running=4)
        cut = Engine(made, params, mesh=sf.make_mesh({"tp": 2}), limits=limits).generate(prompts, how)
        assert [x.tokens for x in alone] == [x.tokens for x in cut]
        assert [x.logprobs for x in alone] == [x.logprobs for x in cut]


@pytest.mark.parametrize("changes", [{}, {"bias": "qkv", "per_head": True}])
def test_files_are_read_as_written(tmp_path: pathlib.Path, changes: dict[str, Any]) -> None:
    """Under the names of Arctic's models."""
    config, params = with_swift("llama", **changes)
    gpt_to_hf(tmp_path, config, params)
    told = json.loads((tmp_path / "config.json").read_text())
    kind = "qwen2_swiftkv" if changes else "llama_swiftkv"
    assert (told["model_type"], told["num_key_value_layers"], told["key_value_group_size"]) == (kind, 1, 2)
    names = [*safetensors.safe_open(tmp_path / "model.safetensors", "pt").keys()]
    assert "model.layers.4.self_attn.q_proj_swiftkv.weight" in names and "model.norm_swiftkv.weight" in names
    assert "model.layers.3.self_attn.k_proj_swiftkv.weight" in names
    assert "model.layers.4.self_attn.k_proj_swiftkv.weight" not in names
    same, read = gpt_from_hf(tmp_path, per_head=config.per_head)
    assert same.swift == config.swift
    assert torch.equal(gpt.apply(same, tree_map(lambda x: x.clone(), read), TOKENS), gpt.apply(config, params, TOKENS))


def test_files_without_their_leaves_are_refused(tmp_path: pathlib.Path) -> None:
    config, params = with_swift("llama")
    gpt_to_hf(tmp_path, *gpt.drop_swift_kv(config, params))
    told = hf_config(config)
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.k_proj_swiftkv.weight is missing"):
        gpt_from_hf(tmp_path)
    for changes, said in (
        ({"num_key_value_layers": 0}, r"swift: first must be from 1 to num_layers=5, got 0"),
        ({"num_key_value_layers": 6}, r"swift: first must be from 1 to num_layers=5, got 6"),
        ({"key_value_group_size": 0}, r"swift: group must divide the 4 layers from first=1 on, got 0"),
        ({"key_value_group_size": 3}, r"swift: group must divide the 4 layers from first=1 on, got 3"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(told | changes))
        with pytest.raises(ValueError, match=said):
            gpt_from_hf(tmp_path)
    del told["num_key_value_layers"]
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"model_type='llama_swiftkv' must have num_key_value_layers"):
        gpt_from_hf(tmp_path)
