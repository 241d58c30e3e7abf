"""Products of groups of rows with a matrix each."""

from ._api import grouped_outer as grouped_outer, grouped_product as grouped_product
