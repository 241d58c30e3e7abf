"""Layout of the leaves of `models.gpt` in the files of `transformers`: GPT-2, Llama, Mistral, Qwen2, BLOOM.

One row for each leaf, read both ways: the tensor of the file, seen with the dims `view`, at index `pick`, its dims in
the order `order`, has the elements of the leaf in row-major order.

D model, H heads, G key and value heads, K head dim, F ffn, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.models import gpt


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
    """

    path: tuple[str, ...]
    name: str
    view: tuple[int, ...]
    pick: tuple[int, int] | None
    order: tuple[int, ...]
    shape: tuple[int, ...]
    heads: int | None = None

    @property
    def base(self) -> tuple[int, ...]:
        """Returns the dims after picking and ordering: the leaf's, except that the first two may be joined."""
        kept = [n for d, n in enumerate(self.view) if self.pick is None or d != self.pick[0]]
        return tuple(kept[d] for d in self.order)

    def of(self, whole: Tensor) -> Tensor:
        """Returns the leaf in a whole tensor of the file, as a view."""
        x = whole.view(self.view)
        return (x if self.pick is None else x.select(*self.pick)).permute(self.order)


def rows(config: gpt.Config, model_type: str) -> list[Row]:
    """Returns all leaves of a model, in the layout of one of `transformers`' types.

    Example:
        >>> config = gpt.Config.llama_like(vocab_size=64, num_layers=1, d_model=32, num_heads=4, d_ff=48)
        >>> rows(config, "llama")[0].name
        'model.embed_tokens.weight'
    """
    return {"gpt2": _gpt2_rows, "bloom": _bloom_rows}.get(model_type, _llama_rows)(config)


def _plain_row(path: tuple[str, ...], name: str, *view: int) -> Row:
    # In the file heads and their features are one dim: the first two of a projection and its bias, the last two of wo.
    heads = {"wq": 0, "wk": 0, "wv": 0, "bq": 0, "bk": 0, "bv": 0, "wo": 1}.get(path[-1])
    shape = view if heads is None else (*view[:heads], view[heads] * view[heads + 1], *view[heads + 2 :])
    return Row(path, name, view, None, tuple(range(len(view))), shape, heads)


def _transposed_row(path: tuple[str, ...], name: str, into: int, *view: int) -> Row:
    """Returns the row of a weight that is stored as [in, out].

    The first `into` dims of `view` belong to the input.
    """
    shape = math.prod(view[:into]), math.prod(view[into:])
    order = (*range(into, len(view)), *range(into))
    return Row(path, name, view, None, order, shape, 1 if into == 2 else None)


def _llama_rows(c: gpt.Config) -> list[Row]:
    D, F, V = c.d_model, c.ff_dim, c.vocab_size
    heads = {"q": (c.num_heads, c.head_dim), "k": (c.kv_heads, c.head_dim), "v": (c.kv_heads, c.head_dim)}
    out = [_plain_row(("embed",), "model.embed_tokens.weight", V, D), _plain_row(("norm_w",), "model.norm.weight", D)]
    block = {"norm1_w": ("input_layernorm.weight", D), "norm2_w": ("post_attention_layernorm.weight", D)}
    block |= {f"w{x}": (f"self_attn.{x}_proj.weight", *hk, D) for x, hk in heads.items()}
    block |= {"wo": ("self_attn.o_proj.weight", D, c.num_heads, c.head_dim)}
    if c.bias:
        block |= {f"b{x}": (f"self_attn.{x}_proj.bias", *hk) for x, hk in heads.items()}
        block |= {"bo": ("self_attn.o_proj.bias", D)} if c.bias is True else {}
    block |= {"w_gate": ("mlp.gate_proj.weight", F, D), "w_up": ("mlp.up_proj.weight", F, D)}
    block |= {"w_down": ("mlp.down_proj.weight", D, F)}
    out += [_plain_row(("blocks", leaf), "model.layers.{}." + name, *view) for leaf, (name, *view) in block.items()]
    return out if c.tie_embeddings else [*out, _plain_row(("head",), "lm_head.weight", V, D)]


def _gpt2_rows(c: gpt.Config) -> list[Row]:
    D, F, H, K = c.d_model, c.ff_dim, c.num_heads, c.head_dim
    h = "transformer.h.{}."
    out = [_plain_row(("embed",), "transformer.wte.weight", c.vocab_size, D)]
    out += [_plain_row(("position",), "transformer.wpe.weight", c.max_len, D)]
    out += [_plain_row((f"norm_{x}",), f"transformer.ln_f.{y}", D) for x, y in _WB]
    out += [_plain_row(("blocks", f"norm{i}_{x}"), f"{h}ln_{i}.{y}", D) for i in (1, 2) for x, y in _WB]
    for i, x in enumerate("qkv"):
        out.append(Row(("blocks", f"w{x}"), h + "attn.c_attn.weight", (D, 3, H, K), (1, i), (1, 2, 0), (D, 3 * D), 0))
        out.append(Row(("blocks", f"b{x}"), h + "attn.c_attn.bias", (3, H, K), (0, i), (0, 1), (3 * D,), 0))
    out += [_transposed_row(("blocks", "wo"), h + "attn.c_proj.weight", 2, H, K, D)]
    out += [_plain_row(("blocks", "bo"), h + "attn.c_proj.bias", D)]
    out += [
        _transposed_row(("blocks", "w_up"), h + "mlp.c_fc.weight", 1, D, F),
        _plain_row(("blocks", "b_up"), h + "mlp.c_fc.bias", F),
    ]
    out += [_transposed_row(("blocks", "w_down"), h + "mlp.c_proj.weight", 1, F, D)]
    out += [_plain_row(("blocks", "b_down"), h + "mlp.c_proj.bias", D)]
    return out if c.tie_embeddings else [*out, _plain_row(("head",), "lm_head.weight", c.vocab_size, D)]


def _bloom_rows(c: gpt.Config) -> list[Row]:
    D, F, H, K = c.d_model, c.ff_dim, c.num_heads, c.head_dim
    h, t = "transformer.h.{}.", "transformer."
    out = [_plain_row(("embed",), t + "word_embeddings.weight", c.vocab_size, D)]
    out += [_plain_row((f"embed_norm_{x}",), f"{t}word_embeddings_layernorm.{y}", D) for x, y in _WB]
    out += [_plain_row((f"norm_{x}",), f"{t}ln_f.{y}", D) for x, y in _WB]
    norms = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    out += [_plain_row(("blocks", f"{leaf}_{x}"), f"{h}{name}.{y}", D) for leaf, name in norms.items() for x, y in _WB]
    for i, x in enumerate("qkv"):  # queries, keys and values lie head by head
        name = h + "self_attention.query_key_value."
        out.append(Row(("blocks", f"w{x}"), name + "weight", (H, 3, K, D), (1, i), (0, 1, 2), (3 * D, D), 0))
        out.append(Row(("blocks", f"b{x}"), name + "bias", (H, 3, K), (1, i), (0, 1), (3 * D,), 0))
    block = {"wo": ("self_attention.dense.weight", D, H, K), "bo": ("self_attention.dense.bias", D)}
    block |= {"w_up": ("mlp.dense_h_to_4h.weight", F, D), "b_up": ("mlp.dense_h_to_4h.bias", F)}
    block |= {"w_down": ("mlp.dense_4h_to_h.weight", D, F), "b_down": ("mlp.dense_4h_to_h.bias", D)}
    out += [_plain_row(("blocks", leaf), h + name, *view) for leaf, (name, *view) in block.items()]
    return out if c.tie_embeddings else [*out, _plain_row(("head",), "lm_head.weight", c.vocab_size, D)]


_WB = (("w", "weight"), ("b", "bias"))


def empty_for(row: Row, dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised flat tensor of the size of `row`'s tensor."""
    return torch.empty(torch.Size(row.view).numel(), dtype=dtype, device="cpu")
