"""`by_layer`: a norm for each layer, from the norms of the layer's leaves."""

from typing import Any

import torch
from torch import Tensor

from shardfn.core import PyTree, tree_entries, tree_leaves


def by_layer(norms: PyTree, prefix: str = "norm") -> dict[str, Tensor]:
    """Returns the Euclidean norms of layers: `sqrt(sum_i n_i^2)` over the leaves of each, as metrics with names.

    A leaf belongs to the layer of the leaf's path up to the first number: `blocks.3` of `params["blocks"][3]["wq"]`,
    and `model.layers.3` of `params["model.layers.3.mlp.up_proj.weight"]`. Without a number a leaf belongs to the
    parent, for example `embed` of `params["embed"]["weight"]`.

    Args:
        norms: tree of 0-d tensors, as `sf.leaf_norms` returns for gradients or parameters. A stacked leaf has a vector,
            with an entry for each layer.
        prefix: prefix of the names `prefix/layer`.

    Returns:
        0-d tensors by name, in the order of the leaves. `Logger.write` takes such a dict.

    Example:
        >>> three, four = torch.tensor(3.0), torch.tensor(4.0)
        >>> by_layer({"blocks": [{"w": three, "b": four}], "head": three}, "grad_norm")
        {'grad_norm/blocks.0': tensor(5.), 'grad_norm/head': tensor(3.)}
    """
    squares: dict[str, list[Tensor]] = {}
    for entries, norm in zip(tree_entries(norms), tree_leaves(norms), strict=True):
        for name, x in _split_layers(entries, norm):
            squares.setdefault(f"{prefix}/{name}" if name else prefix, []).append(x.square())
    return {name: torch.stack(xs).sum().sqrt() for name, xs in squares.items()}


def _split_layers(entries: tuple[Any, ...], norm: Tensor) -> list[tuple[str, Tensor]]:
    """Returns the layers of a leaf, with the leaf's norm in each."""
    parts = [part for entry in entries for part in str(entry).split(".")]
    if norm.ndim:
        parent = ".".join(parts[:-1] or parts)
        return [(f"{parent}.{i}", x) for i, x in enumerate(norm.unbind())]
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    own = (parts[:-1] or parts) if number is None else parts[: number + 1]
    return [(".".join(own), norm)]
