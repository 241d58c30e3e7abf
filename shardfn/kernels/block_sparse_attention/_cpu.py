"""Attention over the tiles of a layout, on a CPU without a C++ compiler: torch's products, a block of queries at a time."""

from ._reference import backward as backward, forward as forward
