"""Norms of rows, on a CPU without a C++ compiler: the definition."""

from ._reference import row_norm as row_norm
