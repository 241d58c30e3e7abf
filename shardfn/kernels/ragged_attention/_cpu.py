"""Attention of ragged tokens over a paged cache, on a CPU without a C++ compiler: the definition."""

from ._reference import ragged_attention as ragged_attention
