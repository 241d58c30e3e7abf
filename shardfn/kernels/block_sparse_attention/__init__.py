"""Attention over the tiles of a layout."""

from ._api import Dropped as Dropped, Given as Given, Tiles as Tiles, block_sparse_attention as block_sparse_attention
from ._api import block_sparse_attention_backward as block_sparse_attention_backward
