"""Products of groups of rows with a matrix each, on a CPU without a C++ compiler: the definition."""

from ._reference import grouped_outer as grouped_outer
from ._reference import grouped_product as grouped_product
