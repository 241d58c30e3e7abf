"""The shape of the GPT."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from shardfn.core import did_you_mean, explains_fields, raise_all
from shardfn.nn import AttentionBackend, Dense, Mask, Rope

from ._experts import Experts
from ._latent import Latent
from ._swift import Swift

DENSE = Dense()
_SIZES = (
    "vocab_size",
    "num_layers",
    "d_model",
    "num_heads",
    "num_kv_heads",
    "d_ff",
    "d_head",
    "max_len",
    "loss_tile",
    "chunks",
)
_CHOICES = {
    "norm": ("layer", "rms"),
    "mlp": ("gelu", "gelu_erf", "relu", "swiglu", "geglu"),
    "position": ("learned", "rope", "alibi", None),
    "qk_norm": (None, "head", "joint"),
    "norm_place": ("before", "after", "both"),
    "parallel": (None, "one_norm", "two_norms"),
}
_NUMBERS = ("norm_eps", "rope_base", "softcap", "logits_softcap", "attention_scale", "embedding_scale")


@dataclasses.dataclass(frozen=True)
class Images:
    """Rule of the tokens of images.

    Attributes:
        token: id of the token at each place of an image's features. The token has the logit -1e9, and is never drawn.
        rule: "separate", in which text reads text and images by two softmaxes, and a token of an image reads itself
            (`nn.multimodal_attention`), "code", in which tokens of images also read the text before them, or "causal",
            in which all tokens are read alike, as in LLaVA.

    References:
        Yao et al., DeepSpeed-VisualChat, 2023, https://arxiv.org/abs/2309.14327
    """

    token: int
    rule: Literal["separate", "code", "causal"] = "separate"


class LayerSettings(NamedTuple):
    """Settings that may differ between layers.

    Attributes:
        window: see `Config`.
        rope: rotary positions, or None for a layer without.
    """

    window: int | None
    rope: Rope | None


@explains_fields(exact="batch_invariant={value!r}")
@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of a model.

    Attributes:
        vocab_size: V.
        num_layers: L.
        d_model: D.
        num_heads: H, which divides D, or any number with `d_head`.
        num_kv_heads: G, which divides H. None is H.
        d_ff: F. None is 4 D for gelu, and 8 D / 3 rounded up to a multiple of 64 for swiglu and geglu.
        max_len: longest sequence.
        norm: "layer" or "rms".
        mlp: "gelu", in the form with tanh, "gelu_erf", with the error function, "relu", "swiglu", or "geglu", with gelu
            as the gate.
        position: "learned", "rope" or "alibi". None: no positions, or those of `models.seq2seq`.
        tie_embeddings: whether the output layer is the embedding.
        bias: whether the projections, the gelu MLP and layer norm have biases. RMS norm, swiglu and the output layer
            have no bias. "qkv" is only the biases of queries, keys and values, as in Qwen2.
        dropout: rate, on the embeddings and on both residual branches. Active only where a key is given.
        stacked: whether blocks are one dict of leaves [L, ...] that are scanned over, in place of L dicts. A step of
            many layers is then captured in seconds. Draws and values are the same.
        embedding_norm: whether the embeddings are normalised, as in BLOOM.
        per_head: whether the projections of attention have a dim of heads: wq [H, K, D], wk and wv [G, K, D], wo [D, H,
            K], biases [H, K] and [G, K]. A mesh axis then cuts between heads, also an axis that does not divide their
            number, for example 3 heads on 2 ranks. Draws and values are the same.
        attention: rule by which attention is computed: `nn.Dense()`, `nn.Blockwise()`, `nn.BlockSparse()`, or on ranks
            that each have some tokens `nn.Ulysses(axis, length)` or `nn.Ring(axis, length)`. Values are the same.
        loss_tile: number of tokens whose logits are in memory at a time in the loss. None is all. Values are the same.
        norm_eps: term that norms add to the variance.
        rope_base: base of rotary positions. The longest wave is 2 pi rope_base tokens.
        window: number of tokens that a token attends to, itself among them, as in Mistral. None is all tokens before. A
            tuple has an entry for each layer, as in Gemma 2.
        layout: function from the number of tokens to a further mask, intersected with the other masks. Block-sparse
            attention is `functools.partial(nn.layouts.fixed, block=64)` with `attention=nn.BlockSparse()`. A mask that
            differs between heads has num_heads of them.
        causal: whether tokens attend only to earlier tokens. With False, tokens attend to later tokens, too, as in
            BERT, and a batch has "targets".
        attention_dropout: rate, on the probabilities of attention (`nn.PairDropout`). Active only where a key is given.
        batch_invariant: whether the model is batch-invariant: a token's logits have the same bits next to any other
            tokens, on any number of threads, and on the ranks of tensor parallelism that `chunks` allows. Parameters
            are float32, or all float64, which is slow, for tests and small models. Gradients are torch's.
        experts: rule of the layers whose feed-forward part is a mixture of experts, with `mlp` as each expert. None:
            all are dense.
        chunks: number of chunks of a linear layer's inputs (`nn.BatchInvariantWeight`), with `batch_invariant`: a power
            of two for 1, 2, 4, .. ranks of tensor parallelism, 24 for 1, 3 or 6. Results depend on it.
        d_head: K. None is D / H.
        rope: rotary positions of all layers (`nn.Rope`), in place of `rope_base`: partial, or stretched to longer
            sequences. A tuple has an entry for each layer, with None for a layer without positions, as in SmolLM3.
        qk_norm: RMS norm of queries and keys before their rotation: "head", of each head, as in Qwen3, or "joint", of
            all heads of a token together, as in OLMo 2. None: no norm.
        norm_place: place of a block's norms: "before" attention and MLP, "after" both, as in OLMo 2, or "both", as in
            Gemma 2. Norms after a part come before its sum with the residual stream.
        norm_plus_one: whether norms multiply by 1 + weight, as in Gemma.
        softcap: bound c of c tanh(score / c), of the scores of attention, as in Gemma 2. None: no bound.
        logits_softcap: bound of the logits. None: no bound.
        attention_scale: factor of q k. None is 1 / sqrt(K).
        embedding_scale: factor of the embeddings, such as sqrt(D) in Gemma. None is 1.
        parallel: whether attention and MLP both read the block's input, and add to it: "one_norm", shared by both, as
            in Phi, or "two_norms", as in GPT-NeoX. None: the MLP reads the sum after attention.
        sinks: whether each query head has a learnt attention sink, as in gpt-oss.
        head_bias: whether the output layer has a bias, as in Phi.
        latent: sizes of latent attention (MLA), as in DeepSeek-V3, in place of `d_head` and `num_kv_heads`.
        swift: rule by which later layers take keys and values from one state (SwiftKV). None: each from its own input.
        images: rule of image tokens, whose embeddings are the batch's "image_features". None: text only.

    Raises:
        ValueError: lists every field that is out of range or at odds with another field.

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
    mlp: Literal["gelu", "gelu_erf", "relu", "swiglu", "geglu"] = "gelu"
    position: Literal["learned", "rope", "alibi"] | None = "learned"
    tie_embeddings: bool = False
    bias: bool | Literal["qkv"] = True
    dropout: float = 0.0
    stacked: bool = False
    embedding_norm: bool = False
    per_head: bool = False
    attention: AttentionBackend = DENSE
    loss_tile: int | None = None
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    window: int | tuple[int | None, ...] | None = None
    layout: Callable[[int], Mask] | None = None
    causal: bool = True
    attention_dropout: float = 0.0
    batch_invariant: bool = False
    chunks: int = 8
    experts: Experts | None = None
    d_head: int | None = None
    rope: Rope | tuple[Rope | None, ...] | None = None
    qk_norm: Literal["head", "joint"] | None = None
    norm_place: Literal["before", "after", "both"] = "before"
    norm_plus_one: bool = False
    softcap: float | None = None
    logits_softcap: float | None = None
    attention_scale: float | None = None
    embedding_scale: float | None = None
    parallel: Literal["one_norm", "two_norms"] | None = None
    sinks: bool = False
    head_bias: bool = False
    latent: Latent | None = None
    swift: Swift | None = None
    images: Images | None = None

    def __post_init__(self) -> None:
        raise_all(ValueError, "Config:", _list_problems(self))

    @property
    def head_dim(self) -> int:
        """Returns K, the dims of a head's query."""
        if self.latent is not None:
            return self.latent.head_dim
        return self.d_head or self.d_model // self.num_heads

    @property
    def rotary_dim(self) -> int:
        """Returns the dims of a head that rotary positions are about."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def num_cache_layers(self) -> int:
        """Returns the layers of a KV cache: L, or fewer where layers share keys and values."""
        return self.num_layers if self.swift is None else 1 + self.swift.cache_layer(self.num_layers - 1)

    @property
    def kv_heads(self) -> int:
        """Returns G."""
        return self.num_kv_heads or self.num_heads

    @property
    def ff_dim(self) -> int:
        """Returns F."""
        return self.d_ff or (-(-8 * self.d_model // 192) * 64 if self.is_gated else 4 * self.d_model)

    @property
    def shared_ff_dim(self) -> int:
        """Returns F of the dense MLP next to experts."""
        return (self.experts and self.experts.shared_d_ff) or self.ff_dim

    @property
    def is_gated(self) -> bool:
        """Returns whether the MLP has a gate."""
        return self.mlp in ("swiglu", "geglu")

    @functools.cached_property
    def layer_settings(self) -> tuple[LayerSettings, ...]:
        """Returns the settings of each layer that may differ between layers.

        Example:
            >>> sizes = {"vocab_size": 64, "num_layers": 2, "d_model": 32, "num_heads": 4}
            >>> [kind.window for kind in Config(**sizes, window=(8, None)).layer_settings]
            [8, None]
        """
        window, rope = self.window, self.rope if self.rope is not None else Rope(self.rope_base)
        windows = window if isinstance(window, tuple) else (window,) * self.num_layers
        ropes = rope if isinstance(rope, tuple) else (rope if self.position == "rope" else None,) * self.num_layers
        return tuple(map(LayerSettings, windows, ropes))

    @property
    def layers_a_block(self) -> int:
        """Returns the layers of a stacked block.

        K with experts in every k-th layer, or where windows or rotary positions repeat after K layers, so that blocks
        are alike.
        """
        if not self.stacked:
            return 1
        every, kinds = self.experts.every if self.experts else 1, self.layer_settings
        periods = [k for k in range(every, len(kinds) + 1, every) if len(kinds) % k == 0]
        return next(k for k in periods if kinds == kinds[:k] * (len(kinds) // k))

    @property
    def expert_layers(self) -> list[int]:
        """Returns the layers that have experts."""
        return [i for i in range(self.num_layers) if self.experts and self.experts.in_layer(i)]

    @property
    def num_experts(self) -> list[int]:
        """Returns the number of experts of each layer with experts."""
        experts = self.experts
        return [] if experts is None else [experts.num_of(i) for i in range(len(self.expert_layers))]

    @classmethod
    def gpt2_like(cls, **changes: Any) -> "Config":
        """Returns GPT-2 small (124M parameters) with `changes`.

        Example:
            >>> Config.gpt2_like(num_layers=2).num_layers
            2
        """
        base: dict[str, Any] = {"vocab_size": 50257, "num_layers": 12, "d_model": 768, "num_heads": 12}
        style: dict[str, Any] = {"tie_embeddings": True}
        return cls(**{**base, **style, **changes})

    @classmethod
    def llama_like(cls, **changes: Any) -> "Config":
        """Returns Llama 7B with `changes`: RMS norm, swiglu, rotary positions, no biases.

        Example:
            >>> Config.llama_like(num_layers=2, d_model=64, num_heads=4, d_ff=None).ff_dim
            192
        """
        base: dict[str, Any] = {"vocab_size": 32000, "num_layers": 32, "d_model": 4096, "num_heads": 32}
        style: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False}
        return cls(**{**base, **style, "d_ff": 11008, "max_len": 2048, **changes})

    @classmethod
    def bloom_like(cls, **changes: Any) -> "Config":
        """Returns BLOOM 176B with `changes`: ALiBi, and a norm after the embedding.

        Example:
            >>> Config.bloom_like(num_layers=2, d_model=24, num_heads=3).position
            'alibi'
        """
        base: dict[str, Any] = {"vocab_size": 250880, "num_layers": 70, "d_model": 14336, "num_heads": 112}
        style: dict[str, Any] = {"position": "alibi", "embedding_norm": True, "tie_embeddings": True}
        return cls(**{**base, **style, "max_len": 2048, **changes})


def _list_problems(c: Config) -> list[str]:
    out = []
    for name in _SIZES:
        value = getattr(c, name)
        if value is not None and value < 1:
            out.append(f"{name}={value} must be at least 1.")
    for name, choices in _CHOICES.items():
        if getattr(c, name) not in choices:
            hint = did_you_mean(str(getattr(c, name)), choices)
            out.append(f"{name}={getattr(c, name)!r} is not one of {choices}.{hint}")
    if c.bias not in (True, False, "qkv"):
        out.append(f"bias={c.bias!r} is not one of (True, False, 'qkv').")
    for name in _NUMBERS:
        if (value := getattr(c, name)) is not None and not value > 0:
            out.append(f"{name}={value} must be above 0.")
    for name in ("window", "rope"):
        if isinstance(value := getattr(c, name), tuple) and len(value) != c.num_layers:
            out.append(f"{name} has {len(value)} entries, and num_layers={c.num_layers}. Give one for each layer.")
    windows = c.window if isinstance(c.window, tuple) else (c.window,)
    if any(w is not None and w < 1 for w in windows):
        out.append(f"window={c.window} must be at least 1.")
    for name in ("dropout", "attention_dropout"):
        if not 0 <= getattr(c, name) < 1:
            out.append(f"{name}={getattr(c, name)} must lie in [0, 1).")
    if out:
        return out
    if c.d_head is None and c.latent is None and c.d_model % c.num_heads:
        out.append(f"num_heads={c.num_heads} does not divide d_model={c.d_model}. Give d_head.")
    if c.num_heads % c.kv_heads:
        out.append(f"num_kv_heads={c.kv_heads} does not divide num_heads={c.num_heads}.")
    if c.position == "rope" and c.rope is None and c.rotary_dim % 2:
        out.append(f"position='rope' needs an even head dim, but d_model={c.d_model} / num_heads={c.num_heads} is odd.")
    out += _find_rope_problems(c) + _find_shape_problems(c) + _find_swift_problems(c) + _find_latent_problems(c)
    for name, asked in (("position='alibi'", c.position == "alibi"), (f"window={c.window}", c.window is not None)):
        if asked and not c.causal:
            out.append(f"{name} looks back only, but causal=False. Leave one of them out.")
    out += _find_image_problems(c, c.images) if c.images else []
    out += _problems_of_experts(c, c.experts) if c.experts else []
    return out + (_find_batch_invariant_problems(c) if c.batch_invariant else [])


def _find_rope_problems(c: Config) -> list[str]:
    if c.rope is None:
        return []
    if c.position != "rope" or c.rope_base != 10000.0:
        return [
            f"rope={c.rope} needs position='rope', and is in place of rope_base. Got position={c.position!r},"
            f" rope_base={c.rope_base}."
        ]
    ropes = dict.fromkeys(r for r in (c.rope if isinstance(c.rope, tuple) else (c.rope,)) if r is not None)
    wrong = [r for r in ropes if r.num_dims(c.rotary_dim) < 2 or r.num_dims(c.rotary_dim) % 2]
    return [
        f"{r} rotates {r.num_dims(c.rotary_dim)} of {c.rotary_dim} dims. The number must be even and not 0."
        for r in wrong
    ]


def _find_shape_problems(c: Config) -> list[str]:
    """Returns settings that do not go together."""
    norms = {"qk_norm": c.qk_norm is not None, "norm_plus_one": c.norm_plus_one}
    out = [f"{name}={getattr(c, name)!r} needs norm='rms'." for name, on in norms.items() if on and c.norm != "rms"]
    if c.parallel is not None and (c.norm_place != "before" or c.experts is not None):
        out.append(f"parallel={c.parallel!r} needs norm_place='before' and no experts.")
    if c.loss_tile is not None and (c.logits_softcap is not None or c.head_bias or c.images is not None):
        out.append(f"loss_tile={c.loss_tile} knows no logits_softcap, head_bias and images. Take loss_tile=None.")
    if c.experts is not None and c.mlp not in ("gelu", "swiglu"):
        out.append(f"experts have mlp='gelu' or 'swiglu', got mlp={c.mlp!r}.")
    if c.experts is not None and (c.experts.gate or c.experts.biases) and c.mlp != "swiglu":
        out.append(f"experts with gate= or biases=True need mlp='swiglu', got mlp={c.mlp!r}.")
    return out


def _find_latent_problems(c: Config) -> list[str]:
    if c.latent is None:
        return []
    asked = {f"num_kv_heads={c.num_kv_heads}": c.num_kv_heads, f"d_head={c.d_head}": c.d_head, "sinks=True": c.sinks}
    asked |= {f"bias={c.bias!r}": c.bias, f"qk_norm={c.qk_norm!r}": c.qk_norm, "swift": c.swift, "images": c.images}
    asked |= {f"position={c.position!r}": c.position != "rope", f"norm={c.norm!r}": c.norm != "rms"}
    ropes = [kind.rope for kind in c.layer_settings]
    asked["layers without rotary positions"] = any(r is None for r in ropes)
    asked["norm_plus_one=True"] = c.norm_plus_one
    asked[f"mscale={c.latent.mscale} and rope= of single layers"] = c.latent.mscale and len(set(ropes)) > 1
    asked["a part of the rotated dims (Rope.fraction)"] = any(r is not None and r.fraction != 1 for r in ropes)
    return [f"latent does not know {name}. Leave one of them out." for name, found in asked.items() if found]


def _find_swift_problems(c: Config) -> list[str]:
    if c.swift is None:
        return []
    asked = {"stacked=True": c.stacked, "experts": c.experts is not None, f"qk_norm={c.qk_norm!r}": c.qk_norm}
    asked |= {"rope= of single layers": isinstance(c.rope, tuple), "causal=False": not c.causal}
    out = [f"swift does not know {name}. Leave one of them out." for name, found in asked.items() if found]
    return out + c.swift.list_problems(c.num_layers)


def _find_image_problems(c: Config, images: Images) -> list[str]:
    out = []
    if images.rule not in ("separate", "code", "causal"):
        hint = did_you_mean(str(images.rule), ("separate", "code", "causal"))
        out.append(f"images.rule must be 'separate', 'code' or 'causal', got {images.rule!r}.{hint}")
    if not 0 <= images.token < c.vocab_size:
        out.append(f"images.token must be from 0 to {c.vocab_size - 1}, a row of the embedding, got {images.token}.")
    if images.rule == "causal":
        return out
    asked = {"causal=False": not c.causal, "sinks=True": c.sinks}
    asked[f"attention_dropout={c.attention_dropout}"] = c.attention_dropout > 0
    return out + [f"{images} does not know {name}. Leave it out." for name, found in asked.items() if found]


def _problems_of_experts(c: Config, experts: Experts) -> list[str]:
    if experts.layers is not None and max(experts.layers) >= c.num_layers:
        return [f"{experts} names layers that the {c.num_layers} layers do not have. They are 0 to {c.num_layers - 1}."]
    if c.stacked and (experts.layers is not None or experts.first or c.num_layers % experts.every):
        return [
            f"stacked=True takes blocks of {experts.every} layers that are alike, and {experts} in {c.num_layers}"
            " layers has others. Use first=0, no layers=, and a multiple of `every`, or stacked=False."
        ]
    num = experts.num
    if not c.expert_layers:
        return [f"{experts} has no layer of the {c.num_layers}. Lower `every` or `first`."]
    if isinstance(num, tuple) and len(num) != len(c.expert_layers):
        return [
            f"num={num} must have a number for each layer with experts, got {len(num)} numbers for"
            f" {len(c.expert_layers)} layers {c.expert_layers}. Change num, or `every` and `first`."
        ]
    if isinstance(num, tuple) and c.stacked:
        return [
            f"stacked=True needs one number of experts for all layers, got num={num}. Use stacked=False, or in a"
            " pipeline a list of functions in sf.pipeline."
        ]
    return []


def _find_batch_invariant_problems(c: Config) -> list[str]:
    asked = {
        f"attention={c.attention}": not isinstance(c.attention, Dense),
        "causal=False": not c.causal,
        f"layout={c.layout}": c.layout is not None,
        f"attention_dropout={c.attention_dropout}": c.attention_dropout > 0,
        f"loss_tile={c.loss_tile}": c.loss_tile is not None,
        f"mlp={c.mlp!r}": c.mlp == "gelu_erf",
    }
    out = [
        f"batch_invariant=True does not know {name}. Leave one of them out." for name, found in asked.items() if found
    ]
    return out + [
        f"batch_invariant=True with experts: {reason}"
        for reason in (c.experts.list_variant_parts() if c.experts else ())
    ]
