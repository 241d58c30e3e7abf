"""A model in the form that an engine runs."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import nn
from shardfn.collectives import unshard
from shardfn.core import Axes, Mesh, P, PyTree, QuantizationPolicy, named_leaves, tree_leaves
from shardfn.kernels import Activations
from shardfn.models import gpt
from shardfn.nn import moe

from ._cache import CacheLayout, LaneAxis
from ._image_rows import ImageRule
from ._layouts import Layout, Outputs, make_group, make_outputs, make_sequence_layout, make_stage
from ._limits import DEFAULT_LAYOUT
from ._low_rank import Linear, LowRank
from ._requests import Request, Sampling


class SourceEncoder(NamedTuple):
    """Encoder of an encoder-decoder model.

    Attributes:
        longest: most tokens of a source.
        start: first token of the decoder's sequence.
        encode: function `encode(weights, tokens)` of this rank's blocks of `weights` and one source, to its keys and
            values for each layer of cross attention, [S, G, K] of the rank's heads.
        features: shape of a source that is features, float32 [F, M], in place of tokens, or None.
    """

    longest: int
    start: int
    encode: Callable[[PyTree, Tensor], Sequence[tuple[Tensor, Tensor]]]
    features: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model in the form that an engine runs: pure functions, and the layouts of their arguments.

    Args:
        vocab: number of tokens. Ids are 0 to `vocab - 1`.
        context: most tokens of a sequence.
        cache: form of the KV cache.
        specs: compute specs of the parameters.
        outputs: function `outputs(weights, tokens, positions, rows, bodies, adapters)` of this rank's blocks of
            `weights`, with a body of attention for each layer. Without `linear` the adapters stay None.
        pack: function from this rank's blocks of the parameters to the weights that `outputs` takes.
        packed: specs of the result of `pack`, a prefix tree.
        batch_invariant: whether the decoder is batch-invariant: a token's logits have the same bits next to any other
            tokens.
        hidden_layers: numbers of layers that `outputs` has hidden states after. Without the number of all layers, the
            engine embeds no prompt.
        hidden_size: width of the hidden states, or 0.
        digest: digest of the model's config. Drafters know their model by the digest. Empty if unknown.
        linear: layers that may have adapters, by name.
        expert_shape: number of layers with experts, and of a token's choices in each: `Engine(record_experts=True)`.
            (0, 0) if `outputs` has no experts.
        more_layouts: further layouts by name. `outputs`, `specs`, `pack` and `packed` are the layout "tp".
        num_layers: number of layers, where some share a layer of the cache. None: as many as the cache has.
        name_weights: function from parameters to the leaves by name. Names do not depend on `stacked`. Collective.
        sources: encoder whose result the layers of cross attention read, or None.
        spec_token: whether the token with the id `vocab` has an embedding: [SPEC], which no logits count
            (`speculators.add_spec_token`).
        config: shape of the model, for a `models.gpt`, or None.
        images: rule of image tokens, or None without images. `outputs` then takes `images=` as `gpt.decode` does. With
            `ImageRule.grid` its positions are int32 [3, T].
        embed_size: width of the embeddings of tokens, which prompts may give through `images=`, or 0 without such
            prompts.
        list_misfits: function from a mesh to the parts that the mesh cannot cut, as lines of a message.
        masked: whether `outputs` takes `mask=`, False for padding.
    """

    vocab: int
    context: int
    cache: CacheLayout
    specs: PyTree
    outputs: Callable[..., Outputs]
    pack: Callable[[PyTree], PyTree] = lambda params: params
    packed: PyTree = P()
    batch_invariant: bool = False
    hidden_layers: Sequence[int] = ()
    hidden_size: int = 0
    digest: str = ""
    linear: Mapping[str, Linear] = dataclasses.field(default_factory=dict)
    expert_shape: tuple[int, int] = (0, 0)
    more_layouts: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
    num_layers: int | None = None
    name_weights: Callable[[PyTree], list[tuple[str, Any]]] = named_leaves
    sources: SourceEncoder | None = None
    spec_token: bool = False
    config: gpt.Config | None = None
    images: ImageRule | None = None
    embed_size: int = 0
    list_misfits: Callable[[Mesh], list[str]] = lambda mesh: []
    masked: bool = False

    @property
    def embeds(self) -> bool:
        """Returns whether `outputs` has the states that the head multiplies."""
        return self.depth in self.hidden_layers

    @property
    def depth(self) -> int:
        """Returns the number of layers."""
        return self.cache.layers if self.num_layers is None else self.num_layers

    @property
    def layouts(self) -> dict[str, Layout]:
        """Returns all layouts by name, "tp" first."""
        return {
            DEFAULT_LAYOUT: Layout(self.outputs, self.specs, self.pack, self.packed, masked=self.masked),
            **self.more_layouts,
        }

    @property
    def axes(self) -> set[str]:
        """Returns the mesh axes that the cache or a layout uses."""
        specs = [x for layout in self.layouts.values() for x in tree_leaves((layout.specs, layout.packed))]
        cut = [self.cache.spec, *(P(x.tokens) for x in self.layouts.values())]
        return {axis for x in (*cut, *specs) if isinstance(x, P) for axis in x.axes}

    def make_request(self, ids: Sequence[int], sampling: Sampling) -> Request:
        """Returns the request of a prompt, which is the source of an encoder-decoder model.

        Args:
            ids: token ids of the prompt.
            sampling: rule of drawing tokens.
        """
        if self.sources is None:
            return Request(tuple(ids), sampling)
        return Request((self.sources.start,), sampling, source=tuple(ids))

    def logits(self, weights: PyTree, *rest: Any) -> Tensor:
        """Returns the logits of `outputs`, [R, V]."""
        return self.outputs(weights, *rest).logits


def decoder(
    config: gpt.Config,
    *,
    tp: str | None = None,
    sp: str | None = None,
    pp: tuple[str, int] | None = None,
    dp: str | None = None,
    quantization: QuantizationPolicy = None,
    activations: Activations | None = None,
) -> Decoder:
    """Returns the decoder of a `models.gpt`.

    Args:
        config: shape of the model. With `batch_invariant=True`, logits equal the logits of `gpt.apply`, bit for bit.
        tp: mesh axis that cuts heads, features and vocabulary. The axis divides the number of key heads. A
            batch-invariant config then also has the layout "sp", which cuts the tokens of a step along the axis. A
            config with experts, whose exchange is `moe.AllReduce(tp, in_order=True)`, has "ep" as well.
        sp: further mesh axis, of a batch-invariant model without experts (shift parallelism). The layout "tp" cuts
            heads, features and vocabulary along both axes. The layout "sp" cuts them along `tp`, and the tokens of a
            step along `sp`. Both read one copy of the weights, a rank's block of `tp`. The ranks of both axes divide
            the number of key heads.
        pp: mesh axis of the stages of a pipeline, and their number. Each stage has some of the layers, and a plan
            travels from stage to stage, next to plans of other sequences. For a batch-invariant model with
            `stacked=True`, also with `tp`. Sizes of `Limits` are those of one lane of a stage.
        dp: mesh axis of groups of ranks with plans of their own (attention in data parallelism). Experts lie on all
            ranks of `dp` and `tp`, and tokens are sent to their experts. A group without a plan takes part without
            tokens. For a batch-invariant model. Sizes of `Limits` are those of one group.
        quantization: "int8" or "int4" for the weights of linear layers, or codes by regular expressions found in names
            such as "blocks.0.wq" and "embed", for example `{"embed|head": "int8", "": "int4"}`. Logits equal the logits
            of the rounded weights, bit for bit. Leaves that are blocks of codes already, as of `kernels.fit_blocks` or
            a GGUF file, are not rounded again.
        activations: "int8" rounds the inputs of layers in codes, row by row, and adds up whole numbers
            (`kernels.integer_linears`). Logits have the same bits in any batch and on any ranks, but are no longer the
            logits of `gpt.apply`.

    Raises:
        ValueError: tokens of the model look ahead, or its masks need whole sequences, or codes, rounded activations or
            `sp` of layers that are not exact, or `sp` of a model with experts, images or latent attention.

    Example:
        >>> decoder(gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4)).cache
        CacheLayout(layers=2, heads=4, head_dim=8, axis=None, cross_layers=0, parts=2, lanes=None)
    """
    gpt.check_decodable(config)
    if quantization is not None and not config.batch_invariant:
        raise ValueError(
            f"decoder: quantization={quantization!r} needs batch-invariant layers. Use Config(batch_invariant=True)."
        )
    check_activations(activations, "decoder", config.batch_invariant)
    if sp is not None:
        _check_shift(config, tp, sp)
    _check_axes(config, sp=sp, pp=pp, dp=dp)
    if pp is not None:
        return _make_stages(config, tp, pp, quantization, activations)
    if dp is not None:
        return _make_groups(config, tp, dp, quantization, activations)
    axes = tp if sp is None else (*P(tp).axes, sp)
    flat = dataclasses.replace(config, stacked=False)
    linear = {name: Linear(*sizes) for name, sizes in gpt.linear_sizes(flat).items()} if config.batch_invariant else {}

    def add_low_rank(low: LowRank, name: str) -> nn.Then:
        rows = name.endswith((".wo", ".w_down"))  # inputs are cut, and outputs of all other layers
        whole = name.endswith(WHOLE_LINEAR)  # on each rank
        return functools.partial(low.added, name, axis=None if whole else axes, joins=rows, cut=not rows)

    def compute_outputs(
        weights: PyTree,
        tokens_T: Tensor,
        positions_T: Tensor,
        rows_R: Tensor,
        bodies: Sequence[nn.AttentionBackend],
        low: LowRank | None = None,
        images: tuple[Tensor, Tensor] | None = None,
    ) -> Outputs:
        added = {} if low is None else {name: add_low_rank(low, name) for name in low.sites}
        how: Any = {"axis": axes, "shared": sp, "then": added, "activations": activations, "images": images}
        return make_outputs(gpt.decode(flat, weights, tokens_T, positions_T, rows_R, bodies, **how))

    def pack(params: PyTree) -> PyTree:
        packed = gpt.pack(config, params, axis=tp, shared=sp, quantization=quantization)
        return check_coded(packed, activations, "decoder")

    return Decoder(
        vocab=config.vocab_size,
        context=config.max_len,
        cache=_make_cache(config, axes),
        specs=gpt.served_specs(config, tp=tp),
        outputs=compute_outputs,
        pack=pack,
        packed=gpt.packed_specs(config, tp=tp),
        batch_invariant=config.batch_invariant,
        hidden_layers=range(config.num_layers + 1),
        num_layers=config.num_layers,
        hidden_size=config.d_model,
        digest=_digest_config(config),
        linear=linear,
        expert_shape=(0, 0) if config.experts is None else (len(config.expert_layers), config.experts.top_k),
        more_layouts=(
            _list_more(config, tp, quantization, activations)
            if sp is None
            else {"sp": make_sequence_layout(config, sp, quantization, activations, tp=tp, pack=pack)}
        ),
        name_weights=functools.partial(_name_weights, config),
        config=config,
        images=None if config.images is None else ImageRule(config.images.token, config.images.rule),
        embed_size=config.d_model,
        list_misfits=functools.partial(_list_uncut, config, axes),
    )


def _check_axes(config: gpt.Config, **given: Any) -> None:
    """Refuses several of the axes that give ranks plans of their own, or other tokens.

    Raises:
        ValueError: names the axes.
    """
    named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"decoder: only one of sp, pp and dp may be given, got {' and '.join(named)}.")
    parts = ("images", config.images is not None), ("latent attention", config.latent is not None)
    if named and (found := [name for name, has in parts if has]):
        raise ValueError(f"decoder: {named[0]} must be of a model without {' and '.join(found)}. Leave it out.")


def _make_groups(
    config: gpt.Config,
    tp: str | None,
    dp: str,
    quantization: QuantizationPolicy,
    activations: Activations | None,
) -> Decoder:
    """Returns the decoder of groups of ranks with plans of their own."""
    if not config.batch_invariant:
        raise ValueError(f"decoder: dp={dp!r} needs batch-invariant layers. Use Config(batch_invariant=True).")
    layout = make_group(config, dp, tp, quantization, activations)
    cache = CacheLayout(config.num_cache_layers, config.kv_heads, config.head_dim, tp, lanes=LaneAxis(dp))
    return _make_laned(config, layout, cache, activations, functools.partial(_list_uncut, config, tp))


def _make_stages(
    config: gpt.Config,
    tp: str | None,
    pp: tuple[str, int],
    quantization: QuantizationPolicy,
    activations: Activations | None,
) -> Decoder:
    """Returns the decoder of a pipeline."""
    axis, stages = pp
    layout = make_stage(config, axis, stages, tp, quantization, activations)
    num = config.num_layers // stages

    def list_misfits(mesh: Mesh) -> list[str]:
        ranks = mesh.axis_size(axis)
        wrong = (
            f"the mesh has {ranks} ranks of {axis!r}, but the decoder has {stages} stages; pass pp=({axis!r}, {ranks})"
        )
        return ([] if ranks == stages else [wrong]) + _list_uncut(config, tp, mesh)

    cache = CacheLayout(num, config.kv_heads, config.head_dim, tp, lanes=LaneAxis(axis, stages=True))
    return _make_laned(config, layout, cache, activations, list_misfits)


def _make_laned(
    config: gpt.Config,
    layout: Layout,
    cache: CacheLayout,
    activations: Activations | None,
    list_misfits: Callable[[Mesh], list[str]],
) -> Decoder:
    """Returns a decoder with lanes, which has a single layout."""
    return Decoder(
        vocab=config.vocab_size,
        context=config.max_len,
        cache=cache,
        specs=layout.specs,
        outputs=layout.outputs,
        pack=lambda params: check_coded(layout.pack(params), activations, "decoder"),
        packed=layout.packed,
        batch_invariant=True,
        num_layers=config.num_layers,
        hidden_size=config.d_model,
        digest=_digest_config(config),
        name_weights=functools.partial(_name_weights, config),
        config=config,
        list_misfits=list_misfits,
        masked=layout.masked,
    )


def _check_shift(config: gpt.Config, tp: str | None, sp: str) -> None:
    """Refuses a model whose layouts over two axes would not share the weights."""
    if not config.batch_invariant:
        raise ValueError(f"decoder: sp={sp!r} needs batch-invariant layers. Use Config(batch_invariant=True).")
    if config.experts is not None:
        raise ValueError(f"decoder: sp={sp!r} must be of a model without experts. Leave it out, or use dp=.")
    if tp == sp:
        raise ValueError(
            f"decoder: tp and sp must be different axes, got {sp!r} twice. Leave sp out for both over one."
        )


def _list_uncut(config: gpt.Config, axes: Axes, mesh: Mesh) -> list[str]:
    """Returns the parts of a batch-invariant model that the ranks of a mesh cannot cut. Its sums go by one tree."""
    ranks = mesh.axis_size(axes)
    num, rest = divmod(config.chunks, ranks)
    if ranks == 1 or not config.batch_invariant:
        return []
    problems = []
    if rest or num & (num - 1):
        problems.append(
            f"{ranks} ranks of {axes!r} do not divide the {config.chunks} chunks of the sums into powers of two each;"
            f" use Config(chunks={ranks * max(1, 8 // ranks)})"
        )
    has_mlp = config.experts is None or config.experts.shared or config.experts.residual
    dense = {config.ff_dim} if len(config.expert_layers) < config.num_layers else set[int]()
    for size in sorted(dense | ({config.shared_ff_dim} if has_mlp else set())):
        if size % ranks:
            problems.append(f"{ranks} ranks of {axes!r} do not divide the {size} features of the MLP (d_ff)")
    if config.latent is not None and config.num_heads % ranks:
        problems.append(f"{ranks} ranks of {axes!r} do not divide the {config.num_heads} heads of latent attention")
    return problems


# Linear layers of latent attention that each rank has whole.
WHOLE_LINEAR = (".wq_a", ".wkv_a")


def _make_cache(config: gpt.Config, axes: Axes) -> CacheLayout:
    if config.latent is not None:  # read by the heads of all ranks
        return CacheLayout(config.num_cache_layers, 1, config.latent.row, parts=1)
    return CacheLayout(config.num_cache_layers, config.kv_heads, config.head_dim, axes)


def _name_weights(config: gpt.Config, params: PyTree) -> list[tuple[str, Any]]:
    return named_leaves(gpt.unstack_blocks(config, unshard(params) if config.stacked else params))


# Fields that change no function of the weights, or change only how the function is computed.
_FREE = (
    *("max_len", "dropout", "attention_dropout", "stacked", "per_head", "attention", "loss_tile", "layout"),
    *("batch_invariant", "chunks", "experts"),
)
# Fields that count only where they are set, so that digests of models without them stay the same.
_WHERE_SET = (
    *("d_head", "rope", "qk_norm", "norm_place", "norm_plus_one", "softcap", "logits_softcap", "attention_scale"),
    *("embedding_scale", "parallel", "sinks", "head_bias", "images", "latent"),
)


def _digest_config(config: gpt.Config) -> str:
    """Returns a digest of the fields that decide on the model's function.

    Example:
        >>> config = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4)
        >>> exact = dataclasses.replace(config, batch_invariant=True, max_len=32)
        >>> _digest_config(config) == _digest_config(exact)
        True
    """
    fields = {
        x.name: getattr(config, x.name)
        for x in dataclasses.fields(config)
        if x.name not in _FREE and not (x.name in _WHERE_SET and getattr(config, x.name) == x.default)
    }
    fields |= {"num_kv_heads": config.kv_heads, "d_ff": config.ff_dim, "num_experts": config.num_experts}
    return hashlib.blake2b(repr(sorted(fields.items())).encode(), digest_size=8).hexdigest()


def check_activations(activations: str | None, who: str, batch_invariant: bool) -> None:
    """Refuses an unknown rounding of activations, and layers that are not batch-invariant.

    Raises:
        ValueError: names the setting.
    """
    if activations not in (None, "int8"):
        raise ValueError(f"{who}: activations must be 'int8' or None, got {activations!r}")
    if activations is not None and not batch_invariant:
        raise ValueError(
            f"{who}: activations={activations!r} needs batch-invariant layers. Use Config(batch_invariant=True), or"
            " leave out batch_invariant=False."
        )


def check_coded(packed: PyTree, activations: str | None, who: str) -> PyTree:
    """Returns packed weights.

    Raises:
        ValueError: activations are rounded, but no weight is in codes, so that the setting has no effect.
    """
    if activations is not None and not any(x.dtype == torch.uint8 for x in tree_leaves(packed)):
        raise ValueError(
            f"{who}: activations={activations!r} must have weights in codes, got only floats. Pass quantization='int8'"
            " or 'int4', or blocks of a GGUF file."
        )
    return packed


def _list_more(
    config: gpt.Config, tp: str | None, quantization: QuantizationPolicy, activations: Activations | None
) -> dict[str, Layout]:
    """Returns the layouts beside "tp"."""
    if tp is None or not config.batch_invariant or config.images is not None:
        return {}
    make = functools.partial(make_sequence_layout, config, tp, quantization, activations)
    return {"sp": make()} | ({} if config.experts is None else {"ep": make(moe.AllToAll(tp))})
