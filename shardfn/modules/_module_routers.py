"""Balance losses that a mixture of experts adds to the loss, over the rows of one rank."""

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardfn.core import named_modules

_COEFFICIENT = re.compile(r"aux_loss_coef|z_loss_coef|moe_loss_weight")


def warn_of_own_balance(module: nn.Module) -> None:
    """Warns of a module with a balance loss by configuration."""
    for config in _list_configs(module):
        if getattr(config, "output_router_logits", False):
            _warn_balance(config)
            return


def warn_of_asked_balance(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Warns of a balance loss by a call's arguments, without the configuration."""
    if kwargs.get("output_router_logits"):
        configs = list(_list_configs(module))
        if configs and not any(getattr(config, "output_router_logits", False) for config in configs):
            _warn_balance(configs[0])


def _list_configs(module: nn.Module) -> Iterator[Any]:
    found: dict[int, Any] = {}
    for _, sub in named_modules(module):
        config: Any = getattr(sub, "config", None)
        for one in (config, getattr(config, "text_config", None), getattr(config, "ffn_config", None)):
            found.setdefault(id(one), one)
    yield from (x for x in found.values() if x is not None and any(_loss_coefficients(x)))


def _loss_coefficients(config: Any) -> dict[str, float]:
    named = vars(config) if hasattr(config, "__dict__") else {}
    return {k: v for k, v in named.items() if _COEFFICIENT.search(k) and isinstance(v, float) and v}


def _warn_balance(config: Any) -> None:
    pairs = ", ".join(f"{name}={value}" for name, value in _loss_coefficients(config).items())
    warnings.warn(
        f"output_router_logits=True has the module add a balance loss of its own ({pairs}), computed over the rows of a"
        " call: over several ranks or microbatches a step takes the mean of these losses, which is not that of the"
        " global batch. Set output_router_logits=False and add a balance loss over all rows to the loss, or accept the"
        " difference.",
        UserWarning,
        stacklevel=3,
    )
