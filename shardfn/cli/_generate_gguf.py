"""Weights of a GGUF file in codes for linear layers, Q8_0 and Q4_1, without change.

Transformers decodes a file and changes the order of rows. So each weight is compared with the weight of transformers:
blocks are taken where the decoded values are equal, in the file's order or with the rows of each head's halves
separated, as in Llama's queries and keys. Any other weight is rounded.
"""

import importlib
import pathlib
from typing import Any

import torch
from torch import Tensor

from shardfn.core import Draw, PyTree
from shardfn.kernels import BLOCK_BYTES, GROUP, pack_blocks, unpack_rows
from shardfn.models import gpt

_KINDS = ("Q8_0", "Q4_1")
_BLOCK_NAMES = {
    "wq": "attn_q",
    "wk": "attn_k",
    "wv": "attn_v",
    "wo": "attn_output",
    "w_up": "ffn_up",
    "w_gate": "ffn_gate",
    "w_down": "ffn_down",
}


def with_blocks(path: pathlib.Path, config: gpt.Config, params: PyTree) -> tuple[PyTree, int]:
    """Returns the parameters of a model, with the blocks of a GGUF file in place of decoded values.

    Args:
        path: path of the file.
        config: config of the model, without stacked layers.
        params: parameters of the file as transformers decodes them, as from `interop.gpt_from_hf`.

    Returns:
        The parameters, and the number of parameters in blocks.
    """
    tensors = {x.name: x for x in importlib.import_module("gguf").GGUFReader(path).tensors}
    tree: Any = params
    heads = {"wq": config.num_heads, "wk": config.kv_heads}
    head = "embed" if config.tie_embeddings else "head"
    found = 0

    def blocks_of(leaf: Any, names: tuple[str, ...], halves: int) -> Any:
        nonlocal found
        for name in names:
            stored = tensors.get(name)
            if stored is not None and stored.tensor_type.name in _KINDS:
                blocks = _match_blocks(torch.from_numpy(stored.data.copy()), _load_value(leaf), halves)
                if blocks is not None:
                    found += 1
                    return blocks
        return leaf

    blocks = [
        {
            name: blocks_of(x, (f"blk.{i}.{_BLOCK_NAMES[name]}.weight",), heads.get(name, 0))
            if name in _BLOCK_NAMES
            else x
            for name, x in p.items()
        }
        for i, p in enumerate(tree["blocks"])
    ]
    return tree | {"blocks": blocks, head: blocks_of(tree[head], ("output.weight", "token_embd.weight"), 0)}, found


def _load_value(leaf: Any) -> Tensor:
    return leaf.full() if isinstance(leaf, Draw) else leaf


def _match_blocks(blocks: Tensor, weight: Tensor, heads: int) -> Tensor | None:
    """Returns the blocks in the order and shape of a weight's rows, or None where values differ."""
    width = weight.shape[-1]
    rows = blocks.reshape(blocks.shape[0], -1)
    if width % GROUP or rows.shape[1] * GROUP not in [weight.numel() // len(rows) * n for n in BLOCK_BYTES.values()]:
        return None
    k = weight.numel() // len(rows)
    for order in (rows, *([_join_halves(rows, heads)] if heads else [])):
        if torch.equal(unpack_rows(pack_blocks(order, k), len(order), k), weight.reshape(len(order), k).float()):
            return order.reshape(*weight.shape[:-1], -1)
    return None


def _join_halves(rows: Tensor, heads: int) -> Tensor:
    """Returns the rows of heads with one half after the other, from alternating halves."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
