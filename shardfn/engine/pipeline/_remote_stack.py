"""Placeholder for a stack whose layers are on several ranks.

Code outside of the layers gets the placeholder, and must not use the placeholder.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import DisableTorchFunctionSubclass
from shardfn.core import MetadataTensor


class ElsewhereTensor(MetadataTensor):
    """This rank's rows of a stack, for code outside of the layers: with shape and dtype, and without values.

    Raises:
        ValueError: something is computed from the placeholder. The result would only cover this rank's layers.
    """

    @staticmethod
    def of(x: Tensor) -> "ElsewhereTensor":
        """Returns a cached placeholder with the shape, dtype and device of this rank's block of a stacked leaf."""
        with DisableTorchFunctionSubclass():
            return _placeholder_like(tuple(x.shape), x.dtype, x.device)

    @classmethod
    def on_values(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuses the function."""
        del args, kwargs
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name
        raise ValueError(
            f"the loss of a pipeline uses the stacked layers outside of them, in {name}: they are on several ranks, and"
            " each would use its own alone. Let each layer add its part to the value that it hands on, or use an option"
            " of the optimizer (weight decay)."
        )


@functools.lru_cache(maxsize=256)
def _placeholder_like(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> ElsewhereTensor:
    return ElsewhereTensor.empty(shape, dtype, device)
