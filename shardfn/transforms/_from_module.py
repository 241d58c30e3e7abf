"""`from_module`: an `nn.Module` as a pure function of its parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def from_module(module: nn.Module) -> tuple[dict[str, Tensor], Callable[..., Any]]:
    """Splits a module into its parameters and a pure function of them.

    Tied parameters appear once, under their first name, and stay tied. Buffers are closed over. The module itself is
    left
    as it is; its own parameters may be freed with `module.to("meta")` once a step has taken them, if it has no buffers.

    Args:
        module: any module, in the mode (train or eval) it should run in.

    Returns:
        `(params, apply)`: params by name, detached, and `apply(params, *args, **kwargs)` = the module's forward.

    Example:
        >>> params, apply = from_module(nn.Linear(2, 1, bias=False))
        >>> sorted(params), apply(params, torch.zeros(3, 2)).shape
        (['weight'], torch.Size([3, 1]))
    """
    params = {name: p.detach() for name, p in module.named_parameters()}

    def apply(params: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(module, params, args, kwargs)

    return params, apply
