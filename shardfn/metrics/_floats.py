"""Metrics as Python numbers, in a single transfer from each device that holds metrics."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn.core import not_scalar, raise_all


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
