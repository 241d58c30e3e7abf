"""SwiftKV of the GPT: keys and values of later layers from one state, their weights at the start, and what is trained.

    n       = s_norm(state before layer l)
    k, v    = n s_wk^T, n s_wv^T                       of each group of layers from l on
    q       = norm1(x) s_wq^T                          of each of these layers, from its own input

The weights of the model do not change, and keep their names, so that the model without the path is the teacher.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from shardfn import nn

from . import _gpt_leaves as leaves
from ._gpt_block import Along, norm
from ._gpt_config import Config
from ._swift import Swift


class SwiftKeys:
    """Keys and values that the layers of one forward share.

    Args:
        config: shape.
        along: axes of the forward.
        params: parameters.
    """

    def __init__(self, config: Config, along: Along, params: leaves.Params) -> None:
        self._config, self._along, self._params = config, along, params
        self._source_BTD: Tensor | None = None
        self._keys: nn.KeyValues | None = None

    def add_to(self, table: dict[str, Any], layer: int, x_BTD: Tensor) -> dict[str, Any]:
        """Returns the arguments of a layer's attention, with keys and values if the layer shares them.

        Args:
            table: arguments without keys.
            layer: number of the layer. Layers are asked for in order.
            x_BTD: input of the layer, of all tokens up to layer l.
        """
        config, along, swift = self._config, self._along, self._config.swift
        if swift is None or layer < swift.first:
            return table
        if self._source_BTD is None:
            self._source_BTD = norm(config, along, x_BTD, self._params["s_norm_w"], self._params.get("s_norm_b"))
        if swift.is_leader(layer):
            p = self._params["blocks"][layer]
            wq, wk, wv, wo = (leaves.weight(config, p[name]) for name in ("s_wq", "s_wk", "s_wv", "wo"))
            w = nn.AttentionWeights(wq, wk, wv, wo, None, p.get("s_bk"), p.get("s_bv"))
            heads = nn.Heads(config.num_heads, config.kv_heads, config.head_dim)
            self._keys = nn.project_keys(self._source_BTD, w, heads, table=table.get("table"), **along._asdict())
        return table | {"keys": self._keys}


def add_swift_kv(config: Config, params: leaves.Params, *, first: int, group: int = 1) -> tuple[Config, leaves.Params]:
    """Returns the model with SwiftKV, and its weights at the start of their training.

    Queries begin as the layer's, keys and values as the mean over their group, and the norm as the first norm of layer
    l. `swift_trainable` is what learns then, by `distill.swift_loss`.

    Args:
        config: the model.
        params: parameters of the model, whole tensors.
        first: l, see `Swift`.
        group: g, see `Swift`.

    Raises:
        ValueError: `first` or `group` does not fit, or the model has a part that SwiftKV does not know.

    Example:
        >>> from shardfn.core import key
        >>> from shardfn.models import gpt
        >>> base = gpt.Config(vocab_size=64, num_layers=4, d_model=32, num_heads=4)
        >>> config, params = add_swift_kv(base, gpt.init(base, key(0)), first=2, group=2)
        >>> config.num_cache_layers, sorted(x for x in params["blocks"][3] if x.startswith("s_"))
        (3, ['s_bq', 's_wq'])
    """
    swift = Swift(first, group)
    made = dataclasses.replace(config, stacked=False, swift=swift)
    params = leaves.unstack_blocks(config, params)
    layers = [dict(p) for p in params["blocks"]]
    for i in range(first, config.num_layers):
        of_group = params["blocks"][i : i + group]
        layers[i] |= {f"s_{n}": layers[i][n].clone() for n in ("wq", "bq") if n in layers[i]}
        if swift.is_leader(i):
            names = [n for n in ("wk", "wv", "bk", "bv") if n in layers[i]]
            layers[i] |= {f"s_{n}": torch.stack([p[n] for p in of_group]).mean(0) for n in names}
    at = {} if first == config.num_layers else params["blocks"][first]
    norms = {f"s_norm_{x}": at[f"norm1_{x}"].clone() for x in "wb" if f"norm1_{x}" in at}
    return made, {**params, **norms, "blocks": layers}


def drop_swift_kv(config: Config, params: leaves.Params) -> tuple[Config, leaves.Params]:
    """Returns the model without SwiftKV: the inverse of `add_swift_kv`. Leaves are not copied.

    Example:
        >>> from shardfn.core import key
        >>> from shardfn.models import gpt
        >>> base = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4)
        >>> drop_swift_kv(*add_swift_kv(base, gpt.init(base, key(0)), first=1))[0] == base
        True
    """
    blocks = [{name: x for name, x in p.items() if not name.startswith("s_")} for p in params["blocks"]]
    rest = {name: x for name, x in params.items() if not name.startswith("s_")}
    return dataclasses.replace(config, swift=None), {**rest, "blocks": blocks}


def swift_trainable(config: Config) -> Any:
    """Returns True for the leaves of SwiftKV, and False for all others: `trainable` of `sharded_step`.

    Example:
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> swift_trainable(config)["embed"]
        False
    """
    tree: Any = leaves.specs(config)
    own = {name: name.startswith("s_") for name in tree if name != "blocks"}
    blocks = tree["blocks"]
    if isinstance(blocks, dict):
        return {**own, "blocks": dict.fromkeys(blocks, False)}
    return {**own, "blocks": [{name: name.startswith("s_") for name in p} for p in blocks]}
