"""The room's torch ops: every kernel is one node of a captured graph."""

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("shardfn_kernels", "DEF")


def define(schema: str, impl: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Makes `torch.ops.shardfn_kernels.<name>` of a schema, what it computes and the shapes of what it returns."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardfn_kernels::{name}", fake, lib=LIBRARY)
