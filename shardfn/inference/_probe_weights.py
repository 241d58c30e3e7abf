"""Values in place of weights that are read later: enough for a probe of a model's code, in the memory of a layer.

A probe compares the results of functions with one another, on any values. So leaves of equal shape share memory, and so
do the packed forms.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn import kernels

# Number of values after which a leaf begins again: a prime, so that rows differ.
_PERIOD = 65521


def make_probe_weights(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns random values of the shapes and dtypes of some leaves.

    Args:
        like: leaves, which may be deferred, and are not read.

    Returns:
        New tensors by name. Tensors of equal shape and dtype share their memory.

    Example:
        >>> made = make_probe_weights({"a": torch.ones(3, 2), "b": torch.ones(3, 2)})
        >>> made["a"] is made["b"], made["a"].data_ptr() == made["b"].data_ptr()
        (False, True)
    """
    draw, kept = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0)), dict[Any, Tensor]()
    out = {}
    for name, x in like.items():
        key = tuple(x.shape), x.dtype
        if key not in kept:
            kept[key] = _spread_values(draw, *key)
        out[name] = kept[key].view_as(kept[key])
    return out


def packed_once() -> Callable[..., Tensor]:
    """Returns `kernels.pack_rows` that packs each memory once, for leaves that share memory and stay unchanged.

    Example:
        >>> pack, x = packed_once(), torch.ones(3, 2)
        >>> pack(x).data_ptr() == pack(x.view(3, 2)).data_ptr()
        True
    """
    kept: dict[Any, Tensor] = {}

    def pack_weight(weight: Tensor, quantization: kernels.Quantization | None = None) -> Tensor:
        key = weight.data_ptr(), weight.shape, weight.stride(), quantization
        if key not in kept:
            kept[key] = kernels.pack_rows(weight, quantization)
        return kept[key].view_as(kept[key])

    return pack_weight


def _spread_values(draw: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns values that leave rows of about the same size behind a product, and around 1 for the scales of norms."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    one = 1 + 0.1 * draw if len(shape) < 2 else draw / math.sqrt(shape[-1])
    size = math.prod(shape)
    return one.to(dtype).repeat(-(-size // _PERIOD))[:size].view(shape)
