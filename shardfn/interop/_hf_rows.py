"""Layout of the leaves of `models.gpt` in the files of `transformers`, for the types of `_hf_families.py`.

One row for each leaf, read both ways: the tensor of the file, seen with the dims `view`, at index `pick`, or in the
range `span` of a dim, its dims in the order `order`, has the elements of the leaf in row-major order. A leaf may also
be spread over tensors, such as the experts of a layer.

D model, H heads, G key and value heads, K head dim, F ffn, V vocabulary, E experts, C latent.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from shardfn import core
from shardfn.models import gpt

from ._hf_families import FAMILIES, Family
from ._hf_swift import SWIFT


class Row(NamedTuple):
    """Place of a single leaf in a file.

    Attributes:
        path: path of the leaf, for example ("embed",), or ("blocks", "wq") for a leaf of every block.
        name: name of the tensor, with "{}" for the number of the block.
        view: dims of the tensor's view.
        pick: dim of `view` and index along the dim, if the tensor has several leaves.
        order: remaining dims, in the order of the leaf.
        shape: shape of the tensor itself.
        heads: dim of the leaf that counts heads. The next dim has the features, and both may be one dim. None without
            heads.
        span: dim of `view`, and first and last index + 1 along the dim, if the tensor has leaves of several sizes.
        layers: layers that have a leaf of a block. None: all.
        spread: dims before the dims of a tensor, where the leaf is spread over tensors.
        names: names of these tensors, in order, with "{}" for the number of the block. The first is `name`.
    """

    path: tuple[str, ...]
    name: str
    view: tuple[int, ...]
    pick: tuple[int, int] | None
    order: tuple[int, ...]
    shape: tuple[int, ...]
    heads: int | None = None
    span: tuple[int, int, int] | None = None
    layers: tuple[int, ...] | None = None
    spread: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def list_names(self, i: int) -> list[str]:
        """Returns the names of the tensors of a block's leaf."""
        return [name.format(i) for name in self.names or (self.name,)]

    def list_layers(self, num: int) -> Sequence[int]:
        """Returns the layers of `num` that have the leaf, or 0 for a leaf outside of blocks."""
        return (0,) if len(self.path) == 1 else range(num) if self.layers is None else self.layers

    @property
    def base(self) -> tuple[int, ...]:
        """Returns the dims after picking and ordering: the leaf's, except that the first two may be joined."""
        view = list(self.view)
        if self.span is not None:
            dim, start, stop = self.span
            view[dim] = stop - start
        kept = [n for d, n in enumerate(view) if self.pick is None or d != self.pick[0]]
        return (*self.spread, *(kept[d] for d in self.order))

    def of(self, whole: Tensor) -> Tensor:
        """Returns the leaf in a whole tensor of the file, as a view."""
        x = whole.view(self.view)
        if self.span is not None:
            dim, start, stop = self.span
            x = x.narrow(dim, start, stop - start)
        return (x if self.pick is None else x.select(*self.pick)).permute(self.order)


def rows(config: gpt.Config, model_type: str) -> list[Row]:
    """Returns all leaves of a model, in the layout of one of `transformers`' types.

    Raises:
        ValueError: the type has no tensors for leaves of the config. The message lists all.

    Example:
        >>> config = gpt.Config.llama_like(vocab_size=64, num_layers=1, d_model=32, num_heads=4, d_ff=48)
        >>> rows(config, "llama")[0].name
        'model.embed_tokens.weight'
    """
    family = FAMILIES[model_type.removesuffix(SWIFT)]
    tree = gpt.leaf_shapes(dataclasses.replace(config, per_head=True, stacked=False))
    blocks, fused = tree.pop("blocks"), _list_fused(config, family)
    block = {name: shape for p in blocks for name, shape in p.items()}
    places = {name: tuple(i for i, p in enumerate(blocks) if name in p) for name in block}
    core.raise_all(
        ValueError,
        f"this Config is no {model_type} of transformers:",
        [f"it has no {name}" for name in (*tree, *block) if name not in family.names and name not in fused],
    )
    out = [_plain_row((name,), family.names[name], *shape) for name, shape in tree.items()]
    for name, shape in block.items():
        own = fused.get(name)
        if own is None:
            plain = _plain_row(("blocks", name), family.block + family.names[name], *shape)
            own = [plain._replace(layers=places[name])]
        out += own
    return out + _list_biases(config, family)


def _plain_row(path: tuple[str, ...], name: str, *view: int) -> Row:
    # In the file heads and their features are one dim: the first two of a projection and its bias, the last two of wo.
    heads = {"wq": 0, "wk": 0, "wv": 0, "bq": 0, "bk": 0, "bv": 0, "wo": 1}.get(path[-1].removeprefix("s_"))
    shape = view if heads is None else (*view[:heads], view[heads] * view[heads + 1], *view[heads + 2 :])
    return Row(path, name, view, None, tuple(range(len(view))), shape, heads)


def _transposed_row(path: tuple[str, ...], name: str, into: int, *view: int) -> Row:
    """Returns the row of a weight that is stored as [in, out].

    The first `into` dims of `view` belong to the input.
    """
    shape = math.prod(view[:into]), math.prod(view[into:])
    order = (*range(into, len(view)), *range(into))
    return Row(path, name, view, None, order, shape, 1 if into == 2 else None)


def _list_fused(c: gpt.Config, family: Family) -> dict[str, list[Row]]:
    """Returns the rows of a block's leaves that share a tensor, or lie in it in another order, by their names."""
    return (
        {name: [row] for name, row in _list_one_by_one(c, family).items()}
        | _list_latent(c, family)
        | _list_experts(c, family)
    )


def _list_one_by_one(c: gpt.Config, family: Family) -> dict[str, Row]:
    out: dict[str, Row] = {}
    D, F, K = c.d_model, c.ff_dim, c.head_dim
    kind, name = family.fused.get("qkv", ("", ""))
    nums = c.num_heads, c.kv_heads, c.kv_heads
    for i, x in enumerate("qkv" if kind else ""):
        H, whole, start = nums[i], sum(nums) * K, sum(nums[:i])
        w, b = family.block + name + ".weight", family.block + name + ".bias"
        if kind == "gpt2":  # [in, out]
            out[f"w{x}"] = Row(("blocks", f"w{x}"), w, (D, 3, H, K), (1, i), (1, 2, 0), (D, whole), 0)
            out[f"b{x}"] = Row(("blocks", f"b{x}"), b, (3, H, K), (0, i), (0, 1), (whole,), 0)
        elif kind == "by_head":  # queries, keys and values lie head by head
            out[f"w{x}"] = Row(("blocks", f"w{x}"), w, (H, 3, K, D), (1, i), (0, 1, 2), (whole, D), 0)
            out[f"b{x}"] = Row(("blocks", f"b{x}"), b, (H, 3, K), (1, i), (0, 1), (whole,), 0)
        else:
            span = 0, start, start + H
            out[f"w{x}"] = Row(("blocks", f"w{x}"), w, (sum(nums), K, D), None, (0, 1, 2), (whole, D), 0, span)
    if "gate_up" in family.fused:
        w = family.block + family.fused["gate_up"][1] + ".weight"
        for i, x in enumerate(("w_gate", "w_up")):
            out[x] = Row(("blocks", x), w, (2, F, D), (0, i), (0, 1), (2 * F, D))
    if "in_first" in family.fused:
        sizes = (c.num_heads, K, D), (D, F), (F, D)
        for x, n, size in zip(*(text.split() for text in family.fused["in_first"]), sizes, strict=True):
            out[x] = _transposed_row(("blocks", x), f"{family.block}{n}.weight", len(size) - 1, *size)
    return out


def _list_latent(c: gpt.Config, family: Family) -> dict[str, list[Row]]:
    """Returns the rows of latent attention. Keys and values of a head lie together, and queries have two names."""
    if c.latent is None or "wq_a" not in family.names:
        return {}
    H, N, V, C = c.num_heads, c.latent.nope_dim, c.latent.v_dim, c.latent.kv_rank
    query = family.names["wq" if c.latent.q_rank is None else "wq_b"]
    shape = H, c.latent.head_dim, c.latent.q_rank or c.d_model
    out = {"wq": [_plain_row(("blocks", "wq"), family.block + query, *shape)]}
    for name, start, stop in (("wk_b", 0, N), ("wv_b", N, N + V)):
        row = Row(
            ("blocks", name), family.block + family.names["wkv_b"], (H, N + V, C), None, (0, 1, 2), (H * (N + V), C)
        )
        out[name] = [row._replace(span=(1, start, stop))]
    return out


def _list_experts(c: gpt.Config, family: Family) -> dict[str, list[Row]]:
    """Returns the rows of layers with experts: with a tensor for each expert, or in the order of gpt-oss."""
    if c.experts is None or "router" not in family.names:
        return {}
    D, F, layers = c.d_model, c.experts.d_ff or c.ff_dim, tuple(c.expert_layers)
    start, E = family.block + family.names["experts"], c.num_experts[0]
    if family.names["experts"].endswith("experts."):  # of Qwen2-MoE, DeepSeek and others
        gated = tuple(f"{start}{{e}}.{x}_proj.weight" for x in ("gate", "up"))
        each = [name.replace("{e}", str(e)) for e in range(E) for name in gated]
        down = [f"{start}{e}.down_proj.weight" for e in range(E)]
        out = {
            "e_gate_up": [_spread_row("e_gate_up", each, (E, 2), (F, D), layers)],
            "e_down": [_spread_row("e_down", down, (E,), (D, F), layers)],
        }
        dense = tuple(i for i in range(c.num_layers) if i not in layers)
        for x, turned in (("gate", False), ("up", False), ("down", True)):
            rows = []
            for where, place, size in ((dense, "mlp.", c.ff_dim), (layers, family.names["shared"], c.shared_ff_dim)):
                shape = (D, size) if turned else (size, D)
                row = _plain_row(("blocks", f"w_{x}"), f"{family.block}{place}{x}_proj.weight", *shape)
                rows += [row._replace(layers=where)] if where else []
            out[f"w_{x}"] = rows
        return out
    whole = "e_gate_up", "gate_up_proj", (E, D, F, 2), (0, 3, 2, 1), (E, D, 2 * F)
    bias = "e_b_gate_up", "gate_up_proj_bias", (E, F, 2), (0, 2, 1), (E, 2 * F)
    back = "e_down", "down_proj", (E, F, D), (0, 2, 1), (E, F, D)
    last = "e_b_down", "down_proj_bias", (E, D), (0, 1), (E, D)
    return {
        name: [Row(("blocks", name), f"{start}.{text}", view, None, order, shape)]
        for name, text, view, order, shape in (whole, bias, back, last)
    }


def _spread_row(
    leaf: str, names: Sequence[str], spread: tuple[int, ...], view: tuple[int, ...], layers: tuple[int, ...]
) -> Row:
    order = tuple(range(len(view)))
    return Row(("blocks", leaf), names[0], view, None, order, view, layers=layers, spread=spread, names=tuple(names))


def _list_biases(c: gpt.Config, family: Family) -> list[Row]:
    """Returns the row of the biases of the choice of experts, a tensor for each layer with experts."""
    if c.experts is None or not c.experts.bias_rate or "expert_bias" not in family.names:
        return []
    names = [(family.block + family.names["expert_bias"]).format(i) for i in c.expert_layers]
    view = (c.num_experts[0],)
    return [Row(("expert_bias",), names[0], view, None, (0,), view, spread=(len(names),), names=tuple(names))]
