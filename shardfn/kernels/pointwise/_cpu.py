"""Activations of single elements, on a CPU without a C++ compiler: the definition."""

from ._reference import gated_silu as gated_silu
from ._reference import gelu as gelu
from ._reference import rotate as rotate
