"""Values that autograd saves for the backward: their names in policies, the hooks in force, and the saving itself.

torch sets the hooks by a public context, and returns them by a private call.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from jaxtyping import Shaped
from torch import Tensor

from shardfn._torch import is_functorch_wrapped_tensor, top_saved_hooks

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
        raise TypeError(
            f"checkpoint_name expected a tensor and a string, got {type(x).__name__}, {type(name).__name__}."
        )
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


def saved_tensors_hooks(*, while_tracing: bool = True) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Returns the innermost hooks on tensors that autograd saves for the backward, as (pack, unpack).

    None without hooks.

    Args:
        while_tracing: whether hooks count that torch leaves unused while a graph is captured.

    Example:
        >>> import torch
        >>> with torch.autograd.graph.saved_tensors_hooks(abs, neg := lambda x: -x):
        ...     saved_tensors_hooks() == (abs, neg)
        True
        >>> saved_tensors_hooks() is None
        True
    """
    return top_saved_hooks(while_tracing)


def save_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    """Saves all inputs of an `autograd.Function`, each a tensor, for the backward and the jvp: its `setup_context`."""
    del output
    save_tensors(ctx, *inputs)


def save_tensors(ctx: Any, *tensors: Tensor | None) -> None:
    """Saves tensors of an `autograd.Function` for the backward and for the jvp."""
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
