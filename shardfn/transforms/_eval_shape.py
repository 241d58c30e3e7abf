"""`eval_shape`: shapes of a function's result without its computation, and abstract tensors for lowered steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import DisableTorchDispatch, FakeTensorMode
from shardfn.capture import fake
from shardfn.collectives import GlobalTensor
from shardfn.core import drawn_as_shapes, frozen, is_frozen, tree_map


def eval_shape(f: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of `f(*args)` as tensors with shape and dtype but no data, without computing.

    Args:
        f: function of trees of tensors, such as `step.init`.
        *args: arguments. Tensors may be abstract.

    Returns:
        The tree that `f` returns, with tensors on the device "meta".

    Example:
        >>> import torch
        >>> eval_shape(lambda x: x @ x.T, torch.empty(1 << 20, 8, device="meta")).shape
        torch.Size([1048576, 1048576])
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, drawn_as_shapes():
        inputs = tree_map(lambda x: fake(x, "cpu") if isinstance(x, Tensor) else x, args)
        return tree_map(_make_meta, f(*inputs))


def _make_meta(x: Any) -> Any:
    if isinstance(x, GlobalTensor):
        return x.with_block(_make_meta(x.held))
    if isinstance(x, Tensor):
        with DisableTorchDispatch():
            out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return frozen(out) if is_frozen(x) else out
    return x
