"""A decoder-only transformer: GPT-2 and Llama are two settings of one `Config`.

B batch, T tokens, D model, H heads, G key and value heads, K head dim, F ffn, V vocabulary.

Radford et al., Language Models are Unsupervised Multitask Learners, 2019
Touvron et al., LLaMA: Open and Efficient Foundation Language Models, 2023, https://arxiv.org/abs/2302.13971
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn import nn
from shardfn.core import (
    P,
    PyTree,
    Sharding,
    did_you_mean,
    fold_in,
    full,
    normal,
    raise_all,
    split,
    stack_draws,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    uniform,
)

Params = Any  # a dict as `init` makes it; optree types what it returns as its own PyTree
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

_CHOICES = {"norm": ("layer", "rms"), "mlp": ("gelu", "swiglu"), "position": ("learned", "rope")}


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a model.

    Attributes:
        vocab_size: V.
        num_layers: L.
        d_model: D.
        num_heads: H, which divides D.
        num_kv_heads: G, which divides H; None is H.
        d_ff: F; None is 4 D for gelu, and 8 D / 3 rounded up to a multiple of 64 for swiglu.
        max_len: the longest sequence.
        norm: "layer" or "rms".
        mlp: "gelu" or "swiglu".
        position: "learned" or "rope".
        tie_embeddings: the output layer is the embedding.
        bias: the projections, the gelu MLP and layer norm have biases. RMS norm, swiglu and the output layer have none.
        dropout: rate, on the embeddings and on both residual branches; active only where a key is given.
        stacked: blocks are one dict of leaves [L, ...] that are scanned over, in place of L dicts; a step of many
            layers is then captured in seconds. Draws and values are the same.

    Raises:
        ValueError: lists every field that is out of range or at odds with another.

    Example:
        >>> Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4).head_dim
        8
    """

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int | None = None
    d_ff: int | None = None
    max_len: int = 1024
    norm: Literal["layer", "rms"] = "layer"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    position: Literal["learned", "rope"] = "learned"
    tie_embeddings: bool = False
    bias: bool = True
    dropout: float = 0.0
    stacked: bool = False

    def __post_init__(self) -> None:
        raise_all(ValueError, "Config:", _problems(self))

    @property
    def head_dim(self) -> int:
        """K = D / H."""
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.num_kv_heads or self.num_heads

    @property
    def ff_dim(self) -> int:
        """F."""
        wide = 4 * self.d_model if self.mlp == "gelu" else -(-8 * self.d_model // 192) * 64
        return self.d_ff or wide

    @classmethod
    def gpt2_like(cls, **changes: Any) -> "Config":
        """GPT-2 small (124M parameters) with `changes`.

        Example:
            >>> Config.gpt2_like(num_layers=2).num_layers
            2
        """
        base: dict[str, Any] = {"vocab_size": 50257, "num_layers": 12, "d_model": 768, "num_heads": 12}
        style: dict[str, Any] = {"tie_embeddings": True}
        return cls(**{**base, **style, **changes})

    @classmethod
    def llama_like(cls, **changes: Any) -> "Config":
        """Llama 7B with `changes`: RMS norm, swiglu, rotary positions, no biases.

        Example:
            >>> Config.llama_like(num_layers=2, d_model=64, num_heads=4, d_ff=None).ff_dim
            192
        """
        base: dict[str, Any] = {"vocab_size": 32000, "num_layers": 32, "d_model": 4096, "num_heads": 32}
        style: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False}
        return cls(**{**base, **style, "d_ff": 11008, "max_len": 2048, **changes})


def init(config: Config, key: Int64[Tensor, "2"]) -> Params:
    """Fresh parameters: weights normal(0, 0.02), those that write to the residual stream by 1 / sqrt(2 L) smaller.

    Drawn by `shardfn.core`'s functions, so inside `deferred()` the leaves are deferred.

    Args:
        config: the shape.
        key: the key; leaf i is drawn with `fold_in(key, i)`.

    Returns:
        float32: {"embed", "position"?, "blocks": [L dicts], "norm_w", "norm_b"?, "head"?}; weights are [out, in].
        With `stacked`, "blocks" is one dict of the same leaves stacked, [L, ...].

    Example:
        >>> from shardfn.core import key
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> init(config, key(0))["blocks"][0]["wq"].shape
        torch.Size([32, 32])
    """
    leaves, treedef = tree_flatten(_leaves(config))
    keys = split(key, len(leaves))
    params = tree_unflatten(treedef, [leaf.draw(k) for leaf, k in zip(leaves, keys, strict=True)])
    return _stack_blocks(params, stack_draws) if config.stacked else params


def specs(config: Config) -> PyTree:
    """The compute layout: `P()`, whole, for every leaf; of stacked blocks, each layer.

    Example:
        >>> specs(Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4))["embed"]
        P()
    """
    tree = tree_map(lambda _: P(), _leaves(config))
    return _stack_blocks(tree, lambda _: Sharding(P(), stacked=True)) if config.stacked else tree


def num_params(config: Config) -> int:
    """The number of parameters.

    Example:
        >>> num_params(Config.gpt2_like())
        124439808
    """
    return sum(math.prod(leaf.shape) for leaf in tree_leaves(_leaves(config)))


def apply(
    config: Config,
    params: Params,
    tokens_BT: Int64[Tensor, "b t"],
    *,
    key: Int64[Tensor, "2"] | None = None,
    index_B: Int64[Tensor, " b"] | None = None,
    wrap: Wrap = lambda inner: inner,
) -> Float[Tensor, "b t v"]:
    """Logits of the next token at each position.

    x = embed[tokens] (+ position); for each block x += attn(norm(x)), x += mlp(norm(x)); logits = norm(x) head^T.

    Args:
        config: the shape.
        params: as from `init`.
        tokens_BT: T <= max_len.
        key: turns dropout on.
        index_B: global numbers of the samples; needed where dropout is on.
        wrap: applied to the block function, as in `wrap=remat`.

    Raises:
        ValueError: too long a sequence, or dropout without `index_B`.

    Example:
        >>> import shardfn.core as core
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> apply(config, init(config, core.key(0)), torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5, 64])
    """
    x_BTD = _hidden(config, params, tokens_BT, key, index_B, wrap)
    return nn.linear(x_BTD, params["embed" if config.tie_embeddings else "head"])


def loss(
    config: Config,
    params: Params,
    batch: dict[str, Any],
    key: Int64[Tensor, "2"] | None = None,
    *,
    wrap: Wrap = lambda inner: inner,
) -> Float[Tensor, ""]:
    """Mean cross entropy of each token given those before it.

    Args:
        config: the shape.
        params: as from `init`.
        batch: {"tokens": int64 [B, T + 1]}, and where dropout is on "index": int64 [B], global sample numbers.
        key: turns dropout on.
        wrap: applied to the block function.

    Example:
        >>> import shardfn.core as core
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> batch = {"tokens": torch.zeros(2, 9, dtype=torch.int64)}
        >>> loss(config, init(config, core.key(0)), batch).shape
        torch.Size([])
    """
    tokens = batch["tokens"]
    logits_BTV = apply(config, params, tokens[:, :-1], key=key, index_B=batch.get("index"), wrap=wrap)
    return nn.cross_entropy(logits_BTV, tokens[:, 1:])


@torch.no_grad()
def generate(
    config: Config,
    params: Params,
    prompt_BT: Int64[Tensor, "b t"],
    num_tokens: int,
    key: Int64[Tensor, "2"],
    temperature: float = 1.0,
) -> Int64[Tensor, "b s"]:
    """Samples a continuation: argmax(logits / temperature + Gumbel noise), token by token.

    Every step runs the model on the last `max_len` tokens. The noise is a function of (key, step), so all ranks that
    hold the same prompt sample the same.

    Args:
        config: the shape.
        params: as from `init`.
        prompt_BT: at least one token.
        num_tokens: how many to append.
        key: the key of the noise.
        temperature: 0 takes the likeliest token.

    Returns:
        The prompt and its continuation, [B, T + num_tokens].

    Raises:
        ValueError: an empty prompt or a negative temperature.

    Example:
        >>> import shardfn.core as core
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> params, prompt_BT = init(config, core.key(0)), torch.zeros(2, 1, dtype=torch.int64)
        >>> generate(config, params, prompt_BT, 3, core.key(1)).shape
        torch.Size([2, 4])
    """
    if prompt_BT.shape[1] == 0 or temperature < 0:
        raise ValueError(
            f"generate: prompt of shape {tuple(prompt_BT.shape)}, temperature {temperature}: give at least one token"
            " (a start token, say) and a temperature of 0 or more."
        )
    tokens_BT = prompt_BT
    for step in range(num_tokens):
        x_BTD = _hidden(config, params, tokens_BT[:, -config.max_len :])
        logits_BV = nn.linear(x_BTD[:, -1], params["embed" if config.tie_embeddings else "head"])
        next_B = _sample(logits_BV.float(), fold_in(key, step), temperature)
        tokens_BT = torch.cat((tokens_BT, next_B[:, None]), dim=1)
    return tokens_BT


# The forward pass.


def _hidden(
    config: Config,
    params: Params,
    tokens_BT: Tensor,
    key: Tensor | None = None,
    index_B: Tensor | None = None,
    wrap: Wrap = lambda inner: inner,
) -> Tensor:
    T = tokens_BT.shape[1]
    if T > config.max_len:
        raise ValueError(f"a sequence of {T} tokens for Config(max_len={config.max_len}); cut it or raise max_len.")
    x_BTD = nn.embedding(tokens_BT, params["embed"])
    table = None
    if config.position == "rope":
        positions_T = torch.arange(T, device=tokens_BT.device)
        table = nn.rope_table(positions_T, config.head_dim, dtype=x_BTD.dtype)
    else:
        x_BTD = x_BTD + params["position"][:T]
    keys = [None] * (config.num_layers + 1) if key is None else split(key, config.num_layers + 1).unbind()
    x_BTD = _dropout(config, keys[-1], x_BTD, index_B)
    block = wrap(functools.partial(_block, config))
    if config.stacked:
        xs = params["blocks"], None if key is None else split(key, config.num_layers + 1)[:-1]
        x_BTD, _ = nn.scan(lambda x_BTD, x: (block(x[0], x_BTD, table, x[1], index_B), None), x_BTD, xs)
    else:
        for p, k in zip(params["blocks"], keys[:-1], strict=True):
            x_BTD = block(p, x_BTD, table, k, index_B)
    return _norm(config, x_BTD, params["norm_w"], params.get("norm_b"))


def _block(config: Config, p: Params, x_BTD: Tensor, table: Any, key: Tensor | None, index_B: Tensor | None) -> Tensor:
    k1, k2 = (None, None) if key is None else split(key).unbind()
    y_BTD = _attention(config, p, _norm(config, x_BTD, p["norm1_w"], p.get("norm1_b")), table)
    x_BTD = x_BTD + _dropout(config, k1, y_BTD, index_B)
    y_BTD = _mlp(config, p, _norm(config, x_BTD, p["norm2_w"], p.get("norm2_b")))
    return x_BTD + _dropout(config, k2, y_BTD, index_B)


def _attention(config: Config, p: Params, x_BTD: Tensor, table: Any) -> Tensor:
    q_BTHK, k_BTGK, v_BTGK = (
        nn.linear(x_BTD, p[f"w{n}"], p.get(f"b{n}")).unflatten(-1, (-1, config.head_dim)) for n in "qkv"
    )
    if table is not None:
        q_BTHK, k_BTGK = nn.rope(q_BTHK, *table), nn.rope(k_BTGK, *table)
    return nn.linear(nn.attention(q_BTHK, k_BTGK, v_BTGK).flatten(-2), p["wo"], p.get("bo"))


def _mlp(config: Config, p: Params, x_BTD: Tensor) -> Tensor:
    if config.mlp == "swiglu":
        return nn.swiglu(x_BTD, p["w_gate"], p["w_up"], p["w_down"])
    return nn.mlp(x_BTD, p["w_up"], p["w_down"], p.get("b_up"), p.get("b_down"))


def _norm(config: Config, x_BTD: Tensor, w_D: Tensor, b_D: Tensor | None) -> Tensor:
    return nn.rms_norm(x_BTD, w_D) if config.norm == "rms" else nn.layer_norm(x_BTD, w_D, b_D)


def _dropout(config: Config, key: Tensor | None, x_BTD: Tensor, index_B: Tensor | None) -> Tensor:
    if key is None or config.dropout == 0:
        return x_BTD
    if index_B is None:
        raise ValueError(
            f"dropout {config.dropout} needs the samples' global numbers, or ranks would share masks: pass index_B"
            " (in the batch: 'index'), int64 [B]; on one device torch.arange(B) will do."
        )
    return nn.dropout(key, x_BTD, config.dropout, index_B)


def _sample(logits_BV: Tensor, key: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1)
    tiny = torch.finfo(torch.float32).tiny
    u_BV = uniform(key, logits_BV.shape, minval=tiny, device=logits_BV.device)
    return (logits_BV / temperature - (-u_BV.log()).log()).argmax(-1)


# The parameters: one table from which init, specs and num_params are read.


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """Shape, and mean and standard deviation at the start."""

    shape: tuple[int, ...]
    mean: float = 0.0
    stddev: float = 0.02

    def draw(self, key: Tensor) -> Tensor:
        if self.stddev == 0:
            return full(self.shape, self.mean, device=key.device)
        return normal(key, self.shape, mean=self.mean, stddev=self.stddev)


def _leaves(config: Config) -> PyTree:
    V, D = config.vocab_size, config.d_model
    tree = {"embed": _Leaf((V, D)), "blocks": [_block_leaves(config) for _ in range(config.num_layers)]}
    tree |= _norm_leaves(config, "norm")
    if config.position == "learned":
        tree["position"] = _Leaf((config.max_len, D))
    if not config.tie_embeddings:
        tree["head"] = _Leaf((V, D))
    return tree


def _stack_blocks(params: Params, join: Callable[[Any], Any]) -> Params:
    first, *_ = blocks = params["blocks"]
    return {**params, "blocks": {name: join([p[name] for p in blocks]) for name in first}}


def _block_leaves(config: Config) -> dict[str, _Leaf]:
    D, F, kv_D = config.d_model, config.ff_dim, config.kv_heads * config.head_dim
    residual = 0.02 / math.sqrt(2 * config.num_layers)
    tree = _norm_leaves(config, "norm1") | _norm_leaves(config, "norm2")
    tree |= {"wq": _Leaf((D, D)), "wk": _Leaf((kv_D, D)), "wv": _Leaf((kv_D, D)), "wo": _Leaf((D, D), stddev=residual)}
    tree |= {"w_up": _Leaf((F, D)), "w_down": _Leaf((D, F), stddev=residual)}
    if config.mlp == "swiglu":
        tree["w_gate"] = _Leaf((F, D))
    sizes = {"bq": D, "bk": kv_D, "bv": kv_D, "bo": D} | ({"b_up": F, "b_down": D} if config.mlp == "gelu" else {})
    return tree | ({name: _Leaf((n,), stddev=0.0) for name, n in sizes.items()} if config.bias else {})


def _norm_leaves(config: Config, name: str) -> dict[str, _Leaf]:
    tree = {f"{name}_w": _Leaf((config.d_model,), mean=1.0, stddev=0.0)}
    if config.norm == "layer" and config.bias:
        tree[f"{name}_b"] = _Leaf((config.d_model,), stddev=0.0)
    return tree


def _problems(c: Config) -> list[str]:
    out = []
    for name in ("vocab_size", "num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "max_len"):
        value = getattr(c, name)
        if value is not None and value < 1:
            out.append(f"{name}={value} must be at least 1.")
    for name, choices in _CHOICES.items():
        if getattr(c, name) not in choices:
            hint = did_you_mean(str(getattr(c, name)), choices)
            out.append(f"{name}={getattr(c, name)!r} is none of {choices}.{hint}")
    if not 0 <= c.dropout < 1:
        out.append(f"dropout={c.dropout} must lie in [0, 1).")
    if out:
        return out
    if c.d_model % c.num_heads:
        out.append(f"num_heads={c.num_heads} does not divide d_model={c.d_model}.")
    if c.num_heads % c.kv_heads:
        out.append(f"num_kv_heads={c.kv_heads} does not divide num_heads={c.num_heads}.")
    if c.position == "rope" and c.head_dim % 2:
        out.append(f"position='rope' needs an even head dim, but d_model={c.d_model} / num_heads={c.num_heads} is odd.")
    return out
