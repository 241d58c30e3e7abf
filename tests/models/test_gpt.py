"""The GPT: parameter counts and trees, logits against a torch.nn model, causality, gradients, training, sampling."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from shardfn.core import (
    Draw,
    P,
    deferred,
    draw_block,
    key,
    split,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_unflatten,
)
from shardfn.models import gpt

TINY: dict[str, Any] = {"vocab_size": 37, "num_layers": 2, "d_model": 24, "num_heads": 4, "max_len": 16}
CONFIGS = {
    "gpt2": gpt.Config(**TINY),
    "gpt2_tied": gpt.Config(**TINY, tie_embeddings=True),
    "no_bias": gpt.Config(**TINY, bias=False),
    "llama": gpt.Config(**TINY, norm="rms", mlp="swiglu", position="rope", bias=False),
    "llama_gqa": gpt.Config(**TINY, num_kv_heads=2, norm="rms", mlp="swiglu", position="rope", bias=False),
    "mixed": gpt.Config(**TINY, num_kv_heads=1, d_ff=10, mlp="swiglu", position="rope", tie_embeddings=True),
    "odd": gpt.Config(vocab_size=11, num_layers=1, d_model=9, num_heads=3, max_len=5, norm="rms", d_ff=7),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


class Reference(torch.nn.Module):
    """The same model in textbook form, with modules and explicit masks."""

    def __init__(self, c, params):
        super().__init__()
        self.c, self.p = c, params

    def norm(self, x, p, name):
        if self.c.norm == "rms":
            return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * p[f"{name}_w"]
        layer = torch.nn.LayerNorm(self.c.d_model, bias=f"{name}_b" in p, dtype=x.dtype)
        with torch.no_grad():
            layer.weight.copy_(p[f"{name}_w"])
            if f"{name}_b" in p:
                layer.bias.copy_(p[f"{name}_b"])
        return layer(x)

    def rotate(self, x_THK):
        T, _, K = x_THK.shape
        out = torch.empty_like(x_THK)
        for t in range(T):
            for i in range(K // 2):
                angle = t * 10000.0 ** (-2 * i / K)
                a, b = x_THK[t, :, i], x_THK[t, :, i + K // 2]
                out[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
                out[t, :, i + K // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def affine(self, x, p, name):
        y = x @ p[f"w{name}"].T
        return y + p[f"b{name}"] if f"b{name}" in p else y

    def attention(self, x_TD, p):
        c, T = self.c, len(x_TD)
        q, k, v = (self.affine(x_TD, p, n).view(T, -1, c.head_dim) for n in "qkv")
        if c.position == "rope":
            q, k = self.rotate(q), self.rotate(k)
        heads = []
        for h in range(c.num_heads):
            g = h * c.kv_heads // c.num_heads
            scores = q[:, h] @ k[:, g].T / math.sqrt(c.head_dim)
            scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v[:, g])
        return self.affine(torch.cat(heads, -1), p, "o")

    def mlp(self, x, p):
        if self.c.mlp == "swiglu":
            return (F.silu(x @ p["w_gate"].T) * (x @ p["w_up"].T)) @ p["w_down"].T
        return self.affine(torch.nn.GELU(approximate="tanh")(self.affine(x, p, "_up")), p, "_down")

    def forward(self, tokens_BT):
        return torch.stack([self.one(t) for t in tokens_BT])

    def one(self, tokens_T):
        x = self.p["embed"][tokens_T]
        if self.c.position == "learned":
            x = x + self.p["position"][: len(tokens_T)]
        for p in self.p["blocks"]:
            x = x + self.attention(self.norm(x, p, "norm1"), p)
            x = x + self.mlp(self.norm(x, p, "norm2"), p)
        x = self.norm(x, self.p, "norm")
        return x @ (self.p["embed"] if self.c.tie_embeddings else self.p["head"]).T


def params_of(config, dtype=torch.float64, noise=0.3) -> Any:
    """Parameters far enough from their start that no bias is 0 and no scale is 1."""
    leaves, treedef = tree_flatten(gpt.init(config, key(0)))
    generator = torch.Generator().manual_seed(0)
    leaves = [x.to(dtype) + noise * torch.randn(x.shape, generator=generator, dtype=dtype) for x in leaves]
    return tree_unflatten(treedef, leaves)


def tokens_of(config, B=2, T=None):
    T = config.max_len if T is None else T
    return torch.randint(config.vocab_size, (B, T), generator=torch.Generator().manual_seed(1))


@every_config
def test_logits_equal_the_reference(config):
    params, tokens = params_of(config), tokens_of(config, T=config.max_len - 1)
    with torch.no_grad():
        want = Reference(config, params)(tokens)
    torch.testing.assert_close(gpt.apply(config, params, tokens), want, rtol=1e-5, atol=1e-5)


@every_config
def test_trees_agree_and_are_counted(config):
    params = gpt.init(config, key(0))
    assert tree_paths(gpt.specs(config)) == tree_paths(params)
    assert all(s == P() for s in tree_leaves(gpt.specs(config)))
    assert gpt.num_params(config) == sum(x.numel() for x in tree_leaves(params))
    assert all(x.dtype == torch.float32 for x in tree_leaves(params))


def test_known_parameter_counts():
    assert gpt.num_params(gpt.Config.gpt2_like()) == 124_439_808
    assert gpt.num_params(gpt.Config.llama_like()) == 6_738_415_616
    benchmark = gpt.Config(vocab_size=8192, num_layers=8, d_model=512, num_heads=8, max_len=256)
    assert gpt.num_params(benchmark) == 33_739_776


@pytest.mark.day(4)
@every_config
def test_deferred_init_is_eager_init_bit_for_bit(config):
    eager = gpt.init(config, key(3))
    with deferred():
        lazy = gpt.init(config, key(3))
    for a, b in zip(tree_leaves(eager), tree_leaves(lazy), strict=True):
        assert isinstance(b, Draw) and a.shape == b.shape
        assert torch.equal(a, b.full())
        half = (slice(a.shape[0] // 2, None),)
        assert torch.equal(a[half], draw_block(b, half))


def test_init_scales():
    config = gpt.Config(vocab_size=500, num_layers=8, d_model=128, num_heads=4)
    params = gpt.init(config, key(0))
    block = params["blocks"][3]
    for name in ("wq", "wk", "wv", "w_up"):
        assert abs(block[name].std().item() - 0.02) < 0.001
    for name in ("wo", "w_down"):
        assert abs(block[name].std().item() - 0.005) < 0.0003
    assert (block["norm1_w"] == 1).all() and not block["bq"].any()
    assert not torch.equal(params["blocks"][0]["wq"], params["blocks"][1]["wq"])
    assert torch.equal(gpt.init(config, key(0))["embed"], params["embed"])


@every_config
def test_logits_do_not_see_the_future(config):
    params, tokens = params_of(config), tokens_of(config)
    cut = config.max_len // 2
    other = tokens.clone()
    other[:, cut:] = (other[:, cut:] + 1) % config.vocab_size
    a, b = gpt.apply(config, params, tokens), gpt.apply(config, params, other)
    torch.testing.assert_close(a[:, :cut], b[:, :cut], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(a[:, cut:], b[:, cut:])


@every_config
def test_loss_at_init_is_near_log_vocab(config):
    batch = {"tokens": tokens_of(config, B=8, T=config.max_len + 1)}
    loss = gpt.loss(config, gpt.init(config, key(0)), batch)
    assert abs(loss.item() - math.log(config.vocab_size)) < 0.1


@pytest.mark.day("no_bias", "odd")
@every_config
def test_gradients_equal_finite_differences(config):
    params = tree_map(lambda x: x.requires_grad_(), params_of(config, noise=0.1))
    batch = {"tokens": tokens_of(config, T=5)}
    leaves = tree_leaves(params)
    grads = torch.autograd.grad(gpt.loss(config, params, batch), leaves)
    step = 1e-5
    for path, leaf, grad in zip(tree_paths(params), leaves, grads, strict=True):
        assert grad.any(), path
        at = int(grad.abs().argmax())
        flat = leaf.detach().view(-1)
        flat[at] += step
        up = gpt.loss(config, params, batch).item()
        flat[at] -= 2 * step
        down = gpt.loss(config, params, batch).item()
        flat[at] += step
        numeric = (up - down) / (2 * step)
        assert numeric == pytest.approx(grad.flatten()[at].item(), rel=1e-5, abs=1e-8), path


def test_tied_embedding_sums_both_gradients():
    tied, untied = CONFIGS["gpt2_tied"], CONFIGS["gpt2"]
    params = params_of(tied)
    batch = {"tokens": tokens_of(tied, T=7)}
    embed, head = (params["embed"].clone().requires_grad_() for _ in range(2))
    pair = torch.autograd.grad(gpt.loss(untied, params | {"embed": embed, "head": head}, batch), (embed, head))
    (both,) = torch.autograd.grad(gpt.loss(tied, params | {"embed": embed}, batch), embed)
    torch.testing.assert_close(both, pair[0] + pair[1])


@pytest.mark.nightly
def test_tiny_model_overfits():
    config = CONFIGS["llama_gqa"]
    params = tree_map(lambda x: x.requires_grad_(), gpt.init(config, key(0)))
    opt = torch.optim.Adam(tree_leaves(params), lr=1e-2)
    batch = {"tokens": tokens_of(config, T=9)}
    for _ in range(60):
        opt.zero_grad()
        gpt.loss(config, params, batch).backward()
        opt.step()
    assert gpt.loss(config, params, batch).item() < 0.1
    out = gpt.generate(config, tree_map(torch.detach, params), batch["tokens"][:, :1], 8, key(0), temperature=0.0)
    assert torch.equal(out, batch["tokens"])


@pytest.mark.nightly
def test_generate_shape_determinism_and_cropping():
    config = CONFIGS["gpt2"]
    params, prompt = params_of(config, torch.float32), tokens_of(config, T=3)
    out = gpt.generate(config, params, prompt, 20, key(0))
    assert out.shape == (2, 23) and torch.equal(out[:, :3], prompt)
    assert torch.equal(out, gpt.generate(config, params, prompt, 20, key(0)))
    assert not torch.equal(out, gpt.generate(config, params, prompt, 20, key(1)))
    assert torch.equal(gpt.generate(config, params, prompt, 0, key(0)), prompt)
    with pytest.raises(ValueError, match="prompt of shape"):
        gpt.generate(config, params, prompt[:, :0], 1, key(0))


def test_generate_samples_the_softmax():
    config = gpt.Config(vocab_size=4, num_layers=1, d_model=8, num_heads=1, max_len=4)
    params = params_of(config, torch.float32, noise=0.5)
    prompt = torch.zeros(20_000, 1, dtype=torch.int64)
    want = (gpt.apply(config, params, prompt[:1])[0, 0] / 0.7).softmax(-1)
    drawn = gpt.generate(config, params, prompt, 1, key(0), temperature=0.7)[:, 1]
    torch.testing.assert_close(drawn.bincount(minlength=4) / 20_000, want, rtol=0, atol=0.02)


@pytest.mark.day("dropout")
@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
def test_dropout_belongs_to_samples(name):
    config = dataclasses.replace(gpt.Config(**TINY), **{name: 0.2})
    params, tokens, index_B = params_of(config), tokens_of(config, B=4), torch.arange(4) + 10
    whole = gpt.apply(config, params, tokens, key=key(0), index_B=index_B)
    half = gpt.apply(config, params, tokens[2:], key=key(0), index_B=index_B[2:])
    torch.testing.assert_close(whole[2:], half)
    quiet = gpt.apply(config, params, tokens)
    assert not torch.allclose(whole, quiet)
    assert not torch.allclose(whole, gpt.apply(config, params, tokens, key=key(1), index_B=index_B))
    torch.testing.assert_close(quiet, gpt.apply(CONFIGS["gpt2"], params, tokens))
    batch = {"tokens": tokens, "index": index_B}
    assert gpt.loss(config, params, batch, split(key(0))[0]).item() != gpt.loss(config, params, batch).item()
    with pytest.raises(ValueError, match=rf"{name} 0\.2 needs"):
        gpt.loss(config, params, {"tokens": tokens}, key(0))


def test_wrap_meets_each_block_once_and_keeps_the_bits():
    config = gpt.Config(**TINY, dropout=0.2, attention_dropout=0.2)
    params = tree_map(lambda x: x.requires_grad_(), params_of(config))
    batch = {"tokens": tokens_of(config), "index": torch.arange(2)}
    calls = []

    def remat(inner):
        def wrapped(*args):
            calls.append(1)
            return checkpoint(inner, *args, use_reentrant=False)

        return wrapped

    plain, rematted = gpt.loss(config, params, batch, key(0)), gpt.loss(config, params, batch, key(0), wrap=remat)
    assert torch.equal(plain, rematted) and len(calls) == config.num_layers
    for a, b in zip(*(torch.autograd.grad(x, tree_leaves(params)) for x in (plain, rematted)), strict=True):
        assert torch.equal(a, b)


def test_each_leaf_is_read_once_in_its_block():
    config = CONFIGS["llama_gqa"]
    params, reads = params_of(config), []

    class Counted(dict):
        def __getitem__(self, name):
            reads.append(name)
            return super().__getitem__(name)

    blocks = [Counted(b) for b in params["blocks"]]
    gpt.apply(config, params | {"blocks": blocks}, tokens_of(config))
    assert sorted(reads) == sorted(list(params["blocks"][0]) * config.num_layers)


def test_config_names_every_bad_field_with_its_value():
    with pytest.raises(ValueError, match=r"num_heads=3 does not divide d_model=8[\s\S]*num_kv_heads=2 does not divide"):
        gpt.Config(vocab_size=8, num_layers=1, d_model=8, num_heads=3, num_kv_heads=2)
    with pytest.raises(ValueError, match=r"num_layers=0 must[\s\S]*max_len=-1 must"):
        gpt.Config(vocab_size=8, num_layers=0, d_model=8, num_heads=2, max_len=-1)
    misspelt = gpt.Config(vocab_size=8, num_layers=1, d_model=8, num_heads=2)
    object.__setattr__(misspelt, "norm", "rmsnorm")  # past the type checks, as a caller without them would
    with pytest.raises(ValueError, match=r"norm='rmsnorm' is not one of .* Did you mean 'rms'"):
        misspelt.__post_init__()
    with pytest.raises(ValueError, match=r"dropout=1\.0"):
        gpt.Config(vocab_size=8, num_layers=1, d_model=8, num_heads=2, dropout=1.0)
    with pytest.raises(ValueError, match="d_model=6 / num_heads=2 is odd"):
        gpt.Config(vocab_size=8, num_layers=1, d_model=6, num_heads=2, position="rope")
    config = CONFIGS["gpt2"]
    with pytest.raises(ValueError, match=r"17 tokens for Config\(max_len=16\)"):
        gpt.apply(config, params_of(config), tokens_of(config, T=17))


@pytest.mark.day("gpt2_tied", "odd")
@every_config
def test_stacked_blocks_are_the_same_model(config: gpt.Config) -> None:
    stacked = dataclasses.replace(config, stacked=True)
    plain, params = gpt.init(config, key(3)), gpt.init(stacked, key(3))
    with deferred():
        drawn = gpt.init(stacked, key(3))
    for name, x in params["blocks"].items():
        assert torch.equal(x, torch.stack([p[name] for p in plain["blocks"]]))
        assert torch.equal(draw_block(drawn["blocks"][name], (slice(0, 1),)), x[:1])
    assert params.keys() == plain.keys() and gpt.num_params(stacked) == gpt.num_params(config)
    tokens, rate = torch.randint(config.vocab_size, (2, config.max_len)), {"dropout": 0.5}
    drops: dict[str, Any] = {"key": key(1), "index_B": torch.arange(2)}
    for changes, keys in (({}, {}), (rate, drops)):
        one, other = dataclasses.replace(config, **changes), dataclasses.replace(stacked, **changes)
        assert torch.equal(gpt.apply(other, params, tokens, **keys), gpt.apply(one, plain, tokens, **keys))
