"""A language model of recurrent layers: LSTM, GRU or recurrent highway layers over an embedding, and an output layer.

B batch, T tokens, D embedding, H hidden units of a layer, K gates, V vocabulary.

Zaremba et al., Recurrent Neural Network Regularization, 2014, https://arxiv.org/abs/1409.2329
Zilly et al., Recurrent Highway Networks, 2016, https://arxiv.org/abs/1607.03474
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn import core, nn, sparse
from shardfn.engine import WeightedMean
from shardfn.nn import recurrent as layers
from shardfn.nn.recurrent import Kind, Structure, dense

Params = Any  # a dict from `init`

_GATES = {"lstm": 4, "gru": 3, "highway": 2}
_LAYERS = {"lstm": layers.lstm, "gru": layers.gru, "highway": layers.highway}


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of a model.

    Attributes:
        vocab_size: V.
        d_model: width D of the embedding.
        hidden: number of hidden units of each layer, for example (1500, 1500).
        kind: "lstm", "gru" or "highway".
        depth: maps of the hidden units in one step of a highway layer.
        maps: structures of the maps of inputs and of hidden units, for smaller layers.
        dropout: rate, on the embeddings and on the outputs of layers, not between steps. Active only where a key is
            given.
        tie_embeddings: whether the output layer is the embedding. Then D is the last number of hidden units.

    Raises:
        ValueError: lists all settings that do not fit.

    Example:
        >>> Config(vocab_size=64, d_model=16, hidden=(24, 24)).kind
        'lstm'
    """

    vocab_size: int
    d_model: int
    hidden: tuple[int, ...]
    kind: Kind = "lstm"
    depth: int = 1
    maps: tuple[Structure, Structure] = (dense(), dense())
    dropout: float = 0.0
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        sizes = {"vocab_size": self.vocab_size, "d_model": self.d_model, "depth": self.depth}
        sizes |= {f"hidden[{i}]": size for i, size in enumerate(self.hidden)}
        problems = [f"{name} must be at least 1, got {size}" for name, size in sizes.items() if size < 1]
        if not self.hidden:
            problems.append("hidden must have a number for each layer, got none")
        if self.kind not in layers.KINDS:
            problems.append(f"kind must be one of {', '.join(layers.KINDS)}, got {self.kind!r}")
        if self.depth > 1 and self.kind != "highway":
            problems.append(f"depth={self.depth} has an effect only on kind='highway', got {self.kind!r}")
        if self.tie_embeddings and self.hidden and self.d_model != self.hidden[-1]:
            problems.append(f"tie_embeddings needs d_model={self.hidden[-1]}, the last of hidden, got {self.d_model}")
        core.raise_all(ValueError, "recurrent.Config:", problems)

    @property
    def inputs(self) -> tuple[int, ...]:
        """Returns the input width of each layer."""
        return (self.d_model, *self.hidden[:-1])


class Encoded(NamedTuple):
    """Results of the recurrent layers.

    Attributes:
        outputs: hidden units [B, T, H] of each layer at all positions, after dropout.
        states: last state of each layer, for the next tokens. Over several ranks, of the rank's units.
    """

    outputs: list[Tensor]
    states: list[Any]


def init(config: Config, key: Int64[Tensor, "2"]) -> Params:
    """Returns fresh parameters: weights normal with the variance 1 / (3 inputs), the variance of torch's layers.

    Biases are 0, but 1 for the forget gate of an LSTM, and -2 for the gate t of a highway layer.

    Args:
        config: shape.
        key: key. Leaf i is drawn with `fold_in(key, i)`.

    Returns:
        float32: {"embed" [V, D], "layers": [{"w_x", "w_h", "b"}], "head"? [V, H], "head_b" [V]}. See
            `nn.recurrent.CellWeights`. `w_h` of a highway layer is a list of `depth` maps.

    Example:
        >>> from shardfn.core import key
        >>> init(Config(vocab_size=64, d_model=16, hidden=(24,)), key(0))["layers"][0]["w_x"].shape
        torch.Size([4, 24, 16])
    """
    shapes, treedef = core.tree_flatten(_leaf_shapes(config), is_leaf=_is_shape)
    keys = core.split(key, len(shapes))
    drawn = [core.normal(k, s, stddev=(3 * s[-1]) ** -0.5) for k, s in zip(keys, shapes, strict=True)]
    params: Params = core.tree_unflatten(treedef, drawn)
    params["head_b"] = core.full((config.vocab_size,), 0.0, device=key.device)
    for layer in params["layers"]:
        b = core.full(tuple(layer["b"].shape), -2.0 * (config.kind == "highway"), device=key.device)
        gate = torch.arange(b.shape[-2], device=key.device)[:, None]
        layer["b"] = b.masked_fill(gate == 1, 1.0) if config.kind == "lstm" else b.masked_fill(gate == 0, 0.0)
    return params


def specs(config: Config, *, tp: core.Axes = None) -> core.PyTree:
    """Returns the compute layout: `P()`, whole, for every leaf. With `tp`, units and the vocabulary are cut.

    Args:
        config: shape.
        tp: mesh axes of tensor parallelism, the `axis` of `loss`.

    Example:
        >>> specs(Config(vocab_size=64, d_model=16, hidden=(24,)), tp="tp")["layers"][0]["w_h"]
        P(None, 'tp')
    """
    of_x, of_h = (layers.map_specs(structure, tp) for structure in config.maps)
    cut, one = (core.P(), core.P()) if tp is None else (core.P(tp), core.P(None, tp))
    if config.kind == "highway":
        one = core.P() if tp is None else core.P(None, None, tp)
        of_h = [of_h] * config.depth
    tree = {"embed": cut, "layers": [{"w_x": of_x, "w_h": of_h, "b": one} for _ in config.hidden], "head_b": cut}
    return tree if config.tie_embeddings else tree | {"head": cut}


def num_params(config: Config) -> int:
    """Returns the number of parameters.

    Example:
        >>> num_params(Config(vocab_size=10000, d_model=1500, hidden=(1500, 1500)))
        66022000
    """
    return sum(math.prod(shape) for shape in core.tree_leaves(_leaf_shapes(config), is_leaf=_is_shape))


def count_flops(config: Config) -> int:
    """Returns the floating-point operations of the recurrent layers for one token, without embedding and output layer.

    Example:
        >>> count_flops(Config(vocab_size=64, d_model=16, hidden=(16,)))
        4096
    """
    K, (of_x, of_h) = _GATES[config.kind], config.maps
    return sum(
        layers.count_flops(of_x, K, H, D) + config.depth * layers.count_flops(of_h, K, H, H)
        for D, H in zip(config.inputs, config.hidden, strict=True)
    )


def encode(
    config: Config,
    params: Params,
    tokens_BT: Int64[Tensor, "b t"],
    states: Sequence[Any] | None = None,
    *,
    key: Int64[Tensor, "2"] | None = None,
    index_B: Int64[Tensor, " b"] | None = None,
    axis: core.Axes = None,
) -> Encoded:
    """Returns the outputs and last states of all layers.

    Args:
        config: shape.
        params: parameters as from `init`.
        tokens_BT: ids.
        states: states of the layers before the first token, as `Encoded.states`, or None for zeros.
        key: key that turns dropout on.
        index_B: global numbers of the samples, needed where dropout is on.
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.

    Raises:
        ValueError: dropout without `index_B`, or weights of another config.

    Example:
        >>> from shardfn.core import key
        >>> config, tokens = Config(vocab_size=64, d_model=16, hidden=(24,)), torch.zeros(2, 6, dtype=torch.int64)
        >>> params = init(config, key(0))
        >>> first = encode(config, params, tokens[:, :4])
        >>> torch.allclose(encode(config, params, tokens[:, 4:], first.states).outputs[-1],
        ...                encode(config, params, tokens).outputs[-1][:, 4:])
        True
    """
    if key is not None and config.dropout and index_B is None:
        raise ValueError("dropout needs the samples' global numbers: put 'index', int64 [B], in the batch.")
    keys = [None] * (len(config.hidden) + 1) if key is None else list(core.split(key, len(config.hidden) + 1))
    drop = functools.partial(_drop, config.dropout, index_B)
    x_BTD = drop(keys[0], nn.embedding(tokens_BT, params["embed"], vocab_size=config.vocab_size, axis=axis))
    layer, found = _LAYERS[config.kind], Encoded([], [])
    for i, p in enumerate(params["layers"]):
        weights = layers.CellWeights(p["w_x"], p["w_h"], p["b"])
        state = None if states is None else states[i]
        x_BTD, state = layer(x_BTD, weights, state, hidden=config.hidden[i], maps=config.maps, axis=axis)
        x_BTD = drop(keys[i + 1], x_BTD)
        found.outputs.append(x_BTD)
        found.states.append(state)
    return found


def decode(
    config: Config, params: Params, outputs_BTH: Float[Tensor, "b t h"], *, axis: core.Axes = None
) -> Float[Tensor, "b t v"]:
    """Returns the logits of the last layer's outputs. Over several ranks, the rank's classes.

    Args:
        config: shape.
        params: parameters as from `init`.
        outputs_BTH: last of `Encoded.outputs`.
        axis: see `encode`.
    """
    head_VH = params["embed"] if config.tie_embeddings else params["head"]
    return nn.column_linear(outputs_BTH, head_VH, params["head_b"], features=config.vocab_size, axis=axis)


def apply(
    config: Config,
    params: Params,
    tokens_BT: Int64[Tensor, "b t"],
    *,
    key: Int64[Tensor, "2"] | None = None,
    index_B: Int64[Tensor, " b"] | None = None,
    axis: core.Axes = None,
) -> Float[Tensor, "b t v"]:
    """Returns the logits of the next token at each position. Over several ranks, the rank's classes.

    Args:
        config: shape.
        params: parameters as from `init`.
        tokens_BT: ids.
        key: see `encode`.
        index_B: see `encode`.
        axis: see `encode`.
    """
    found = encode(config, params, tokens_BT, key=key, index_B=index_B, axis=axis)
    return decode(config, params, found.outputs[-1], axis=axis)


def loss(
    config: Config,
    params: Params,
    batch: dict[str, Any],
    key: Int64[Tensor, "2"] | None = None,
    *,
    axis: core.Axes = None,
) -> Any:
    """Returns the mean cross entropy of each token given earlier tokens.

    Args:
        config: shape.
        params: parameters as from `init`.
        batch: {"tokens": int64 [B, T + 1]}, or {"tokens", "targets"}, [B, T] each, with targets of -100 that do not
            count. Where dropout is on also "index": int64 [B], global sample numbers.
        key: key that turns dropout on.
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.

    Returns:
        A 0-d tensor, or a WeightedMean with "targets" in the batch.

    Example:
        >>> from shardfn.core import key
        >>> config = Config(vocab_size=64, d_model=16, hidden=(24,), kind="gru")
        >>> loss(config, init(config, key(0)), {"tokens": torch.zeros(2, 9, dtype=torch.int64)}).shape
        torch.Size([])
    """
    tokens_BT = batch["tokens"] if "targets" in batch else batch["tokens"][:, :-1]
    targets_BT = batch["targets"] if "targets" in batch else batch["tokens"][:, 1:]
    logits_BTV = apply(config, params, tokens_BT, key=key, index_B=batch.get("index"), axis=axis)
    pair = nn.cross_entropy_sum(logits_BTV, targets_BT, axis=axis, vocab_size=config.vocab_size)
    return WeightedMean(*pair) if "targets" in batch else pair[0] / targets_BT.numel()


def units(config: Config) -> sparse.WeightGroups:
    """Returns the hidden units of all layers as groups, so that `sparse` can remove units: a family for each layer.

    Group k of a layer has the gates' rows k, the recurrent columns k of each depth, the biases k, and column k of each
    reader: the next layer's `w_x` or the output layer. With tied embeddings, the groups of the last layer also have
    column k of the embedding, and of the first `w_x`.

    Args:
        config: shape, with dense maps.

    Raises:
        ValueError: the maps are structured.

    Example:
        >>> units(Config(vocab_size=64, d_model=16, hidden=(24, 20))).families["layers.0"].places[0]
        LeafIndices(path='layers.0.w_x', dim=1, start=0)

    References:
        Wen et al., Learning Intrinsic Sparse Structures within LSTM, 2017, https://arxiv.org/abs/1709.05027
    """
    if config.maps != (dense(), dense()):
        raise ValueError(f"units: the maps are {config.maps}. Only dense maps lose units.")
    families, last = {}, len(config.hidden) - 1
    for i, size in enumerate(config.hidden):
        name, highway = f"layers.{i}", config.kind == "highway"
        maps = [f"{name}.w_h.{depth}" for depth in range(config.depth)] if highway else [f"{name}.w_h"]
        places = [(f"{name}.w_x", 1), (f"{name}.b", 2 if highway else 1)]
        places += [(path, dim) for path in maps for dim in (1, 2)]
        if i < last:
            places.append((f"layers.{i + 1}.w_x", 2))
        elif config.tie_embeddings:
            places += [("embed", 1), ("layers.0.w_x", 2)]
        else:
            places.append(("head", 1))
        families[name] = sparse.GroupFamily(size, tuple(sparse.LeafIndices(path, dim) for path, dim in places))
    shapes, treedef = core.tree_flatten(_leaf_shapes(config), is_leaf=_is_shape)
    return sparse.WeightGroups(
        families, sparse.leaf_shapes(core.tree_unflatten(treedef, [torch.empty(s, device="meta") for s in shapes]))
    )


def without_units(config: Config, alive: dict[str, Tensor]) -> Config:
    """Returns the shape of the model that `sparse.compact` leaves.

    Args:
        config: shape before.
        alive: result of `sparse.find_alive` on groups of `units(config)`.

    Example:
        >>> without_units(Config(64, 16, (24, 20)), {"layers.0": torch.arange(5), "layers.1": torch.arange(9)}).hidden
        (5, 9)
    """
    hidden = tuple(len(alive[f"layers.{i}"]) for i in range(len(config.hidden)))
    d_model = hidden[-1] if config.tie_embeddings else config.d_model
    return dataclasses.replace(config, hidden=hidden, d_model=d_model)


def _drop(rate: float, index_B: Tensor | None, key: Tensor | None, x_BTD: Tensor) -> Tensor:
    return x_BTD if key is None or not rate or index_B is None else nn.dropout(key, x_BTD, rate, index_B)


def _leaf_shapes(config: Config) -> core.PyTree:
    V, K, (of_x, of_h) = config.vocab_size, _GATES[config.kind], config.maps
    rows = []
    for D, H in zip(config.inputs, config.hidden, strict=True):
        w_x, w_h = layers.map_shapes(of_x, K, H, D), layers.map_shapes(of_h, K, H, H)
        if config.kind == "highway":
            rows.append({"w_x": w_x, "w_h": [w_h] * config.depth, "b": (config.depth, K, H)})
        else:
            rows.append({"w_x": w_x, "w_h": w_h, "b": (4, H)})
    tree = {"embed": (V, config.d_model), "layers": rows, "head_b": (V,)}
    return tree if config.tie_embeddings else tree | {"head": (V, config.hidden[-1])}


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)
