"""Attention over the tiles of a layout, on a CPU without a compiler: torch's products, a block of queries at a time."""

from ._reference import backward as backward
from ._reference import forward as forward
