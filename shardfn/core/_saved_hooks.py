"""The saved-tensor hooks in force: torch sets them by a public context, and returns them by a private call."""

from collections.abc import Callable
from typing import Any

import torch

_AUTOGRAD: Any = getattr(torch._C, "_autograd")  # noqa: B009  # torch has no stub of it


def saved_tensors_hooks(*, while_tracing: bool = True) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost hooks on tensors that autograd saves for the backward, as (pack, unpack); None without any.

    Args:
        while_tracing: whether those count that torch leaves unused while a graph is captured.

    Example:
        >>> with torch.autograd.graph.saved_tensors_hooks(abs, neg := lambda x: -x):
        ...     saved_tensors_hooks() == (abs, neg)
        True
        >>> saved_tensors_hooks() is None
        True
    """
    return _AUTOGRAD._top_saved_tensors_default_hooks(while_tracing)
