"""Norms of rows, with the same bits in any batch and on any processor."""

from ._api import row_norm as row_norm
