"""The parameters of the GPT: drawn, laid out and counted from a single table.

D model, H heads, G key and value heads, K head dim, F ffn, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from shardfn.collectives import axis_size, current_mesh
from shardfn.core import (
    Axes,
    P,
    PyTree,
    Sharding,
    block_slices,
    full,
    normal,
    raise_all,
    split,
    stack_draws,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_structure,
    tree_unflatten,
)
from shardfn.kernels import BLOCK_BYTES, GROUP
from shardfn.nn import BatchInvariantWeight

from ._gpt_config import Config
from ._latent import Latent

Params = Any  # a dict from `init`, as optree types its results as optree's PyTree


def init(config: Config, key: Int64[Tensor, "2"]) -> Params:
    """Returns fresh parameters.

    Weights normal(0, 0.02), and smaller by 1 / sqrt(2 L) where they write to the residual stream.

    `shardfn.core`'s functions draw the leaves, so inside `deferred()` the leaves are deferred.

    Args:
        config: shape.
        key: key. Leaf i is drawn with `fold_in(key, i)`.

    Returns:
        float32: {"embed", "position"?, "blocks": [L dicts], "norm_w", "norm_b"?, "head"?}. Weights are [out, in]. With
            `stacked`, "blocks" is one dict of the same leaves stacked, [L, ...].

    Example:
        >>> from shardfn.core import key
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> init(config, key(0))["blocks"][0]["wq"].shape
        torch.Size([32, 32])
    """
    leaves, treedef = tree_flatten(_list_leaves(config))
    keys = split(key, len(leaves))
    params = tree_unflatten(treedef, [leaf.draw(k) for leaf, k in zip(leaves, keys, strict=True)])
    return stack_blocks(config, params, stack_draws) if config.stacked else params


def specs(config: Config, *, tp: Axes = None, pp: str | None = None) -> PyTree:
    """Returns the compute layout: `P()`, whole, for every leaf. For stacked blocks, the layout of each layer.

    With `tp` the layout is Megatron's: heads, features of the MLP and the vocabulary are cut along `tp`, and `apply`
    and `loss` must get the same as their `axis`.

    Args:
        config: shape.
        tp: mesh axes of tensor parallelism. None: every leaf is whole.
        pp: axis along which the layers of a pipeline lie, for `stages`. None: every rank has all layers.

    Raises:
        ValueError: `pp` of blocks that are not stacked.

    Example:
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> specs(config)["embed"], specs(config, tp="tp")["blocks"][0]["wo"]
        (P(), P(None, 'tp'))
    """
    tree = tree_map(lambda leaf: leaf.spec(tp), _list_leaves(config))
    if pp is not None:
        if not config.stacked:
            raise ValueError(f"specs(pp={pp!r}): a pipeline cuts stacked layers. Use Config(stacked=True).")
        return stack_blocks(config, tree, lambda same: P(pp, *same[0]))
    return (
        stack_blocks(config, tree, lambda same: Sharding(P(None, *same[0]), stacked=True)) if config.stacked else tree
    )


def weight(config: Config, w: Any) -> Any:
    """Returns a weight of a linear layer as the config computes it. A batch-invariant weight is unchanged."""
    return (
        BatchInvariantWeight.of(w, config.chunks)
        if config.batch_invariant and not isinstance(w, BatchInvariantWeight)
        else w
    )


def check_blocks(config: Config, params: Params, axis: Axes) -> None:
    """Compares every leaf with this rank's block under `specs(config, tp=axis)`.

    Raises:
        ValueError: lists every leaf that is another block, by path.
    """
    sizes = _get_shapes(config, axis)
    if tree_structure(sizes) != tree_structure(params):
        return  # the layers' errors name missing leaves
    named: list[Any] = list(zip(tree_paths(sizes, "params"), tree_leaves(params), tree_leaves(sizes), strict=True))
    problems = [
        f"{path} is {tuple(x.shape)}, but this rank's block is {block.shape}. Use specs(config, tp={axis!r})"
        for path, x, block in named
        if tuple(x.shape) != block.shape
    ]
    raise_all(ValueError, f"gpt with axis={axis!r} over {axis_size(axis)} ranks:", problems)


def check_leaves(config: Config, params: Params, axis: Axes) -> None:
    """Compares parameters, as this rank's blocks under `specs(config, tp=axis)`, with the config's leaves.

    Leaves of bytes are blocks of codes along the last dim, as from `kernels.quantize_blocks`.

    Raises:
        ValueError: lists every leaf that is missing, unknown, or of another shape, by path.
    """
    sizes = _get_shapes(config, axis)
    want: dict[str, Any] = dict(zip(tree_paths(sizes, "params"), tree_leaves(sizes), strict=True))
    have: dict[str, Any] = dict(zip(tree_paths(params, "params"), tree_leaves(params), strict=True))
    problems = [f"{path} is missing" for path in want if path not in have]
    problems += [f"{path} is unknown to the model" for path in have if path not in want]
    problems += [
        f"{path} is {tuple(x.shape)}, and the model's is {want[path].shape}"
        for path, x in have.items()
        if path in want and not _has_shape(x, want[path].shape)
    ]
    raise_all(ValueError, "gpt: these are the parameters of another model:", problems)


def _has_shape(x: Tensor, shape: tuple[int, ...]) -> bool:
    if x.dtype == torch.uint8 and shape[-1] % GROUP == 0:
        return tuple(x.shape) in [(*shape[:-1], shape[-1] // GROUP * size) for size in BLOCK_BYTES.values()]
    return tuple(x.shape) == shape


def _get_shapes(config: Config, axis: Axes) -> PyTree:
    sizes = block_shapes(config, axis)
    if not config.stacked:
        return sizes
    return stack_blocks(config, sizes, lambda same: BlockShape((len(same), *same[0].shape)))


def block_shapes(config: Config, axis: Axes, shared: Axes = None) -> PyTree:
    """Returns the shape of each leaf's shard on this rank under `specs(config, tp=axis)`, without stacked layers.

    Args:
        config: shape.
        axis: mesh axes.
        shared: last axes of `axis`, whose ranks have leaves in common: those of `specs(config, tp=)` of the rest of the
            axes. A shard of `axis` lies in such a leaf.
    """
    mesh = current_mesh()
    want: list[Any] = tree_leaves(_list_leaves(config))
    held = outer_axes(axis, shared)

    def find_block(leaf: DrawnLeaf) -> BlockShape:
        own, common = (block_slices(leaf.shape, leaf.spec(x), mesh.shape, mesh.coords) for x in (axis, held))
        starts = tuple(a.start - b.start for a, b in zip(own, common, strict=True))
        return BlockShape(tuple(s.stop - s.start for s in own), starts)

    return tree_unflatten(tree_structure(_list_leaves(config)), [find_block(leaf) for leaf in want])


def outer_axes(axis: Axes, shared: Axes) -> Axes:
    """Returns the axes without the shared axes.

    Example:
        >>> outer_axes(("tp", "sp"), "sp"), outer_axes("sp", "sp"), outer_axes("tp", None)
        (('tp',), None, ('tp',))
    """
    return tuple(x for x in P(axis).axes if x not in P(shared).axes) or None


def leaf_shapes(config: Config) -> PyTree:
    """Returns the shape of each leaf as a tuple, without stacked layers.

    Example:
        >>> leaf_shapes(Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4))["blocks"][0]["wq"]
        (32, 32)
    """
    return tree_map(lambda leaf: leaf.shape, _list_leaves(config))


def num_params(config: Config) -> int:
    """Returns the number of parameters.

    Example:
        >>> num_params(Config.gpt2_like())
        124439808
    """
    return sum(math.prod(leaf.shape) for leaf in tree_leaves(_list_leaves(config)))


# One table from which all of these are read.


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """Shape of a rank's block of a leaf, and its beginning in the leaf that some ranks have in common."""

    shape: tuple[int, ...]
    starts: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class DrawnLeaf:
    """Shape, mean and standard deviation at the start, the dim that tensor parallelism cuts, the axes of experts."""

    shape: tuple[int, ...]
    mean: float = 0.0
    stddev: float = 0.02
    cut: int | None = None
    front: Axes = None

    def spec(self, axis: Axes) -> P:
        if self.cut is None or axis is None or set(P(axis).axes) & set(P(self.front).axes):
            return P() if self.front is None else P(self.front)
        return P(*[self.front if i == 0 else None for i in range(self.cut)], axis)

    def draw(self, key: Tensor) -> Tensor:
        if self.stddev == 0:
            return full(self.shape, self.mean, device=key.device)
        return normal(key, self.shape, mean=self.mean, stddev=self.stddev)


def _list_leaves(config: Config) -> PyTree:
    V, D = config.vocab_size, config.d_model
    blocks = [list_block_leaves(config, i) for i in range(config.num_layers)]
    tree = {"embed": DrawnLeaf((V, D), cut=0), "blocks": blocks}
    if config.swift is not None and config.swift.first < config.num_layers:
        tree |= list_norm_leaves(config, "s_norm")
    tree |= list_norm_leaves(config, "norm") | (list_norm_leaves(config, "embed_norm") if config.embedding_norm else {})
    if config.position == "learned":
        tree["position"] = DrawnLeaf((config.max_len, D))
    if not config.tie_embeddings:
        tree["head"] = DrawnLeaf((V, D), cut=0)
    if config.head_bias:
        tree["head_b"] = DrawnLeaf((V,), stddev=0.0, cut=0)
    return tree


def stack_blocks(config: Config, params: Params, join: Callable[[Any], Any]) -> Params:
    """Returns parameters whose blocks are a dict, with `join` of each leaf of the config's blocks.

    Args:
        config: shape, with stacked blocks.
        params: tree with a list of blocks, one for each layer.
        join: function from the list of a leaf's layers to the stacked leaf, such as `torch.stack`.

    Example:
        >>> config = Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4, stacked=True)
        >>> stack_blocks(config, {"blocks": [{"wq": 1}, {"wq": 2}]}, list)
        {'blocks': {'wq': [1, 2]}}
    """
    num = config.layers_a_block
    groups = [join_layers(params["blocks"][i : i + num]) for i in range(0, config.num_layers, num)]
    return {**params, "blocks": {name: join([p[name] for p in groups]) for name in groups[0]}}


def unstack_blocks(config: Config, params: Params) -> Params:
    """Returns parameters whose blocks are a list of layers, the inverse of `stack_blocks` with `torch.stack`.

    Parameters of a config without `stacked` are unchanged.

    Args:
        config: shape.
        params: parameters as from `init`.
    """
    if not config.stacked:
        return params
    blocks, num = params["blocks"], config.num_layers // config.layers_a_block
    each = (layers_of(config, {name: x[i] for name, x in blocks.items()}) for i in range(num))
    return {**params, "blocks": [layer for layers in each for layer in layers]}


def join_layers(layers: Sequence[Params]) -> Params:
    """Returns the leaves of layers as leaves of one block. Names of several layers begin with the layer's place.

    Example:
        >>> join_layers([{"w": 1}, {"w": 2}])
        {'0.w': 1, '1.w': 2}
    """
    if len(layers) == 1:
        return layers[0]
    return {f"{i}.{name}": x for i, p in enumerate(layers) for name, x in p.items()}


def layers_of(config: Config, block: Params) -> list[Params]:
    """Returns the leaves of each layer of a block, the inverse of `join_layers`."""
    num = config.layers_a_block
    if num == 1:
        return [block]
    starts = [f"{i}." for i in range(num)]
    return [{name.removeprefix(s): x for name, x in block.items() if name.startswith(s)} for s in starts]


def list_block_leaves(config: Config, i: int) -> dict[str, DrawnLeaf]:
    has_experts = config.experts is not None and config.experts.in_layer(i)
    has_mlp = config.experts is None or not has_experts or config.experts.shared or config.experts.residual
    tree = list_attention_leaves(config)
    tree |= {f"s_{name}": tree[name] for name in _list_swift_names(config, i) if name in tree}
    for name in block_norms(config):
        tree |= list_norm_leaves(config, name)
    d_ff = config.shared_ff_dim if has_experts else config.ff_dim
    return tree | (_mlp_leaves(config, d_ff) if has_mlp else {}) | (_expert_leaves(config, i) if has_experts else {})


def _list_swift_names(config: Config, i: int) -> tuple[str, ...]:
    """Returns the leaves of attention that a layer has again for SwiftKV."""
    if config.swift is None or i < config.swift.first:
        return ()
    return ("wq", "bq", *(("wk", "wv", "bk", "bv") if config.swift.is_leader(i) else ()))


def block_norms(config: Config) -> list[str]:
    """Returns the names of a block's norms, for example norm1 before attention and post1 after it."""
    before = ["norm1"] if config.parallel == "one_norm" else ["norm1", "norm2"]
    return {"before": before, "after": ["post1", "post2"], "both": [*before, "post1", "post2"]}[config.norm_place]


def _residual_scale(config: Config) -> float:
    return 0.02 / math.sqrt(2 * config.num_layers)


def list_attention_leaves(config: Config) -> dict[str, DrawnLeaf]:
    if config.latent is not None:
        return _list_latent_leaves(config, config.latent)
    D, K = config.d_model, config.head_dim
    # The rows of the projections: of queries, and of keys and values.
    rows, kv_rows = (((n, K) if config.per_head else (n * K,)) for n in (config.num_heads, config.kv_heads))
    tree = {name: DrawnLeaf((*n, D), cut=0) for name, n in (("wq", rows), ("wk", kv_rows), ("wv", kv_rows))}
    tree |= {"wo": DrawnLeaf((D, *rows), stddev=_residual_scale(config), cut=1)}
    if config.bias:
        tree |= {
            n: DrawnLeaf(shape, stddev=0.0, cut=0) for n, shape in (("bq", rows), ("bk", kv_rows), ("bv", kv_rows))
        }
    if config.qk_norm is not None:
        nums = ("q", config.num_heads), ("k", config.kv_heads)
        wide = {name: K if config.qk_norm == "head" else num * K for name, num in nums}
        mean = 0.0 if config.norm_plus_one else 1.0
        tree |= {f"{name}_norm_w": DrawnLeaf((n,), mean=mean, stddev=0.0) for name, n in wide.items()}
    tree |= {"sinks": DrawnLeaf((config.num_heads,), stddev=0.0, cut=0)} if config.sinks else {}
    return tree | ({"bo": DrawnLeaf((D,), stddev=0.0)} if config.bias is True else {})


def _list_latent_leaves(config: Config, latent: Latent) -> dict[str, DrawnLeaf]:
    D, H, C = config.d_model, config.num_heads, latent.kv_rank

    def by_head(dim: int) -> tuple[int, ...]:
        return (H, dim) if config.per_head else (H * dim,)

    tree = {
        "wq": DrawnLeaf((*by_head(latent.head_dim), latent.q_rank or D), cut=0),
        "wkv_a": DrawnLeaf((latent.row, D)),
    }
    tree |= {"wk_b": DrawnLeaf((H, latent.nope_dim, C), cut=0), "wv_b": DrawnLeaf((H, latent.v_dim, C), cut=0)}
    tree |= {"kv_a_norm_w": DrawnLeaf((C,), mean=1.0, stddev=0.0)}
    if latent.q_rank is not None:
        tree |= {"wq_a": DrawnLeaf((latent.q_rank, D)), "q_a_norm_w": DrawnLeaf((latent.q_rank,), mean=1.0, stddev=0.0)}
    return tree | {"wo": DrawnLeaf((D, *by_head(latent.v_dim)), stddev=_residual_scale(config), cut=1)}


def _mlp_leaves(config: Config, d_ff: int) -> dict[str, DrawnLeaf]:
    D, F = config.d_model, d_ff
    tree = {"w_up": DrawnLeaf((F, D), cut=0), "w_down": DrawnLeaf((D, F), stddev=_residual_scale(config), cut=1)}
    if config.is_gated:
        return tree | {"w_gate": DrawnLeaf((F, D), cut=0)}
    biases = {"b_up": DrawnLeaf((F,), stddev=0.0, cut=0), "b_down": DrawnLeaf((D,), stddev=0.0)}
    return tree | (biases if config.bias is True else {})


def _expert_leaves(config: Config, i: int) -> dict[str, DrawnLeaf]:
    assert config.experts is not None
    E = config.experts.num_of(config.expert_layers.index(i))
    D, F = config.d_model, config.experts.d_ff or config.ff_dim
    (front, *_) = (*config.experts.exchange.spec, None)
    leaf = functools.partial(DrawnLeaf, front=front)
    tree = {"mix": DrawnLeaf((2, D)), "mix_b": DrawnLeaf((2,), stddev=0.0)} if config.experts.residual else {}
    tree |= {"router": DrawnLeaf((E, D)), "e_down": leaf((E, D, F), stddev=_residual_scale(config), cut=2)}
    if config.experts.biases:
        tree |= {"router_b": DrawnLeaf((E,), stddev=0.0), "e_b_gate_up": leaf((E, 2, F), stddev=0.0, cut=2)}
        tree |= {"e_b_down": leaf((E, D), stddev=0.0)}
    if config.mlp == "swiglu":
        return tree | {"e_gate_up": leaf((E, 2, F, D), cut=2)}
    biases = {"e_b_up": leaf((E, F), stddev=0.0, cut=1), "e_b_down": leaf((E, D), stddev=0.0)}
    return tree | {"e_up": leaf((E, F, D), cut=1)} | (biases if config.bias is True else {})


def list_norm_leaves(config: Config, name: str) -> dict[str, DrawnLeaf]:
    tree = {f"{name}_w": DrawnLeaf((config.d_model,), mean=0.0 if config.norm_plus_one else 1.0, stddev=0.0)}
    if config.norm == "layer" and config.bias is True:
        tree[f"{name}_b"] = DrawnLeaf((config.d_model,), stddev=0.0)
    return tree
