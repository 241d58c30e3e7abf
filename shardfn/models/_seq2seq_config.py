"""The shape of an encoder-decoder model, and its parameters: drawn, laid out and counted from a single table.

D model, H heads, N relative buckets, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from shardfn import nn
from shardfn.collectives import axis_size, current_mesh
from shardfn.core import (
    Axes,
    P,
    PyTree,
    Sharding,
    block_slices,
    named_leaves,
    raise_all,
    split,
    stack_draws,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from . import _gpt_leaves as leaves
from ._gpt_config import Config as Half

Params = Any  # a dict from `init`

# Names of the leaves of a decoder's cross attention begin so.
CROSS = "c_"
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of a model: two halves, of transformer layers. The decoder also attends to the result of the encoder.

    Attributes:
        encoder: layers of the encoder, with `causal=False`.
        decoder: layers of the decoder. Each layer has cross attention after its self-attention, of the same sizes.
        buckets: N of T5's relative positions, added to the scores of self-attention in both halves, with
            `position=None` in the halves. None: no relative positions.
        max_distance: distance from which all distances are in the last bucket.
        logits_scale: factor of the states before the output layer, such as 1 / sqrt(D) in T5. None is 1.
        start: first token of the decoder's inputs.
        norm_sums: whether norms come after the sum with the residual stream, as in BART, with `norm_place="before"` in
            the halves. The halves have no last norm then.
        features: numbers of a source's frame, such as 80 bands of a spectrogram. Two convolutions make a state of two
            frames, as in Whisper. None: sources are token ids.

    Raises:
        ValueError: lists every field that is out of range or at odds with another field.

    Example:
        >>> Config.t5_like(vocab_size=64, num_layers=2, d_model=32, num_heads=4).decoder.head_dim
        64

    References:
        Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020,
        https://arxiv.org/abs/1910.10683
        Kim et al., Scalable and Efficient MoE Training for Multitask Multilingual Models, 2021,
        https://arxiv.org/abs/2109.10465 (Z-code M3: experts in both halves)
    """

    encoder: Half
    decoder: Half
    buckets: int | None = None
    max_distance: int = 128
    logits_scale: float | None = None
    start: int = 0
    norm_sums: bool = False
    features: int | None = None

    def __post_init__(self) -> None:
        raise_all(ValueError, "seq2seq.Config:", _list_problems(self))

    @property
    def halves(self) -> dict[str, Half]:
        """Returns both halves by name."""
        return {"encoder": self.encoder, "decoder": self.decoder}

    @classmethod
    def t5_like(
        cls,
        *,
        tied: bool = True,
        encoder: Mapping[str, Any] = _NONE,
        decoder: Mapping[str, Any] = _NONE,
        buckets: int = 32,
        max_distance: int = 128,
        start: int = 0,
        **changes: Any,
    ) -> "Config":
        """Returns T5 small (60M parameters) with changes. `mlp="geglu"` and `tied=False` make flan-T5 of it.

        Args:
            tied: whether the output layer is the embedding, after a factor of 1 / sqrt(D).
            encoder: fields of only the encoder, such as `{"num_layers": 8}`.
            decoder: fields of only the decoder.
            buckets: see `Config`.
            max_distance: see `Config`.
            start: see `Config`.
            **changes: fields of both halves, as of `gpt.Config`.

        Example:
            >>> config = Config.t5_like(mlp="geglu", d_ff=1024, tied=False, decoder={"num_layers": 8})
            >>> config.decoder.num_layers, config.logits_scale
            (8, None)
        """
        sizes: dict[str, Any] = {"vocab_size": 32128, "num_layers": 6, "d_model": 512, "num_heads": 8, "d_head": 64}
        style: dict[str, Any] = {"norm": "rms", "mlp": "relu", "position": None, "bias": False, "norm_eps": 1e-6}
        style |= {"attention_scale": 1.0, "tie_embeddings": tied, "max_len": 512}
        both = {**sizes, "d_ff": 2048, **style, **changes}
        return cls(
            Half(**{**both, "causal": False, **encoder}),
            Half(**{**both, **decoder}),
            buckets=buckets,
            max_distance=max_distance,
            logits_scale=both["d_model"] ** -0.5 if tied else None,
            start=start,
        )


_ALIKE = ("vocab_size", "d_model", "tie_embeddings", "position")


def _list_problems(c: Config) -> list[str]:
    out = [
        f"{name} must be the same in both halves, got {a!r} in the encoder and {b!r} in the decoder."
        for name in _ALIKE
        if (a := getattr(c.encoder, name)) != (b := getattr(c.decoder, name))
    ]
    for name, half in c.halves.items():
        if half.causal != (name == "decoder"):
            out.append(f"{name}.causal must be {not half.causal}, got {half.causal}.")
        out += [f"{name} must have {wanted}, got {got}." for wanted, got in _find_unknown_parts(half)]
    if c.buckets is not None:
        if c.decoder.position is not None:
            out.append(f"buckets={c.buckets} must have position=None in both halves, got {c.decoder.position!r}.")
        try:
            nn.relative_buckets(c.buckets, c.max_distance, causal=True)
        except ValueError as error:
            out.append(str(error))
    if c.logits_scale is not None and not c.logits_scale > 0:
        out.append(f"logits_scale must be above 0, or None, got {c.logits_scale}.")
    if not 0 <= c.start < c.decoder.vocab_size:
        out.append(f"start must be a token, from 0 to {c.decoder.vocab_size - 1}, got {c.start}.")
    if c.features is not None and (c.features < 1 or c.encoder.position != "learned" or c.encoder.embedding_norm):
        out.append(
            f"features must be 1 or more, with position='learned' and embedding_norm=False, got {c.features},"
            f" {c.encoder.position!r} and {c.encoder.embedding_norm}."
        )
    if c.norm_sums and any(x.norm_place != "before" for x in c.halves.values()):
        out.append("norm_sums=True must have norm_place='before' in both halves.")
    return out


def _find_unknown_parts(half: Half) -> list[tuple[str, str]]:
    """Returns the settings that no encoder-decoder has here: the wanted value, and the given value."""
    asked = [
        ("attention=Dense()", not isinstance(half.attention, nn.Dense), f"{half.attention}"),
        ("layout=None", half.layout is not None, "a layout"),
        ("swift=None", half.swift is not None, f"{half.swift}"),
        ("images=None", half.images is not None, f"{half.images}"),
        ("parallel=None", half.parallel is not None, f"parallel={half.parallel!r}"),
        ("qk_norm=None", half.qk_norm is not None, f"qk_norm={half.qk_norm!r}"),
        ("position=None, 'learned' or 'rope'", half.position == "alibi", "position='alibi'"),
        ("bias_rate=0", half.experts is not None and half.experts.bias_rate > 0, f"{half.experts}"),
    ]
    return [(wanted, got) for wanted, found, got in asked if found]


def init(config: Config, key: Int64[Tensor, "2"]) -> Params:
    """Returns fresh parameters.

    Weights normal(0, 0.02), smaller by 1 / sqrt(2 L) where they write to the residual stream. With a `logits_scale`
    the embedding is normal(0, 1), so that logits have the size of the states.

    Args:
        config: shape.
        key: key. Leaf i is drawn with `fold_in(key, i)`.

    Returns:
        float32: {"embed", "encoder": {"blocks": [L dicts], "norm_w"?, "norm_b"?, "relative"?, "position"?}, "decoder",
            "head"?, "head_b"?}. A block of the decoder also has the leaves of cross attention, "c_wq" and so on. In a
            half with `stacked`, "blocks" is one dict of the same leaves stacked, [L, ...].

    Example:
        >>> from shardfn.core import key
        >>> config = Config.t5_like(vocab_size=64, num_layers=1, d_model=32, num_heads=4, d_head=8)
        >>> params = init(config, key(0))
        >>> params["decoder"]["blocks"][0]["c_wk"].shape, params["encoder"]["relative"].shape
        (torch.Size([32, 32]), torch.Size([32, 4]))
    """
    listed, treedef = tree_flatten(_list_leaves(config))
    keys = split(key, len(listed))
    drawn = tree_unflatten(treedef, [leaf.draw(k) for leaf, k in zip(listed, keys, strict=True)])
    return _stack(config, drawn, stack_draws)


def specs(config: Config, *, tp: Axes = None) -> PyTree:
    """Returns the compute layout: `P()`, whole, for every leaf. With `tp`, Megatron's layout, as of `gpt.specs`.

    Args:
        config: shape.
        tp: mesh axes of tensor parallelism, the `axis` of `apply` and `loss`. None: every leaf is whole.

    Example:
        >>> config = Config.t5_like(vocab_size=64, num_layers=1, d_model=32, num_heads=4, d_head=8)
        >>> specs(config, tp="tp")["decoder"]["blocks"][0]["c_wo"]
        P(None, 'tp')
    """
    tree = tree_map(lambda leaf: leaf.spec(tp), _list_leaves(config))
    return _stack(config, tree, lambda same: Sharding(P(None, *same[0]), stacked=True))


def leaf_shapes(config: Config) -> PyTree:
    """Returns the shape of each leaf, as a tuple.

    Example:
        >>> leaf_shapes(Config.t5_like(vocab_size=64))["embed"]
        (64, 512)
    """
    return _stack(config, tree_map(lambda leaf: leaf.shape, _list_leaves(config)), _stack_shapes)


def num_params(config: Config) -> int:
    """Returns the number of parameters.

    Example:
        >>> num_params(Config.t5_like())
        60506624
    """
    return sum(math.prod(leaf.shape) for leaf in tree_leaves(_list_leaves(config)))


def check_leaves(config: Config, params: Params, axis: Axes) -> None:
    """Compares parameters, as this rank's blocks under `specs(config, tp=axis)`, with the config's leaves.

    Raises:
        ValueError: lists every leaf that is missing, unknown, or of another shape, by path.
    """
    shapes = block_shapes(config, axis)
    want = dict(named_leaves(shapes, "params", is_leaf=is_shape))
    have: dict[str, Any] = dict(named_leaves(params, "params"))
    problems = [f"{path} is missing" for path in want if path not in have]
    problems += [f"{path} is unknown to the model" for path in have if path not in want]
    problems += [
        f"{path} is {tuple(x.shape)}, and the model's is {want[path]}"
        for path, x in have.items()
        if path in want and tuple(x.shape) != want[path]
    ]
    where = f", with axis={axis!r} over {axis_size(axis)} ranks," if axis_size(axis) > 1 else ""
    raise_all(ValueError, f"seq2seq: these are the parameters{where} of another model:", problems)


def block_shapes(config: Config, axis: Axes) -> Any:
    """Returns the shape of this rank's block of every leaf under `specs(config, tp=axis)`, as a tuple."""
    mesh = current_mesh()

    def find_shape(leaf: leaves.DrawnLeaf) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in block_slices(leaf.shape, leaf.spec(axis), mesh.shape, mesh.coords))

    return _stack(config, tree_map(find_shape, _list_leaves(config)), _stack_shapes)


def unstack(config: Config, params: Params) -> tuple[Config, Params]:
    """Returns the model with a list of layers in both halves, as an engine and files of other libraries take it.

    Example:
        >>> from shardfn.core import key
        >>> config = Config.t5_like(vocab_size=64, num_layers=2, d_model=32, num_heads=4, d_head=8, stacked=True)
        >>> config, params = unstack(config, init(config, key(0)))
        >>> len(params["encoder"]["blocks"]), config.decoder.stacked
        (2, False)
    """
    lists = {name: leaves.unstack_blocks(half, params[name]) for name, half in config.halves.items()}
    halves = {name: replace_half(half, stacked=False) for name, half in config.halves.items()}
    return replace_halves(config, halves), {**params, **lists}


def is_shape(x: Any) -> bool:
    """Returns whether a node of a tree of shapes is a shape."""
    return isinstance(x, tuple)


def replace_half(half: Half, **changes: Any) -> Half:
    """Returns a half with changes, as `dataclasses.replace`."""
    return dataclasses.replace(half, **changes)


def replace_halves(config: Config, halves: Mapping[str, Half]) -> Config:
    """Returns a config with other halves.

    Args:
        config: shape.
        halves: halves by name, "encoder" or "decoder". Halves that are not named stay.
    """
    return dataclasses.replace(config, **halves)


def relative_index(config: Config, name: str, device: torch.device) -> Tensor:
    """Returns the bucket of each distance in a half, int64 [2 max_distance + 1]."""
    assert config.buckets is not None
    return nn.relative_buckets(config.buckets, config.max_distance, causal=name == "decoder").to(device)


def _stack(config: Config, params: Params, join: Callable[[Any], Any]) -> Params:
    """Returns leaves by layer with those of stacked halves joined."""
    stacked = {name: half for name, half in config.halves.items() if half.stacked}
    return {**params, **{name: leaves.stack_blocks(half, params[name], join) for name, half in stacked.items()}}


def _stack_shapes(same: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return len(same), *same[0]


def _list_leaves(config: Config) -> Any:
    half = config.decoder
    V, D = half.vocab_size, half.d_model
    stddev = 0.02 if config.logits_scale is None else 1.0
    tree = {"embed": leaves.DrawnLeaf((V, D), stddev=stddev, cut=0)}
    tree |= {name: _list_half(config, name) for name in config.halves}
    if not half.tie_embeddings:
        tree["head"] = leaves.DrawnLeaf((V, D), cut=0)
    if half.head_bias:
        tree["head_b"] = leaves.DrawnLeaf((V,), stddev=0.0, cut=0)
    return tree


def _list_half(config: Config, name: str) -> Any:
    half = config.halves[name]
    blocks = [leaves.list_block_leaves(half, i) for i in range(half.num_layers)]
    if name == "decoder":
        cross = leaves.list_attention_leaves(half)
        for norm in leaves.block_norms(half):
            cross |= leaves.list_norm_leaves(half, norm) if norm.endswith("1") else {}
        blocks = [p | {CROSS + n: x for n, x in cross.items()} for p in blocks]
    tree: dict[str, Any] = {"blocks": blocks} | ({} if config.norm_sums else leaves.list_norm_leaves(half, "norm"))
    if half.embedding_norm:
        tree |= leaves.list_norm_leaves(half, "embed_norm")
    if half.position == "learned":
        tree["position"] = leaves.DrawnLeaf((half.max_len, half.d_model))
    if name == "encoder" and config.features is not None:
        for conv, width in (("conv1", config.features), ("conv2", half.d_model)):
            tree |= {f"{conv}_w": leaves.DrawnLeaf((half.d_model, width, 3))}
            tree |= {f"{conv}_b": leaves.DrawnLeaf((half.d_model,), stddev=0.0)}
    if config.buckets is not None:
        tree["relative"] = leaves.DrawnLeaf((config.buckets, half.num_heads), stddev=half.d_model**-0.5)
    return tree
