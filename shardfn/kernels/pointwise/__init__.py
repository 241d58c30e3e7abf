"""Activations of single elements, with the same bits in any batch and on any processor."""

from ._api import gated_silu as gated_silu, gated_silu_gradient as gated_silu_gradient
from ._api import gelu as gelu, rotate as rotate
