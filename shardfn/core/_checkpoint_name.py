"""Names for values, by which a policy chooses the values that are kept for the backward."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from jaxtyping import Shaped
from torch import Tensor

from shardfn._torch import is_functorch_wrapped_tensor

from ._ambient import Ambient

Hears = Callable[[Tensor, str], None]
_HEARING = Ambient[Hears]("hears of named values", by_thread=True)


def checkpoint_name(x: Shaped[Tensor, "..."], name: str) -> Shaped[Tensor, "..."]:
    """Returns `x`, named for the transforms around.

    A policy of `remat` or `offload` can then decide by the name, such as "attn_out". The name belongs to the memory:
    views of `x` have the same name. Name a value where it is computed, before any use.

    Args:
        x: any tensor.
        name: name in policies. Several values may share a name.

    Returns:
        `x` itself.

    Raises:
        TypeError: `x` is not a tensor, or `name` not a string.
        ValueError: inside `offload`, where the name would change the decision made when an earlier use saved `x`.

    Example:
        >>> import torch
        >>> checkpoint_name(torch.ones(2), "attn_out")
        tensor([1., 1.])

    References:
        JAX's `jax.ad_checkpoint.checkpoint_name`
    """
    if not isinstance(x, Tensor) or not isinstance(name, str):
        raise TypeError(f"checkpoint_name takes a tensor and a string, got {type(x).__name__}, {type(name).__name__}.")
    # The wrappers of torch.func have no separate memory. Neither `remat` nor `offload` acts there.
    if _HEARING and not is_functorch_wrapped_tensor(x):
        for hears in _HEARING.all:
            hears(x, name)
    return x


def hearing_names(hears: Hears) -> AbstractContextManager[Any]:
    """Calls `hears(x, name)` for each value that is named inside.

    Example:
        >>> import torch
        >>> with hearing_names(lambda x, name: print(name)):
        ...     _ = checkpoint_name(torch.ones(2), "h")
        h
    """
    return _HEARING.bound(hears)
