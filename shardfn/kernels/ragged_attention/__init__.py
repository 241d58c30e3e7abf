"""Attention of ragged tokens over a paged cache, which first receives their keys and values."""

from ._api import ragged_attention as ragged_attention
