"""The saved-tensor hooks in force: torch sets them by a public context, and returns them by a private call."""

from collections.abc import Callable
from typing import Any

from shardfn._torch import top_saved_hooks


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
