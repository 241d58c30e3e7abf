"""Metrics as numbers, in a single transfer from each device, and norms by layer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn.core import PyTree, not_scalar, raise_all, tree_entries, tree_leaves


def to_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns metrics as floats. All tensors of a device are stacked there and copied at once.

    Waits for the device, so a loop that calls the function only every few steps keeps the device busy.

    Args:
        metrics: 0-d tensors of any dtype, on any device, and numbers.

    Returns:
        The same names in the same order. Values pass through float64, exact for float32 and integers below 2^53. On a
        device without float64 values pass through float32.

    Raises:
        TypeError: a value is neither a tensor nor a number. The message lists all such values.

    Example:
        >>> to_floats({"loss": torch.tensor(0.5), "finite": torch.tensor(True), "learning_rate": 1e-3})
        {'loss': 0.5, 'finite': 1.0, 'learning_rate': 0.001}
    """
    raise_all(
        TypeError,
        "metrics are 0-d tensors or numbers; take a mean, or leave these out:",
        [f"metrics[{name!r}] is {told}" for name, x in metrics.items() if (told := not_scalar(x))],
    )
    by_device: dict[torch.device, list[str]] = {}
    for name, x in metrics.items():
        if isinstance(x, Tensor):
            by_device.setdefault(x.device, []).append(name)
    found: dict[str, float] = {}
    for device, names in by_device.items():
        wide = torch.float32 if device.type == "mps" else torch.float64
        row = torch.stack([metrics[name].detach().to(wide) for name in names])
        found |= dict(zip(names, row.tolist(), strict=True))
    return {name: found[name] if name in found else float(x) for name, x in metrics.items()}


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
